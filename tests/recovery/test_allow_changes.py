"""Resuming with other settings or data: refused with all that changed, and with
--resume_with_changes the new settings act.

The oracle of a learning rate is the schedule's formula; that of an order is the order itself; both
are compared with the old ones.
"""

import copy
import json
import math
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from runs import checkpointed, lines_of, ragged_rows, train, write_rows
from safetensors.torch import load_file
from stops import content

import hf_ga
from hf_ga.finetuning.run import finetune, loop
from hf_ga.finetuning.run.results.saving import resume
from hf_ga.loading.streams.shuffle_buffer import shuffled
from hf_ga.order.order import epoch_order

RATE, WARMUP, STEPS = 3e-4, 2, 8  # of `small_config`; epochs of 60 samples in windows of 16
STOP = 6  # the checkpoint: two windows into the second epoch


@pytest.fixture(scope="module", autouse=True)
def _more(place):
    """Other rows and a wider model."""
    write_rows(place / "more.jsonl", ragged_rows(90, seed=5))
    write_rows(place / "fewer.jsonl", ragged_rows(24, seed=5))
    wide = tf.GPT2Config.from_pretrained(place / "gpt", n_embd=32)
    tf.GPT2LMHeadModel(wide).save_pretrained(place / "wide")
    tf.AutoTokenizer.from_pretrained(place / "gpt").save_pretrained(place / "wide")


@pytest.fixture(scope="module")
def old(undisturbed):
    """The folder of a run of 8 steps, with checkpoints 3, 6 and 8."""
    return undisturbed[1]


@pytest.fixture(scope="module")
def old_epochs(place):
    """Of a run that ends with its second epoch."""
    train(place, place / "old epochs", save_total_limit=9, **BY_EPOCHS)
    return place / "old epochs"


@pytest.fixture(scope="module")
def checkpoint(old):
    return old / f"checkpoint-{STOP}"


BY_EPOCHS = {"max_steps": None, "num_train_epochs": 2.0}


@contextmanager
def watched():
    """What a resumed run does: samples, epoch and arguments of each step, where it stood before
    (`before`), its optimizer.
    """
    seen = SimpleNamespace(ids=[], epochs=[], how=[], before=None, optimizer=None)
    train_step = loop.train_step

    def step(accelerator, model, optimizer, window, **how):
        seen.ids.append(window.sample_ids.tolist())
        seen.epochs.append(window.epoch)
        seen.how.append(how)
        seen.optimizer = optimizer
        return train_step(accelerator, model, optimizer, window, **how)

    def resumed(run, folder, **how):
        progress = resume(run, folder, **how)
        seen.before = copy.copy(progress)
        return progress

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        patch.setattr(finetune, "resume", resumed)
        yield seen


def go_on(place, output, checkpoint, **changes):
    """Returns what was seen, the new lines, and the summary."""
    with watched() as seen:
        summary = train(
            place,
            output,
            resume_from_checkpoint=str(checkpoint),
            resume_with_changes=True,
            **changes,
        )
    return seen, [line for line in lines_of(output) if line["step"] > seen.before.step], summary


def cosine(step: int, rate: float = RATE, warmup: int = WARMUP, steps: int = STEPS) -> float:
    """The rate of a step, 0-based, as the formula says."""
    return (
        rate * step / warmup
        if step < warmup
        else rate * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
    )


# Refused, with what changed and the remedy


def test_refused_without_the_flag(place, checkpoint, tmp_path):
    """All that changed and the remedy are named; nothing is written."""
    changes = {
        "learning_rate": 1e-4,
        "weight_decay": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "max_steps": 9,
        "max_grad_norm": 0.1,
        "seed": 8,
        "optim": "sgd",
        "max_length": 20,
        "drop_last_window": True,
    }
    windows = {
        "per_device_train_batch_size": 4,
        "global_batch_size": None,
        "gradient_accumulation_steps": 2,
    }
    before = content(checkpoint)
    with pytest.raises(hf_ga.CheckpointError) as error:
        more = changes | windows | {"dataset_name": str(place / "more.jsonl")}
        train(place, tmp_path / "out", resume_from_checkpoint=str(checkpoint), **more)
    words = [
        f"checkpoint-{STOP} has other settings",
        *changes,
        "learning_rate 0.0003 -> 0.0001",
        "window_size 16 -> 8",
    ]
    for word in [*words, "optim 'adamw' -> 'sgd'", "more.jsonl", "data '", "--resume_with_changes"]:
        assert word in str(error.value)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert content(checkpoint) == before


# Allowed: the optimizer and its schedule


def linear(step: int, warmup: int, steps: int) -> float:
    return RATE * min(step / warmup, (steps - step) / (steps - warmup))


@pytest.mark.parametrize(
    ("change", "rate_of"),
    [
        (
            {"warmup_steps": 5, "lr_scheduler_type": "linear", "max_steps": 10},
            lambda step: linear(step, 5, 10),
        ),
        (
            {"learning_rate": 1e-4, "warmup_steps": 9, "max_steps": 12},
            lambda step: cosine(step, 1e-4, 9, 12),
        ),
    ],
    ids=["linear", "cosine"],
)
def test_the_new_schedule_acts(change, rate_of, place, old, checkpoint, tmp_path):
    """The first loss is that of the old run's weights; steps and moments are counted on."""
    seen, lines, summary = go_on(place, tmp_path / "out", checkpoint, **change)
    steps = change.get("max_steps", STEPS)
    assert [line["step"] for line in lines] == list(range(STOP + 1, steps + 1))
    assert summary["steps"] == steps
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [rate_of(step) for step in range(STOP, steps)], rel=1e-12
    )
    assert lines[0]["loss"] == lines_of(old)[STOP]["loss"]
    assert {float(state["step"]) for state in seen.optimizer.state.values()} == {steps}
    assert lines[0]["learning_rate"] != pytest.approx(
        cosine(STOP), rel=1e-3
    )  # the control: the old schedule
    assert seen.before.best_metric is not None


def test_the_new_decay_and_clipping_act_and_the_best_of_another_metric_is_forgotten(
    place, checkpoint, tmp_path
):
    changes = {"weight_decay": 0.5, "max_grad_norm": 0.125, "metric_for_best_model": "perplexity"}
    seen, _, _ = go_on(place, tmp_path / "out", checkpoint, **changes)
    assert [group["weight_decay"] for group in seen.optimizer.param_groups] == [0.5, 0.0]
    assert [how["max_grad_norm"] for how in seen.how] == [0.125] * 2
    assert seen.before.best_metric is None


@pytest.mark.parametrize(
    "file", ["fewer.jsonl", "validation.jsonl"], ids=["another validation file", "nothing"]
)
def test_moments_and_schedule_are_kept(file, place, old, checkpoint, tmp_path, capsys):
    """With another validation file the training is bit for bit that of the old run. Its best model
    is another one.
    """
    seen, lines, summary = go_on(
        place, tmp_path / "out", checkpoint, validation_file=str(place / file)
    )
    changed = file == "fewer.jsonl"
    assert (
        bool(seen.before.changes) == ("resumed with changes" in capsys.readouterr().out) == changed
    )
    assert (seen.before.best_metric is None) == changed
    assert (
        summary["weights_sha256"]
        == json.loads((old / "summary.json").read_text())["weights_sha256"]
    )
    assert [line["loss"] for line in lines] == [line["loss"] for line in lines_of(old)[STOP:]]


# Allowed: another order


def windows_of(order: np.ndarray, size: int, consumed: int = 0) -> list[list[int]]:
    return [order[i : i + size].tolist() for i in range(consumed, len(order), size)]


@pytest.mark.parametrize(
    ("change", "rows", "size", "consumed"),
    [
        ({"seed": 8, "global_batch_size": 8}, 60, 8, 32),
        ({"global_batch_size": 40}, 60, 40, 0),
        ({"dataset_name": "fewer.jsonl"}, 24, 16, 24),
    ],
    ids=[
        "smaller",
        "larger than what was consumed",
        "fewer rows",
    ],
)
def test_the_rest_of_the_epoch_is_visited(
    change, rows, size, consumed, place, checkpoint, tmp_path, capsys
):
    """Behind the samples that were consumed, in the new order; then the next epoch. The old
    position was window 2 of 16 samples.
    """
    if "dataset_name" in change:
        change = {"dataset_name": str(place / change["dataset_name"])}
    seen, lines, summary = go_on(place, tmp_path / "out", checkpoint, max_steps=12, **change)
    orders = [epoch_order(rows, change.get("seed", 7), epoch) for epoch in range(1, 12)]
    expected = windows_of(orders[0], size, consumed) + [
        window for order in orders[1:] for window in windows_of(order, size)
    ]
    if "drop_last_window" in change:
        expected = [window for window in expected if len(window) == size]
    assert seen.ids == expected[: 12 - STOP]
    assert seen.before.num_windows == num_windows_before(
        rows, size, consumed, "drop_last_window" in change
    )
    assert [line["step"] for line in lines] == list(range(STOP + 1, 13))
    assert summary["steps"] == 12
    said = [line for line in capsys.readouterr().out.splitlines() if "resumed with changes" in line]
    assert len(said) == 1
    assert f"after step {STOP}, window {math.ceil(consumed / size)} of epoch 1: " in said[0]
    assert "max_steps 8 -> 12" in said[0]
    assert all(name in said[0] for name in change if name != "global_batch_size")


def num_windows_before(rows: int, size: int, consumed: int, drops: bool) -> int:
    """A whole epoch, and what was consumed of the second one."""
    in_epoch = rows // size if drops else math.ceil(rows / size)
    return in_epoch + math.ceil(consumed / size)


@pytest.mark.parametrize(
    ("change", "rows", "epoch", "size", "consumed"),
    [({"global_batch_size": 8}, 60, 2, 8, 0), ({"dataset_name": "more.jsonl"}, 90, 1, 16, 48)],
    ids=["smaller windows", "more rows"],
)
def test_behind_a_whole_epoch(change, rows, epoch, size, consumed, place, old, tmp_path):
    """All 60 samples were consumed, the last in a short window. In smaller windows none of them
    comes again; of 90 rows, 30 positions of the epoch are left, from window 3 of 16 on.
    """
    change = {
        name: str(place / value) if name == "dataset_name" else value
        for name, value in change.items()
    }
    seen, _, _ = go_on(place, tmp_path / "out", old / "checkpoint-8", max_steps=10, **change)
    assert seen.ids == windows_of(epoch_order(rows, 7, epoch), size, consumed)[:2]
    assert seen.epochs == [epoch] * 2


@pytest.mark.parametrize(
    ("change", "in_epoch", "position"),
    [({"global_batch_size": 8}, 8, 12), ({"global_batch_size": 32, "num_train_epochs": 3.0}, 2, 3)],
    ids=["smaller windows", "larger windows, more epochs"],
)
def test_a_run_by_epochs_ends_with_its_last_epoch(
    change, in_epoch, position, place, old_epochs, tmp_path
):
    """The schedule stands where it would with such windows from the beginning, and ends with the
    last epoch.
    """
    seen, lines, summary = go_on(
        place, tmp_path / "out", old_epochs / f"checkpoint-{STOP}", **BY_EPOCHS | change
    )
    total = in_epoch * int(change.get("num_train_epochs", 2))
    assert len(seen.ids) == len(lines) == total - position
    assert summary["steps"] == STOP + total - position
    expected = [cosine(step, steps=total) for step in range(position, total)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(expected, rel=1e-12)
    assert lines[-1]["epoch"] == change.get("num_train_epochs", 2.0)


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_a_changed_run_is_resumed_as_any_other(place, old_epochs, tmp_path):
    """Without further changes it is bit for bit the changed run that was not stopped; the summary
    keeps what changed.
    """
    more = {
        **BY_EPOCHS,
        "global_batch_size": 32,
        "num_train_epochs": 4.0,
        "save_steps": 1,
        "save_total_limit": 9,
    }
    _, _, summary = go_on(place, tmp_path / "changed", old_epochs / f"checkpoint-{STOP}", **more)
    resumed = train(
        place,
        tmp_path / "out",
        resume_from_checkpoint=str(tmp_path / "changed" / f"checkpoint-{STOP + 2}"),
        **more,
    )
    assert resumed["weights_sha256"] == summary["weights_sha256"]
    assert resumed["steps"] == STOP + 5
    assert [line["loss"] for line in lines_of(tmp_path / "out")] == [
        line["loss"] for line in lines_of(tmp_path / "changed")[2:]
    ]
    assert (
        summary["changes"]
        == resumed["changes"]
        == ["num_train_epochs 2.0 -> 4.0", "window_size 16 -> 32"]
    )


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_a_stream_with_another_buffer(place, tmp_path):
    streamed = {"streaming": True, "shuffle_buffer_size": 20}
    train(place, tmp_path / "old", **streamed)
    changes = {**streamed, "shuffle_buffer_size": 9, "global_batch_size": 8, "max_steps": 10}
    seen, _, _ = go_on(place, tmp_path / "out", tmp_path / "old" / f"checkpoint-{STOP}", **changes)
    orders = [np.array(list(shuffled(iter(range(60)), 9, seed=7, epoch=epoch))) for epoch in (1, 2)]
    assert [sorted(ids) for ids in seen.ids] == [
        sorted(ids) for ids in windows_of(orders[0], 8, 32)
    ]


# Allowed: what surrounds the weights


@pytest.mark.slow("whole trainings; quick tests cover its parts")
@pytest.mark.parametrize(("before", "after"), [("no", "fp16"), ("fp16", "no")])
def test_another_precision(before, after, launched, place, tmp_path):
    """A loss scaler begins anew, or is left."""
    launched(before)
    train(place, tmp_path / "old", max_steps=3)
    launched(after)
    saved = tmp_path / "old" / "checkpoint-3"
    seen, lines, _ = go_on(place, tmp_path / "out", saved, max_steps=5)
    assert seen.before.changes == ["max_steps 3 -> 5", f"mixed_precision '{before}' -> '{after}'"]
    assert [line.get("loss_scale") for line in lines] == (
        [65536.0] * 2 if after == "fp16" else [None] * 2
    )


@pytest.mark.slow("whole trainings; quick tests cover its parts")
def test_adapters_on_another_base(place, tmp_path):
    """The base model's weights are not in a checkpoint of LoRA: with others of the same shapes the
    adapters go on.
    """
    base = tf.GPT2LMHeadModel.from_pretrained(place / "gpt")
    with torch.no_grad():
        base.transformer.ln_f.weight.mul_(2.0)
    base.save_pretrained(tmp_path / "other")
    tf.AutoTokenizer.from_pretrained(place / "gpt").save_pretrained(tmp_path / "other")
    lora = {"lora_r": 4, "max_steps": 3}
    train(place, tmp_path / "old", **lora)
    more = {**lora, "model_name_or_path": str(tmp_path / "other"), "max_steps": 4}
    seen, lines, _ = go_on(place, tmp_path / "out", tmp_path / "old" / "checkpoint-3", **more)
    assert [change.split()[0] for change in seen.before.changes] == [
        "model_name_or_path",
        "max_steps",
        "base_model",
    ]
    assert len(lines) == 1
    saved = checkpointed(tmp_path / "old" / "checkpoint-3")["model"]
    assert saved
    assert not any("ln_f" in name for name in saved)
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["transformer.ln_f.weight"],
        base.transformer.ln_f.weight,
    )


# Never


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"optim": "sgd"},
            ["cannot be resumed with optim 'adamw' -> 'sgd', even with --resume_with_changes"],
        ),
        (
            {"freeze": ["transformer.wpe"], "seed": 8},
            ["cannot be resumed with freeze None -> ['transformer.wpe']"],
        ),
        ({"model_name_or_path": "wide"}, ["does not fit this model"]),
    ],
    ids=["optimizer", "frozen", "shapes"],
)
def test_refused_with_the_flag(change, words, place, checkpoint, tmp_path):
    if "model_name_or_path" in change:
        change = {"model_name_or_path": str(place / change["model_name_or_path"])}
    with pytest.raises(hf_ga.CheckpointError) as error:
        go_on(place, tmp_path / "out", checkpoint, **change)
    for word in words:
        assert word in str(error.value)
