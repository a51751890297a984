"""Two processes, which are real: not finite numbers, memory and disks that run out on one of them,
shards of any optimizer.

All say and do the same, in bounded time.
"""

import hashlib
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import helpers as h
import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.utils import gather_object
from disk_limits import limit_at
from forked import on_two_ranks, outcome
from memory_limits import Device
from processes import make_accelerator, make_windows, prepare
from runs import lines_of, small_config, train
from spoilt import marked, spoil
from steps import train_step
from torch import nn
from torch.distributed.tensor import DTensor

import hf_ga
from hf_ga.engine import speed_ups
from hf_ga.errors import NonFinite
from hf_ga.finetuning.run import build
from hf_ga.finetuning.run.optimizers import build_optimizer
from hf_ga.parallel import prepare as preparing
from hf_ga.recovery import checkpoint, saving
from hf_ga.recovery.checkpoint import load_checkpoint
from hf_ga.recovery.saving import save_checkpoint

pytestmark = pytest.mark.slow("starts processes")


# Not finite

SAMPLES = 96
WINDOW = 32
BAD_WINDOW = 1
LAYER = "bert.encoder.layer.1"


def trained(
    kind: str, samples: list[dict], where: str, on_nonfinite: str, *, leave_out: bool = False
) -> tuple[dict, list]:
    """What was said and done, and this process's part of the weights."""
    accelerator = make_accelerator(kind)
    base = h.bert_classifier(0.1)
    speed_ups.candidates = lambda model: []  # `spoil` knows samples
    model, optimizer = prepare(accelerator, kind, base, marked(samples, []))
    spoil(base, LAYER, where)
    options = {
        "max_grad_norm": 1.0 if where == "forward" else None,
        "on_nonfinite": on_nonfinite,
    }
    results = []
    said = None
    began = time.monotonic()
    for window in make_windows(
        accelerator, samples, global_batch_size=WINDOW, planner=h.by_number(8)
    ):
        if leave_out and window.index == BAD_WINDOW:
            continue
        try:
            results.append(train_step(accelerator, model, optimizer, window, **options))
        except NonFinite as error:
            said = str(error)
            break
    states = [
        value for state in optimizer.state_dict()["state"].values() for value in state.values()
    ]
    tensors = [*model.parameters(), *(t for t in states if isinstance(t, torch.Tensor))]
    tensors = [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]
    return {
        "said": said,
        "causes": [r.cause for r in results],
        "seconds": time.monotonic() - began,
    }, tensors


def spoilt_run(kind: str, where: str) -> dict:
    """A layer makes NaN of two samples that only process 1 has."""
    accelerator = make_accelerator(kind)
    samples = marked(h.class_samples(SAMPLES), [])
    windows = list(
        make_windows(accelerator, samples, global_batch_size=WINDOW, planner=h.by_number(8))
    )
    last = gather_object(
        [windows[BAD_WINDOW].micro_batches[-1].sample_ids.tolist()]
    )  # of each process
    samples = marked(samples, last[1][:2])
    stopped, weights_then = trained(kind, samples, where, "stop")
    skipped, weights = trained(kind, samples, where, "skip")
    left_out, control = trained(kind, samples, where, "stop", leave_out=True)
    assert left_out["said"] is None
    return {
        "micro_batch": last,
        "said": stopped["said"],
        "seconds": stopped["seconds"],
        "causes": skipped["causes"],
        "is_finite": all(bool(t.isfinite().all()) for t in (*weights_then, *weights)),
        "as_left_out": len(weights) == len(control) and all(map(torch.equal, weights, control)),
        "moved": any(not torch.equal(a, b) for a, b in zip(weights_then, weights, strict=True)),
        "sha256": hashlib.sha256(b"".join(t.numpy().tobytes() for t in weights)).hexdigest(),
    }


@pytest.mark.parametrize(("kind", "where"), [("ddp", "forward"), ("fsdp2", "backward")])
def test_processes_say_the_same_and_skip_the_same(kind, where):
    first, second = on_two_ranks(partial(spoilt_run, kind, where))
    assert first["said"] == second["said"]
    assert first["causes"] == second["causes"]
    assert max(first["seconds"], second["seconds"]) < 30
    other, own = first["micro_batch"]
    blamed = (
        own[:2] if where == "forward" else [*other, *own]
    )  # a gradient is the sum of those of all processes
    more = ", ..." if len(blamed) > 8 else ""
    assert f"samples {', '.join(map(str, blamed[:8]))}{more}" in first["said"]
    assert "window 1 of epoch 0" in first["said"]
    assert (
        f"is {LAYER} (BertLayer)"
        if where == "forward"
        else f"the gradient of {LAYER}.output.LayerNorm.bias"
    ) in first["said"]
    for one in (first, second):
        assert one["is_finite"]
        assert one["as_left_out"]
        assert one["moved"]
        assert [cause is None for cause in one["causes"]] == [True, False, True]
    assert (first["sha256"] == second["sha256"]) == (kind == "ddp")


# Out of memory


def out_of_memory(config: hf_ga.FinetuneConfig) -> None:
    """A run that runs out of memory on process 1 in training, from its first checkpoint on. In a
    process of its own, which ends with it.
    """
    saved = Path(config.output_dir) / "checkpoint-3"
    prepare = build.prepare_with

    def prepared(accelerator, model, optimizer, settings):
        if accelerator.process_index == 1:
            Device(model, 0, chosen=lambda: model.training and saved.exists())
        return prepare(accelerator, model, optimizer, settings)

    build.prepare_with = prepared
    hf_ga.finetune(config)


def test_fsdp_ends_in_bounded_time_and_goes_on_in_smaller_micro_batches(
    place, undisturbed, tmp_path
):
    """Out of memory on process 1 after a checkpoint, for a single sample, too; resumed on one
    process with 3 samples instead of 8 it is the undisturbed run.
    """
    first, second = on_two_ranks(
        partial(out_of_memory, small_config(place, tmp_path / "out")), kind="fsdp2"
    )
    assert "does not fit into the memory of process 1 by itself" in second
    saved = tmp_path / "out" / "checkpoint-3"
    assert f"Then resume from {saved} with --resume_from_checkpoint auto." in second
    assert "Error" in first
    resumed = train(
        place, tmp_path / "out", per_device_train_batch_size=3, resume_from_checkpoint="auto"
    )
    assert resumed["eval_loss"] == pytest.approx(undisturbed[0]["eval_loss"], rel=1e-5)
    assert [line["step"] for line in lines_of(tmp_path / "out")] == list(range(1, 9))


# A full disk


def on_a_full_disk(config: hf_ga.FinetuneConfig) -> dict:
    """What this process says where one cannot write its shards or finish a checkpoint, and where a
    shard is damaged.
    """
    is_main = os.environ["RANK"] == "0"
    again = replace(config, resume_from_checkpoint="auto")
    copy = Path(config.output_dir) / "copy"
    said = {}
    with nullcontext() if is_main else limit_at(saving, "write_shards", call=2, size=1_000):
        said["shards of process 1"] = outcome(partial(hf_ga.finetune, config))
    with limit_at(checkpoint, "write_manifest", call=1, size=10) if is_main else nullcontext():
        said["manifest"] = outcome(partial(hf_ga.finetune, again))
    if is_main:
        shutil.copytree(copy.with_name("checkpoint-2"), copy)
        (copy / "shards" / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"")
    said["damaged"] = outcome(
        partial(hf_ga.finetune, replace(config, resume_from_checkpoint=str(copy)))
    )
    said["steps"] = hf_ga.finetune(again)["steps"]  # last: the processes part at the end of a run
    return said


def test_all_processes_stop_with_the_same_words(place, tmp_path):
    """Under FSDP."""
    small = {
        "max_steps": 4,
        "eval_steps": 4,
        "save_steps": 2,
        "global_batch_size": 4,
        "per_device_train_batch_size": 2,
    }
    first, second = on_two_ranks(
        partial(on_a_full_disk, small_config(place, tmp_path / "out", **small)), kind="fsdp2"
    )
    assert first == second
    partial_folder = tmp_path / "out" / "partial-checkpoint-4"
    assert first["shards of process 1"].startswith(
        f"CheckpointError: cannot write {partial_folder / 'shards'}: "
    )
    assert first["manifest"].startswith(f"CheckpointError: cannot write {partial_folder}: ")
    assert "File too large" in first["manifest"]
    for name in ("shards of process 1", "manifest"):
        assert "are kept: free disk space" in first[name]
    assert (
        "copy/shards/shard-00002-model-00001-of-00001.safetensors is damaged: SHA-256 mismatch"
        in first["damaged"]
    )
    assert first["steps"] == 4


# Shards

ROUND_TRIPS = {  # optimizer, model, kind; Adam and RAdam have their state in the form of AdamW
    "a bias with two names": ("adamw", "bert", "fsdp2"),  # FSDP1 cannot train BERT's tied head
    "parameters without state": ("adamw", "unused", "fsdp1"),
    "numbers beside moments": ("nadam", "gpt", "fsdp2"),
    "no state": ("sgd", "gpt", "fsdp1"),
}
ALONE = SimpleNamespace(
    is_main_process=True, num_processes=1, device=torch.device("cpu")
)  # all that saving needs of an Accelerator
SIZES = {"vocab_size": 301, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def made(name: str, optim: str, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """gpt: tied embeddings. bert: a bias with two names too. unused: a BERT whose pooler gets no
    gradient.
    """
    torch.manual_seed(3)
    if name == "gpt":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**SIZES, n_positions=64))
    else:
        model = (tf.BertForMaskedLM if name == "bert" else tf.BertModel)(
            tf.BertConfig(**SIZES, intermediate_size=32)
        )
    return model, build_optimizer(model, optim, rate, weight_decay=10 * rate)


def few_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        ids = torch.randint(0, 301, (4, 9), generator=torch.Generator().manual_seed(seed))
        model(ids)[0].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def into_shards(checkpoint: Path, sharded: Path, optim: str, name: str) -> None:
    """On each process: other weights and rates, loaded over, and written by FSDP."""
    accelerator = Accelerator(cpu=True)
    preparing.enable_fsdp_on_cpu(accelerator)
    model, optimizer = made(name, optim, rate=0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model, optimizer = preparing.prepare(accelerator, model, optimizer)
    load_checkpoint(checkpoint, model, optimizer)
    save_checkpoint(accelerator, sharded, model, optimizer, {}, step=4, keep=1)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()
    groups = [
        {k: v for k, v in group.items() if k not in ("betas", "params")}
        for group in state["param_groups"]
    ]
    moments = {
        f"{i} {k}": torch.as_tensor(v)
        for i, of_one in state["state"].items()
        for k, v in of_one.items()
        if v is not None
    }
    return {**model.state_dict(), **moments, "groups": torch.tensor(list(str(groups).encode()))}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of all that is missing, too much, or has another bit."""
    names = found.keys() | expected.keys()
    return sorted(
        n
        for n in names
        if n not in found or n not in expected or not torch.equal(found[n], expected[n])
    )


@pytest.mark.parametrize(("optim", "name", "kind"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_plain_checkpoint_goes_into_shards_and_back(optim, name, kind, tmp_path):
    """Bit for bit: weights, moments, rates and decay. The control: before it was loaded, nearly all
    of it was different.
    """
    model, optimizer = made(name, optim, rate=1e-2)
    few_steps(model, optimizer)
    plain = save_checkpoint(ALONE, tmp_path / "plain", model, optimizer, {}, step=3, keep=1)
    assert on_two_ranks(
        partial(into_shards, plain, tmp_path / "sharded", optim, name), kind=kind
    ) == [None, None]
    other = made(name, optim, rate=0.5)
    expected = contents(model, optimizer)
    assert len(different(contents(*other), expected)) >= 0.9 * len(expected)
    load_checkpoint(tmp_path / "sharded" / "checkpoint-4", *other)
    assert different(contents(*other), expected) == []
