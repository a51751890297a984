"""Scenarios of 2 and of 3 processes, forked from one that has imported everything: python
scenarios_worker.py JOB.json

JOB.json: {"folder": with a folder for each number of processes, in which each writes what it
    found}.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import GradScalerKwargs
from forked import together
from processes import (
    LAST,
    SEED,
    WINDOW,
    Collectives,
    h,
    make_accelerator,
    make_windows,
    prepare,
    save,
    whole_gradients,
)
from steps import backward_window, train_step
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import hf_ga
from hf_ga.model.override import override
from hf_ga.order.order import epoch_order
from hf_ga.order.plan import Plan, plan_window
from hf_ga.parallel import gradient_sums
from hf_ga.parallel.gradient_sums import sum_gradients
from hf_ga.parallel.prepare import enable_fp16_on_cpu, full_state_dict
from hf_ga.recovery.checkpoint import state_sha256

STEPS, MAX_NORM = 30, 0.1  # as the README says
MICRO_BATCHES = (1, 4)  # a process, whose collectives are counted
KINDS = ("ddp", "fsdp1", "fsdp2")


def gradients(folder: Path, kind: str) -> None:
    """Both windows of an epoch, 64 samples and 13, dropout on, reduced once and, under FSDP, after
    each micro-batch.
    """
    accelerator = make_accelerator(kind, "GPT2Block")
    samples = h.token_samples(WINDOW + LAST)
    model, _ = prepare(accelerator, kind, h.gpt2(0.1), samples)
    for window in make_windows(accelerator, samples):
        for each in (False, True)[: 1 if kind == "ddp" else 2]:
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = each
            model.zero_grad(set_to_none=True)
            result = backward_window(accelerator, model, window)
            name = f"gradients {kind} {window.index} {'each' if each else 'once'}"
            save(
                accelerator,
                folder,
                name,
                whole_gradients(model),
                loss=result.loss,
                rule=result.num_targets,
            )


def added(folder: Path, kind: str) -> None:
    """The gradients of two windows, one added to the other, and of one without targets."""
    accelerator = make_accelerator(kind, "GPT2Block")
    samples = h.token_samples(WINDOW + LAST)
    model, _ = prepare(accelerator, kind, h.gpt2(0.1), samples)
    windows = [
        *make_windows(accelerator, samples),
        *make_windows(accelerator, [h.without_targets(s) for s in samples[:3]]),
    ]
    skipped = [backward_window(accelerator, model, window).skipped for window in windows]
    save(accelerator, folder, f"added {kind}", whole_gradients(model), skipped=skipped)


def buckets(folder: Path) -> None:
    """Gradients in buckets of 64 bytes: two types, some missing here or everywhere. Each process
    has its own numbers.
    """
    index = make_accelerator("ddp").process_index
    types = [torch.float32, torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [nn.Parameter(torch.zeros(2 + i, 3, dtype=dtype)) for i, dtype in enumerate(types)]
    for i, parameter in enumerate(parameters):
        if i != 3 and (i != 1 or index):
            parameter.grad = torch.full_like(parameter, 10.0 * i + index + 1).t().contiguous().t()
    with override(gradient_sums, BUCKET_BYTES=64):
        sum_gradients(parameters, [True, True, True, False, True])
    sums = [
        None if p.grad is None else [p.grad.min().item(), p.grad.max().item(), str(p.grad.dtype)]
        for p in parameters
    ]
    (folder / f"buckets.{index}.json").write_text(json.dumps(sums))


def steps(folder: Path, kind: str) -> None:
    """Steps of AdamW with clipping, over several epochs."""
    accelerator = make_accelerator(kind, "GPT2Block")
    samples = h.token_samples(WINDOW + LAST)
    model, optimizer = prepare(accelerator, kind, h.gpt2(0.1), samples)
    windows = make_windows(accelerator, samples)
    results = []
    while len(results) < STEPS:
        results += [
            train_step(accelerator, model, optimizer, w, max_grad_norm=MAX_NORM) for w in windows
        ]
    weights = {name: tensor.clone() for name, tensor in full_state_dict(accelerator, model).items()}
    save(
        accelerator,
        folder,
        f"steps {kind}",
        weights,
        losses=[r.loss for r in results],
        norms=[r.grad_norm for r in results],
    )


def naive(folder: Path) -> None:
    """The control: DDP's average of local means (Accelerate's usual loop)."""
    accelerator = make_accelerator("ddp")
    samples = h.token_samples(WINDOW + LAST)
    model, _ = prepare(accelerator, "ddp", h.gpt2(), samples)
    for window in make_windows(accelerator, samples, planner=h.by_number(WINDOW)):
        model.zero_grad(set_to_none=True)
        accelerator.backward(
            model(**window.micro_batches[0].batch).loss * 2
        )  # undo the division by accumulation steps
        save(accelerator, folder, f"naive means {window.index}", whole_gradients(model))


def larger() -> nn.Module:
    """1.1 MB of gradients."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return h.seeded(
        lambda: tf.BertForSequenceClassification(
            tf.BertConfig(vocab_size=40, num_labels=3, **sizes)
        )
    )()


def counted(folder: Path, kind: str) -> None:
    """Collectives of one window at 1 and 4 micro-batches a process."""
    accelerator = make_accelerator(kind)
    samples = h.class_samples(WINDOW)
    model, _ = prepare(accelerator, kind, larger(), samples)
    share = WINDOW // accelerator.num_processes
    size = sum(p.numel() * 4 for p in larger().parameters())
    for micro_batches in MICRO_BATCHES:
        (window,) = make_windows(
            accelerator, samples, planner=h.by_number(-(-share // micro_batches))
        )
        for each in (False, True)[: 1 if kind == "ddp" else 2]:
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = each
            backward_window(accelerator, model, window)  # FSDP sets itself up in its first forward
            model.zero_grad(set_to_none=True)
            with Collectives() as sent:
                backward_window(accelerator, model, window)
            name = f"counted {kind} {micro_batches} {'each' if each else 'once'}"
            facts = {
                "calls": sent.calls,
                "bytes": sent.bytes,
                "small": sent.small,
                "gradient_bytes": size,
            }
            save(accelerator, folder, name, None, micro_batches=len(window.micro_batches), **facts)


class OverflowingBias(nn.Linear):
    """The gradient of the bias alone can be infinite: under FSDP it lies in one process's shard."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.overflows = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias * 1
        if self.overflows and bias.requires_grad:
            bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        return nn.functional.linear(x, self.weight, bias)


def overflow(folder: Path, kind: str) -> None:
    """fp16: in the second window a gradient of the last process is infinite."""
    samples = h.class_samples(WINDOW)
    accelerator = make_accelerator(
        kind, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10)]
    )
    enable_fp16_on_cpu(accelerator)
    base = h.bert_classifier(0.1)
    base.classifier = OverflowingBias(base.classifier)
    model, optimizer = prepare(accelerator, kind, base, samples)
    skipped = []
    scales = []
    digests = []
    for window in make_windows(accelerator, samples, global_batch_size=16):
        base.classifier.overflows = (
            window.index == 1 and accelerator.process_index == accelerator.num_processes - 1
        )
        result = train_step(accelerator, model, optimizer, window, max_grad_norm=1.0)
        skipped.append([result.skipped, result.overflowed])
        scales.append(accelerator.scaler.get_scale())
        digests.append(digest(model))
    save(
        accelerator,
        folder,
        f"overflow {kind}",
        None,
        skipped=skipped,
        scales=scales,
        digests=digests,
    )


def digest(model: nn.Module) -> str:
    """Of the bits of all parameters: of this process's copy or, where they lie in shards, of the
    whole, gathered here.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            whole = [p.detach().clone() for p in model.parameters()]
    else:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return state_sha256(nn.ParameterList(whole).state_dict())


def options(folder: Path, kind: str) -> None:
    """FSDP with activation checkpointing, and in bf16, whose sums stay in float32."""
    samples = h.token_samples(WINDOW)
    for option in ("checkpointing", "bf16"):
        precision = "bf16" if option == "bf16" else "no"
        accelerator = make_accelerator(f"{kind} {option}", "GPT2Block", mixed_precision=precision)
        model, _ = prepare(accelerator, kind, h.gpt2(0.1), samples)
        (window,) = make_windows(accelerator, samples)
        backward_window(accelerator, model, window)
        types = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        gradients = whole_gradients(model)
        with torch.no_grad():
            loss = model(**h.pad_right(samples[:4])).loss
        save(
            accelerator,
            folder,
            f"options {kind} {option}",
            gradients,
            types=sorted(types),
            type_of_loss=str(loss.dtype),
        )
        if option == "bf16":
            refused(
                accelerator,
                folder,
                kind,
                partial(backward_window, accelerator, model, window),
            )


def refused(accelerator: Accelerator, folder: Path, kind: str, backward: Callable) -> None:
    """What FSDP would silently do otherwise: sums in bf16 (Accelerate's own policy, or one that
    leaves the type out), no sums.
    """
    plugin = accelerator.state.fsdp_plugin
    said = []
    policy = plugin.mixed_precision_policy
    settings = [
        {"mixed_precision_policy": replace(policy, reduce_dtype=dtype)}
        for dtype in (torch.bfloat16, None)
    ]
    if kind == "fsdp2":
        rounding = replace(policy, output_dtype=torch.bfloat16)
        settings.append({"mixed_precision_policy": rounding})
    for changed in [*settings, {"ignored_modules": ["wte"]}]:
        before = {name: getattr(plugin, name) for name in changed}
        vars(plugin).update(changed)
        said.append(message_of(backward))
        vars(plugin).update(before)
    save(
        accelerator,
        folder,
        f"refused {kind}",
        None,
        said=said,
        reduce_dtype=str(policy.reduce_dtype),
    )


def message_of(action: Callable) -> str:
    try:
        action()
    except hf_ga.ConfigError as error:
        return str(error)
    return "nothing"


def subset(folder: Path, kind: str) -> None:
    """An optimizer over one bias, of which FSDP1's shards give some processes nothing."""
    samples = h.class_samples(16)
    accelerator = make_accelerator(kind)
    base = h.bert_classifier(0.1)
    model, optimizer = hf_ga.prepare(
        accelerator, base, torch.optim.AdamW([base.classifier.bias], lr=1e-2)
    )
    windows = make_windows(accelerator, samples, global_batch_size=8)
    results = [train_step(accelerator, model, optimizer, w, max_grad_norm=1e-3) for w in windows]
    weights = full_state_dict(accelerator, model)
    facts = {"skipped": [r.skipped for r in results], "losses": [r.loss for r in results]}
    save(accelerator, folder, f"subset {kind}", {n: t.clone() for n, t in weights.items()}, **facts)


def pretraining(dropout: float = 0.0) -> nn.Module:
    return h.seeded(h._bert)(tf.BertForPreTraining, dropout)


def pretraining_samples(count: int) -> list[dict]:
    """Some samples without masked tokens, some without a next sentence: the two means have targets
    of their own.
    """
    samples = h.token_samples(count)
    ignored = [h.without_targets(s) if i % 3 == 0 else s for i, s in enumerate(samples)]
    return [
        {**s, "next_sentence_label": h.IGNORED if i % 4 == 1 else i % 2}
        for i, s in enumerate(ignored)
    ]


class TwoHeads(nn.Module):
    """Each sample goes through one of two heads: a process may use only one of them. A third part
    is never used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(h.VOCABULARY, h.WIDTH)
        self.never = nn.Linear(h.WIDTH, h.WIDTH)
        self.heads = nn.ModuleList([nn.Linear(h.WIDTH, 3), nn.Linear(h.WIDTH, 3)])

    def forward(
        self, input_ids, attention_mask, labels=None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pooled = torch.tanh(self.body(input_ids) * attention_mask[..., None]).sum(1)
        which = input_ids[:, 0] % 2
        return [
            (head(pooled[which == i]), which == i)
            for i, head in enumerate(self.heads)
            if (which == i).any()
        ]


def two_heads(dropout: float = 0.0) -> nn.Module:
    return h.seeded(TwoHeads)()


def two_heads_samples(count: int) -> list[dict]:
    """One head for the first half of a window of 18, so for the first of two processes, the other
    for the rest.
    """
    samples = h.class_samples(count)
    for position, i in enumerate(epoch_order(count, SEED, 0, True)):
        samples[i]["input_ids"][0] = 2 + (position % 18 >= 9)
    return samples


def two_heads_loss(outputs: list, batch: dict) -> tuple[torch.Tensor, int]:
    losses = [
        nn.functional.cross_entropy(logits, batch["labels"][rows], reduction="sum")
        for logits, rows in outputs
    ]
    return sum(losses), len(batch["labels"])


HEADS = {  # model, samples, layer, loss_fn, kinds; the others refuse it if there is a layer
    "sum of two means": (pretraining, pretraining_samples, "BertLayer", None, ("ddp",)),
    "router": (
        partial(h.mixtral, 0.5),
        h.token_samples,
        "MixtralDecoderLayer",
        None,
        ("ddp", "fsdp2"),
    ),
    "own loss": (h.plain_tagger, h.weighted_samples, "", h.weighted_token_loss, ("ddp",)),
    "one width": (h.xlnet_classifier, h.class_samples, "XLNetLayer", None, KINDS),
    "heads by sample": (two_heads, two_heads_samples, "Embedding", two_heads_loss, KINDS),
}


def all_to_the_last(lengths: np.ndarray, num_processes: int) -> Plan:
    """A short window goes to the last process, one by one: the others have no micro-batch."""
    if len(lengths) > 3:
        return plan_window(len(lengths), num_processes, 8)
    return [*[[]] * (num_processes - 1), [np.array([i]) for i in range(len(lengths))]]


def heads(folder: Path, kind: str) -> None:
    """Losses with more than one divisor, a loss over the whole window, an own loss, a head that
    sees padding.
    """
    for head, (build, make_samples, layer, loss_fn, kinds) in HEADS.items():
        if kind != "ddp" and not layer:
            continue
        samples = make_samples(21)
        accelerator = make_accelerator(kind, layer)
        model, _ = prepare(accelerator, kind, build(), samples, loss_fn)
        windows = make_windows(
            accelerator, samples, global_batch_size=18, planner=all_to_the_last
        )  # 18 and 3
        backward = partial(backward_window, accelerator, model, loss_fn=loss_fn)
        if kind not in kinds:
            said = message_of(partial(backward, next(iter(windows))))
            save(accelerator, folder, f"refused head {kind} {head}", None, said=said)
            continue
        for window in windows:
            model.zero_grad(set_to_none=True)
            name = f"heads {kind} {head} {window.index}"
            result = backward(window)
            never = [p.grad is None for name, p in model.named_parameters() if "never" in name]
            save(
                accelerator,
                folder,
                name,
                whole_gradients(model),
                loss=result.loss,
                no_gradient=never,
            )


SCENARIOS = {2: [steps, counted, overflow, options, subset, added], 3: [gradients, heads]}
SHARDED_ONLY = {options: KINDS[1:], subset: ["fsdp1"]}


def run(folder: Path, num_processes: int) -> None:
    for scenario in SCENARIOS[num_processes]:
        for kind in SHARDED_ONLY.get(scenario, KINDS):
            scenario(folder, kind)
    if num_processes == 2:
        naive(folder)
        buckets(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    for num_processes in SCENARIOS:
        folder = Path(json.loads(Path(sys.argv[1]).read_text())["folder"]) / str(num_processes)
        folder.mkdir()
        if together(partial(run, folder, num_processes), "ddp", num_processes) != {0}:
            sys.exit(f"a scenario of {num_processes} processes failed")
