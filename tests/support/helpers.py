"""Shared by the tests: tiny models, ragged samples, the float64 reference, the one comparer of
promise 1, and naive controls.

Nothing here calls hf_ga: what judges must not be what is judged.
"""

import copy
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import transformers as tf
from accelerate import Accelerator
from packaging.version import Version
from torch import nn

VOCABULARY = 40
WIDTH = 16
NUM_CLASSES = 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IGNORED = -100
FLOOR = 1e-6  # of the global norm, as promise 1 says
CAUSAL = (
    tf.GPT2LMHeadModel,
    tf.LlamaForCausalLM,
    tf.MixtralForCausalLM,
)  # column 0 is not predicted
Gradients = dict[str, torch.Tensor]
# What fails in older versions that are supported, without hf_ga.
BEFORE_5_23 = Version(tf.__version__) < Version("5.23")


def seeded(build: Callable) -> Callable:
    """Weights depend on the builder only, in training mode."""

    def built(*args, **kwargs):
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(1234)  # of a CPU, where models are built
            return build(*args, **kwargs).train()

    return built


def _bert(head: type, dropout: float = 0.0, **more) -> nn.Module:
    sizes = {
        **SIZES,
        "intermediate_size": 2 * WIDTH,
        "max_position_embeddings": 32,
        "num_labels": NUM_CLASSES,
        **more,
    }
    return head(
        tf.BertConfig(**sizes, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    )


bert_classifier = seeded(partial(_bert, tf.BertForSequenceClassification))
bert_masked_lm = seeded(partial(_bert, tf.BertForMaskedLM))
bert_token_classifier = seeded(partial(_bert, tf.BertForTokenClassification))
bert_question_answering = seeded(partial(_bert, tf.BertForQuestionAnswering, num_labels=2))


@seeded
def gpt2(dropout: float = 0.0, **more) -> nn.Module:
    sizes = {**SIZES, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1, **more}
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    )


LLAMA_SIZES = {
    **SIZES,
    "intermediate_size": 2 * WIDTH,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


@seeded
def llama(dropout: float = 0.0, **more) -> nn.Module:
    sizes = {**LLAMA_SIZES, **more}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attention_dropout=dropout))


@seeded
def mixtral(router_coefficient: float = 0.0) -> nn.Module:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": router_coefficient,
    }
    config = tf.MixtralConfig(**LLAMA_SIZES, **experts, output_router_logits=router_coefficient > 0)
    return tf.MixtralForCausalLM(config)


@seeded
def t5(dropout: float = 0.0) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": 2 * WIDTH,
        "num_layers": 1,
        "num_heads": 2,
    }
    return tf.T5ForConditionalGeneration(
        tf.T5Config(**sizes, dropout_rate=dropout, decoder_start_token_id=0)
    )


def _xlnet(head: type, dropout: float = 0.0) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "n_layer": 2,
        "n_head": 2,
        "d_inner": 2 * WIDTH,
        "num_labels": NUM_CLASSES,
    }
    return head(tf.XLNetConfig(**sizes, dropout=dropout, summary_last_dropout=dropout))


# The loss of the classifier depends on the padding width: its summary is the last column.
xlnet_classifier = seeded(partial(_xlnet, tf.XLNetForSequenceClassification))


@seeded
def fnet_masked_lm(dropout: float = 0.0) -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "intermediate_size": 2 * WIDTH,
    }
    return tf.FNetForMaskedLM(
        tf.FNetConfig(**sizes, max_position_embeddings=32, hidden_dropout_prob=dropout)
    )


class PlainTagger(nn.Module):
    """No HuggingFace: tied embedding and output, logits out, or a mean loss if labels come in."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, input_ids, labels=None):
        logits = self.output(self.dropout(torch.tanh(self.hidden(self.embedding(input_ids)))))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


plain_tagger = seeded(PlainTagger)


class PositiveTagger(nn.Module):
    """A tagger to which label 0 is padding: its loss is the mean over the labels greater than 0.

    Args:
        mean: (losses of all labels, which labels are greater than 0) -> loss. None: torch's
            `ignore_index=0`, which does not support labels of -100.
    """

    def __init__(self, mean: Callable | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.mean = mean

    def forward(self, input_ids, labels=None):
        logits = self.output(torch.tanh(self.embedding(input_ids))).flatten(0, 1)
        if labels is None:
            return logits
        labels = labels.flatten()
        if self.mean is None:
            loss = F.cross_entropy(logits, labels, ignore_index=0)
        else:
            losses = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
            loss = self.mean(losses, labels > 0)
        return tf.utils.ModelOutput(loss=loss)


positive_tagger = seeded(PositiveTagger)


def weighted_token_loss(logits: torch.Tensor, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted sum, sum of the weights): counts are not integers."""
    losses = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none")
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def ragged_lengths(num_samples: int, low: int = 4, high: int = 12, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, num_samples).tolist()


def token_samples(num_samples: int, ignored_share: float = 0.4, seed: int = 0) -> list[dict]:
    """Labels for some tokens, very unequal numbers of them; the second token always has one."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in ragged_lengths(num_samples, seed=seed):
        ids = rng.integers(2, VOCABULARY, length)
        labels = rng.integers(2, VOCABULARY, length)
        labels[rng.random(length) < ignored_share * 2 * rng.random()] = IGNORED
        labels[1] = ids[1]
        samples.append(
            {"input_ids": ids.tolist(), "attention_mask": [1] * length, "labels": labels.tolist()}
        )
    return samples


def plain_samples(num_samples: int) -> list[dict]:
    """As `token_samples`, with what `PlainTagger` takes and nothing else."""
    return [
        {"input_ids": s["input_ids"], "labels": s["labels"]} for s in token_samples(num_samples)
    ]


def tag_samples(num_samples: int) -> list[dict]:
    """As `token_samples`, with labels below the number of classes."""
    samples = token_samples(num_samples)
    return [
        {**s, "labels": [v if v == IGNORED else v % NUM_CLASSES for v in s["labels"]]}
        for s in samples
    ]


def class_samples(num_samples: int) -> list[dict]:
    """One class a sample."""
    return [{**s, "labels": sum(s["input_ids"]) % NUM_CLASSES} for s in token_samples(num_samples)]


def weighted_samples(num_samples: int) -> list[dict]:
    """Every token has a target and a weight; padding weighs nothing."""
    rng = np.random.default_rng(7)
    return [
        {
            "input_ids": s["input_ids"],
            "targets": s["input_ids"][::-1],
            "weights": (rng.random(len(s["input_ids"])) ** 3).tolist(),
        }
        for s in token_samples(num_samples)
    ]


def without_targets(sample: dict) -> dict:
    return {**sample, "labels": [IGNORED] * len(sample["labels"])}


def pad_right(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Lists are padded to the longest (labels with -100, all else with 0); numbers are stacked."""
    return {
        name: _padded([s[name] for s in samples], IGNORED if name == "labels" else 0)
        for name in samples[0]
    }


def pad_with_zeros(samples: list[dict]) -> dict[str, torch.Tensor]:
    """Collate like `pad_right`, with 0 in place of labels of -100."""
    return {name: values.clamp(min=0) for name, values in pad_right(samples).items()}


def _padded(values: list, filler: int) -> torch.Tensor:
    if not isinstance(values[0], list):
        return torch.stack([torch.as_tensor(v) for v in values])
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(v) for v in values], batch_first=True, padding_value=filler
    )


def by_number(size: int) -> Callable[[np.ndarray, int], list[list[np.ndarray]]]:
    """A planner that knows no lengths: even shares in the order of the window, in micro-batches of
    at most `size` samples.
    """

    def plan(lengths: np.ndarray, num_processes: int) -> list[list[np.ndarray]]:
        shares = np.array_split(np.arange(len(lengths)), num_processes)
        return [
            np.array_split(share, -(-len(share) // size)) if len(share) else [] for share in shares
        ]

    return plan


def gradients(model: nn.Module) -> Gradients:
    """Copies in float64 of what `.grad` holds; zeros where a trainable parameter has none."""
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return {
        n: (torch.zeros_like(p) if p.grad is None else p.grad).detach().double().clone()
        for n, p in trainable
    }


def full_batch_gradient(
    model: nn.Module,
    batch: dict,
    dtype: torch.dtype = torch.float64,
    loss_fn: Callable | None = None,
) -> Gradients:
    """One forward and backward of the mean loss over the whole window, in plain PyTorch, on a copy
    of the model.
    """
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    mean_loss(
        model, {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}, loss_fn
    ).backward()
    return gradients(model)


ROUNDING = {"no": FLOOR, "bf16": 2.0**-8, "fp16": 2.0**-11}  # the relative error of one rounding
SCALE = (
    2.0**16
)  # the default of torch's scaler of losses; a power of two, so to divide by it is exact
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_gradient(
    precision: str,
    model: nn.Module,
    batches: list[dict],
    weights: list[float],
    loss_fn: Callable | None = None,
) -> Gradients:
    """Plain PyTorch: each batch's mean loss times its weight under autocast, its gradient
    accumulated as `.grad` does.
    """
    model = copy.deepcopy(model)
    scale = SCALE if precision == "fp16" else 1.0
    model.zero_grad()
    device = next(model.parameters()).device
    for batch, weight in zip(batches, weights, strict=True):
        with torch.autocast(device.type, DTYPES.get(precision), enabled=precision != "no"):
            loss = mean_loss(
                model, {name: values.to(device) for name, values in batch.items()}, loss_fn
            )
        (loss.float() * weight * scale).backward()
    return divided(gradients(model), scale)


def divided(grads: Gradients, number: float) -> Gradients:
    """On the CPU."""
    return {name: g.cpu() / number for name, g in grads.items()}


def mean_loss(model: nn.Module, batch: dict, loss_fn: Callable | None = None) -> torch.Tensor:
    """The mean loss of a batch. Causal heads cast logits to float32 inside, so theirs is computed
    here from the logits.
    """
    outputs = model(**{k: v for k, v in batch.items() if k not in ("targets", "weights")})
    if loss_fn is not None:
        total, count = loss_fn(outputs, batch)
        return total / count
    if isinstance(model, CAUSAL):
        return F.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1),
            batch["labels"][:, 1:].flatten(),
            ignore_index=IGNORED,
        )
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return outputs if isinstance(outputs, torch.Tensor) else outputs.loss


def num_targets(model: nn.Module, batch: dict, loss_fn: Callable | None = None) -> float:
    """What the mean is over, counted from what is known of these heads."""
    if loss_fn is not None:
        return float(batch["weights"].sum())
    labels = batch["labels"]
    return int(((labels[:, 1:] if isinstance(model, CAUSAL) else labels) != IGNORED).sum())


def norm(grads: Gradients) -> float:
    return float(torch.stack([g.norm() for g in grads.values()]).norm())


def difference(grads: Gradients, other: Gradients) -> Gradients:
    assert grads.keys() == other.keys()
    return {name: grads[name] - other[name] for name in grads}


def relative_error(grads: Gradients, reference: Gradients) -> float:
    return norm(difference(grads, reference)) / norm(reference)


def assert_promise_1(
    grads: Gradients, full: Gradients, grads64: Gradients, rounding: float = FLOOR
) -> None:
    """At most twice as far from float64 as the full batch in the same precision, plus 1e-6 of the
    global norm: over all parameters together and for each. A NaN fails.

    rounding: one of half precision, which is then the floor of each parameter: autocast rounds the
        gradient of each micro-batch to
    it, in plain PyTorch too, and where those cancel (the bias of a classifier) their roundings do
    not.
    """
    off = difference(grads, grads64)
    off_full = difference(full, grads64)
    whole = norm(grads64)
    assert norm(off) <= 2 * norm(off_full) + FLOOR * whole, (
        f"all parameters: {norm(off):.2e}, full batch {norm(off_full):.2e}"
    )
    for name in grads64:
        allowed = 2 * float(off_full[name].norm()) + rounding * whole
        assert float(off[name].norm()) <= allowed, (
            f"{name}: {float(off[name].norm()):.2e} > {allowed:.2e}"
        )


def naive_gradient(
    model: nn.Module,
    micro_batches: list[dict],
    accumulation_steps: int,
    loss_fn: Callable | None = None,
):
    """Accelerate's usual loop: a mean of means. With fewer micro-batches than `accumulation_steps`
    it is a short last window divided by the full number of steps.
    """
    model = copy.deepcopy(model)
    model.zero_grad()
    accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps)
    for batch in micro_batches:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch, loss_fn))
    accelerator.gradient_state._set_sync_gradients(
        True
    )  # shared by all accelerators of the process
    return gradients(model)


def global_random_states() -> tuple:
    """Of torch, numpy and Python, comparable with `==`."""
    numpy_state = np.random.get_state()
    return (
        torch.get_rng_state().tolist(),
        numpy_state[1].tolist(),
        numpy_state[2],
        random.getstate(),
    )


def everything(model: nn.Module) -> dict:
    """All of a model that a trial and a check must leave as it is, and the random states."""
    return {
        "tensors": {
            name: tensor.tolist()
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        },
        "gradients": {
            name: None if p.grad is None else p.grad.tolist()
            for name, p in model.named_parameters()
        },
        "trained": [p.requires_grad for p in model.parameters()],
        "modules": [
            (m.training, len(m._forward_hooks), len(m._forward_pre_hooks), set(vars(m)))
            for m in model.modules()
        ],
        "random": global_random_states(),
    }
