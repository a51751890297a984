"""Audits: what the samples of a proof do not show is found in the window in which it first matters.

Each test has its control: without audits the window is accepted, and its gradient is wrong.
"""

from functools import partial

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from forked import on_ranks, on_two_ranks
from processes import make_accelerator
from torch import nn

import hf_ga
from hf_ga.errors import DataError, HfGaError, LossNotAdditive
from hf_ga.exact.audit import Audits, KeptOutputs, additivity_error, count_patterns, join_outputs
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.hooks import Call

UNKNOWN = -1


class KnownOnly(nn.Module):
    """Its loss is the mean over samples whose label is known."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        known = labels.masked_fill(labels == UNKNOWN, -100)
        return {"loss": F.cross_entropy(logits, known), "logits": logits}


def points(num_samples: int, unknown: tuple[int, ...] = ()) -> list[dict]:
    rng = np.random.default_rng(1)
    return [
        {
            "x": torch.from_numpy(rng.normal(size=4).astype(np.float32)),
            "labels": torch.tensor(UNKNOWN if i in unknown else i % 3),
        }
        for i in range(num_samples)
    ]


def stack(samples: list[dict]) -> dict:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def train(samples, model, *, size=4, window=16, accelerator=None, proof=None, **options):
    """Trains windows in order; returns how many were trained, and the weights before the error."""
    accelerator = accelerator or Accelerator()
    rule = hf_ga.prove_targets(model, proof or samples, stack, loss_fn=options.pop("loss_fn", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = hf_ga.WindowLoader(
        samples,
        stack,
        accelerator=accelerator,
        per_device_batch_size=size,
        global_batch_size=window,
        shuffle=False,
    )
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, rule=rule, **options)
    num_trained = 0
    for trained_window in windows:
        hf_ga.train_step(accelerator, model, optimizer, trained_window)
        num_trained += 1
    return num_trained, windows.state.audits


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_row_that_the_proof_did_not_see_stops_its_window_before_the_update(size):
    """Sample 37 is in the third window. Control: without audits all four are trained."""
    samples = points(64, unknown=(37,))
    model = KnownOnly()
    with pytest.raises(LossNotAdditive, match=r"window 2 of epoch 0.*labels -1") as raised:
        train(samples, model, size=size, proof=points(32))
    assert "loss_fn(outputs, batch) -> ((weights * losses).sum(), weights.sum())" in str(
        raised.value
    )
    clean = KnownOnly()
    train(points(32), clean, size=size)
    assert all(map(torch.equal, model.parameters(), clean.parameters())), "window 2 changed weights"
    if size > 1:  # alone, the sample's loss is NaN
        assert train(samples, KnownOnly(), size=size, proof=points(32), audit=False)[0] == 4


def test_without_the_audit_the_gradient_would_be_wrong():
    """The control of the whole file, by hand: five of six samples are known."""
    model = KnownOnly()
    samples = points(6, unknown=(0,))

    def gradient(part):
        (of_weight,) = torch.autograd.grad(model(**stack(part))["loss"], [model.layer.weight])
        return of_weight

    full = gradient(samples)
    weighted = gradient(samples[:2]) / 3 + gradient(samples[2:]) * 2 / 3
    assert (weighted - full).norm() > 1e-2 * full.norm()


def test_a_window_that_is_one_micro_batch_needs_no_audit():
    num_trained, audits = train(points(64, unknown=(37,)), KnownOnly(), size=16, proof=points(32))
    assert (num_trained, audits.num_audits) == (4, 0)


def hardest_of_large(outputs, batch):
    """The hardest half, but only in batches with a large input, which no proof here has."""
    losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    if batch["x"].max() > 100:
        losses = losses.topk(max(1, len(losses) // 2)).values
    return losses.sum(), len(losses)


def test_the_outputs_of_every_window_are_audited_with_the_users_loss_function():
    """Such a sample comes in window 2, for which no audit of a forward is due."""
    samples = points(64)
    samples[37]["x"] = torch.full((4,), 101.0)
    proof = points(32)
    with pytest.raises(LossNotAdditive, match="window 2"):
        train(samples, KnownOnly(), size=8, proof=proof, loss_fn=hardest_of_large)
    options = {"size": 8, "proof": proof, "loss_fn": hardest_of_large, "audit": False}
    assert train(samples, KnownOnly(), **options)[0] == 4


def test_a_sum_with_a_number_of_0_counts():
    """Positives are what the loss divides by; micro-batches without one have a gradient."""

    def per_positive(outputs, batch):
        losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="sum")
        return losses, (batch["labels"] == 2).sum()

    samples = [*points(12)]
    for i, sample in enumerate(samples):
        sample["labels"] = torch.tensor(2 if i in (0, 5) else i % 2)
    model = KnownOnly()
    reference = KnownOnly()
    total, number = per_positive(reference(**stack(samples)), stack(samples))
    (total / number).backward()
    train(samples, model, size=2, window=12, proof=samples, loss_fn=per_positive)
    for trained, p in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, p - 0.1 * p.grad, rtol=1e-5, atol=1e-6)


def test_weights_that_add_up_to_0_have_no_mean():
    def signed(outputs, batch):
        losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
        sign = torch.where(batch["labels"] == 2, -2.0, 1.0)
        return (sign * losses).sum(), sign.sum()

    with pytest.raises(DataError, match="add up to 0"):
        train(points(6), KnownOnly(), size=2, window=6, proof=points(7), loss_fn=signed)


def test_the_patterns_of_rows():
    batch = {
        "labels": torch.tensor([0, 2, 2, -100]),
        "weight": torch.tensor([1.0, 0.5, float("nan"), 0.0]),
        "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0]]),
        "shared": torch.ones(7),
        "text": ["a", "b", "c", "d"],
    }
    patterns = count_patterns(batch, 4)
    assert patterns["weight", "at most 0.5"] == 1
    assert patterns["labels", 2] == 2
    assert ("labels", 1) not in patterns
    assert {what for entry, what in patterns if entry == "weight"} >= {"NaN", "0", "1", "positive"}
    masks = {what for entry, what in patterns if entry == "attention_mask"}
    assert masks >= {
        "right padding",
        "left padding",
        "padding on both sides or between tokens",
        "only padding",
    }
    assert not any(entry == "shared" for entry, _ in patterns)


def calls_of(*labels: list[int]) -> list[Call]:
    return [
        Call(
            MicroBatch({"labels": torch.tensor(part)}, np.arange(len(part)), np.arange(len(part))),
            index=i,
        )
        for i, part in enumerate(labels)
    ]


def test_all_new_patterns_of_a_window_are_audited_and_then_the_schedule():
    audits = Audits()
    chosen = audits.choose(calls_of([0, 1], [0, 0], [1, 2], [2, 2]))
    assert [one.call.index for one in chosen] == [0, 2]
    for one in chosen:
        audits.record(one)
    due = [number for number in range(2, 20) if audits.choose(calls_of([0, 1], [2, 1]))]
    assert due == [2, 4, 8, 16]
    (new,) = audits.choose(calls_of([0, 1], [7, 7]))
    assert new.call.index == 1
    assert new.is_uniform


def test_a_vocabulary_is_not_audited_for_ever():
    audits = Audits(num_windows=1000)
    found = []
    for token in range(100):
        found += (chosen := audits.choose(calls_of([token, token])))
        for one in chosen:
            audits.record(one)
    assert 16 <= len(found) <= 20


def test_outputs_of_several_micro_batches_are_put_together():
    def kept(number, width=3):
        outputs = {"logits": torch.full((number, width), float(number)), "loss": torch.tensor(1.0)}
        return KeptOutputs(
            outputs, {"labels": torch.arange(number), "names": ["a"] * number}, number, []
        )

    outputs, batch = join_outputs([kept(2), kept(3)])
    assert outputs["logits"].shape == (5, 3)
    assert batch["names"] == ["a"] * 5
    assert batch["labels"].tolist() == [0, 1, 0, 1, 2]
    assert join_outputs([kept(2), kept(2, width=4)]) is None, "tokens of different widths"
    assert join_outputs([kept(2)]) is None


def test_the_additivity_error_compares_each_number():
    def numbers(*values):
        return [torch.tensor(value) for value in values]

    assert additivity_error(numbers(3.0, 2.0), [numbers(1.0, 1.0), numbers(2.0, 1.0)]) == 0
    assert additivity_error(
        numbers(3.0, 2.0), [numbers(1.0, 1.0), numbers(2.0, 2.0)]
    ) == pytest.approx(1 / 3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_no_false_alarm_in_a_run_with_dropout(precision, own_accelerator_state):
    """Every window is audited, of lengths that differ."""
    accelerator = Accelerator(mixed_precision=precision)
    samples = h.token_samples(32)
    model = h.gpt2(0.1)
    windows = hf_ga.WindowLoader(
        samples, h.pad_right, accelerator=accelerator, per_device_batch_size=2, global_batch_size=8
    )
    model, optimizer = hf_ga.prepare(
        accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), windows
    )
    for window in [*windows, *windows]:
        windows.state.audits.covered.clear()
        hf_ga.train_step(accelerator, model, optimizer, window)
    assert windows.state.audits.num_audits >= 8


def test_an_audit_that_does_not_fit_into_memory_is_skipped_and_said():
    """Two samples together do not fit; each one does."""
    model = KnownOnly()

    def fail(module, args, kwargs):
        if len(kwargs["x"]) > 1:
            raise torch.OutOfMemoryError("on purpose")

    accelerator = Accelerator()
    rule = hf_ga.prove_targets(model, points(32), stack)
    windows = hf_ga.WindowLoader(
        points(4), stack, accelerator=accelerator, per_device_batch_size=1, global_batch_size=4
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, rule=rule)
    (window,) = windows
    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    with handle, pytest.warns(UserWarning, match="an audit ran out of memory"):
        result = hf_ga.train_step(accelerator, model, optimizer, window)
    assert result.retries == 0
    assert not result.skipped


def on_a_rank(audit: bool) -> int:
    """Sample 37 is on rank 1 only."""
    torch.manual_seed(0)
    samples = points(64, unknown=(37,))
    accelerator = make_accelerator("ddp")
    return train(samples, KnownOnly(), accelerator=accelerator, proof=points(32), audit=audit)[0]


def test_a_rank_that_finds_it_stops_all():
    found = on_two_ranks(partial(on_a_rank, True))
    assert all("window 2 of epoch 0" in str(text) for text in found), found
    assert on_two_ranks(partial(on_a_rank, False)) == [4, 4], "control"


def resumed_on_a_rank(folder) -> list:
    """Windows 0 and 1 are trained and saved; window 2 is refused. Then the checkpoint goes on
    without audits. Returns the message, and the distance from a run that never had any.
    """

    def started(audit):
        torch.manual_seed(0)
        accelerator = make_accelerator("ddp")
        model = KnownOnly()
        rule = hf_ga.prove_targets(model, points(32), stack)
        windows = hf_ga.WindowLoader(
            points(64, unknown=(37,)),
            stack,
            accelerator=accelerator,
            per_device_batch_size=2,
            global_batch_size=16,
            shuffle=False,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, rule=rule, audit=audit)
        accelerator.register_for_checkpointing(windows)
        return accelerator, model, optimizer, windows

    accelerator, model, optimizer, windows = started(audit=True)
    message = ""
    try:
        for window in windows:
            hf_ga.train_step(accelerator, model, optimizer, window)
            accelerator.save_state(str(folder))
    except HfGaError as error:
        message = str(error)
    accelerator, model, optimizer, windows = started(audit=False)
    accelerator.load_state(str(folder))
    num_left = 0
    for window in windows:
        hf_ga.train_step(accelerator, model, optimizer, window)
        num_left += 1
    accelerator, whole, optimizer, windows = started(audit=False)
    for window in windows:
        hf_ga.train_step(accelerator, whole, optimizer, window)
    parameters = zip(model.parameters(), whole.parameters(), strict=True)
    return [message, num_left, max(float((p - q).abs().max()) for p, q in parameters)]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_stop_and_the_checkpoint_before_goes_on(num_ranks, tmp_path):
    found = on_ranks(partial(resumed_on_a_rank, tmp_path), num_ranks, "ddp")
    assert len(found) == num_ranks
    for message, num_left, distance in found:
        assert "window 2 of epoch 0" in message
        assert "No parameter was updated" in message
        assert num_left == 2
        assert distance <= 1e-6
