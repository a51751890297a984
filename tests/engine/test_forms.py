"""What a window's loss does that no rehearsed one did: such a window gets a look.

Each test has its control: without looks the window is accepted, and its gradient is wrong.
"""

import itertools
import random

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from forked import on_two_ranks, without_errors
from processes import make_accelerator
from torch import nn
from windows import one_window, window_gradient

import hf_ga
from hf_ga.engine.look import looks as looks_module
from hf_ga.errors import DataError, LossNotAdditive
from hf_ga.order.length_plan import Computed

LATE = 37  # a sample in the fifth window, which is not rehearsed


class Head(nn.Module):
    """Three classes, and a loss that the test chooses."""

    def __init__(self, loss=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.loss = loss

    def forward(self, x, labels):
        logits = self.layer(x)
        outputs = {"logits": logits}
        if self.loss is not None:
            outputs = {"loss": self.loss(logits, labels, x), **outputs}
        return outputs


def points(num_samples: int, **late) -> list[dict]:
    """late: entries of sample `LATE`."""
    torch.manual_seed(1)
    samples = [{"x": torch.randn(4), "labels": torch.tensor(i % 3)} for i in range(num_samples)]
    if late:
        samples[LATE] |= late
    return samples


def stack(samples: list[dict]) -> dict:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def train(
    samples, model, *, size=4, window=8, accelerator=None, looks=True, monkeypatch, **options
):
    """Trains windows in order; returns how many were trained."""
    if not looks:
        monkeypatch.setattr(looks_module, "MAX_LOOKS", 0)
    accelerator = accelerator or Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = hf_ga.WindowLoader(
        samples,
        stack,
        accelerator=accelerator,
        per_device_batch_size=size,
        global_batch_size=window,
        shuffle=False,
    )
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, **options)
    num_trained = 0
    for trained_window in windows:
        hf_ga.train_step(accelerator, model, optimizer, trained_window)
        num_trained += 1
    return num_trained


def hardest_of_large(logits, labels, x):
    """The hardest half, but only in batches with a large input."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    if x.max() > 100:
        losses = losses.topk(max(1, len(losses) // 2)).values
    return losses.mean()


def summed_hardest_of_large(outputs, batch):
    losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    number = len(losses)
    if batch["x"].max() > 100:
        losses = losses.topk(max(1, len(losses) // 2)).values
    return losses.sum(), number


def centred_of_large(outputs, batch):
    """Compares samples, but only in batches with a large input."""
    losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    if batch["x"].max() > 100:
        losses = losses * (losses.detach() - losses.detach().mean())
    return losses.sum(), len(losses)


LARGE = {"x": torch.full((4,), 101.0)}
# name: (loss of the model, loss function)
LOSSES = {
    "the model's own": (hardest_of_large, None),
    "a sum with another number": (None, summed_hardest_of_large),
    "a sum that compares samples": (None, centred_of_large),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_new_form_stops_its_window_before_the_update(name, monkeypatch):
    own, loss_fn = LOSSES[name]
    model = Head(own)
    with pytest.raises(LossNotAdditive):
        train(points(64, **LARGE), model, loss_fn=loss_fn, monkeypatch=monkeypatch)
    clean = Head(own)
    train(points(32), clean, loss_fn=loss_fn, monkeypatch=monkeypatch)
    assert all(map(torch.equal, model.parameters(), clean.parameters())), "it changed weights"
    options = {"loss_fn": loss_fn, "looks": False, "monkeypatch": monkeypatch}
    assert train(points(64, **LARGE), Head(own), **options) == 8, "control"


def term_of_call(number, draw=lambda: None):
    """A mean that only one call of the loss adds: one of the sixth window."""
    calls = itertools.count()

    def loss(logits, labels, x):
        draw()
        terms = [F.cross_entropy(logits, labels), logits.square().mean()]
        return sum(terms if next(calls) == number else terms[:1])

    return loss


@pytest.mark.parametrize("call", [13, 14])
def test_a_term_that_follows_a_count_of_calls_is_refused(call, monkeypatch):
    """The look does not have it, so nothing in it contradicts."""
    with pytest.raises(LossNotAdditive, match=r"by what it counts.*sync_gradients"):
        train(points(64), Head(term_of_call(call)), monkeypatch=monkeypatch)


def test_a_term_that_is_drawn_as_allowed_is_accepted(monkeypatch):
    model = Head(term_of_call(13, draw=random.random))
    options = {"allow_split_dependent_randomness": True, "monkeypatch": monkeypatch}
    assert train(points(64), model, **options) == 8


def test_a_new_form_that_is_right_is_computed_three_times(monkeypatch):
    """As planned, with a rehearsal, and as planned; the next time it is known."""

    def branching(outputs, batch):
        losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
        if batch["x"].max() > 100:
            losses = losses * 1.0
        return losses.sum(), len(losses)

    sizes = []
    model = Head()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["x"])), with_kwargs=True
    )
    samples = points(64, **LARGE)
    samples[60] |= LARGE  # in the last window
    assert train(samples, model, loss_fn=branching, monkeypatch=monkeypatch) == 8
    planned = [4, 4]
    rehearsed = [3, *planned]  # another number of samples than in any micro-batch
    assert sizes == [*rehearsed * 3, *planned, *planned, *rehearsed, *planned * 4]


def test_a_model_that_was_never_rehearsed_is_before_it_is_split(monkeypatch):
    """Windows of one micro-batch are the full batch; then micro-batches are smaller."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.forward = lambda x, labels: {
        "loss": F.cross_entropy(nn.Sequential.forward(model, x), labels)
    }
    accelerator = Accelerator()
    options = {"accelerator": accelerator, "global_batch_size": 8, "shuffle": False}
    whole = [*hf_ga.WindowLoader(points(48), stack, per_device_batch_size=8, **options)]
    split = [*hf_ga.WindowLoader(points(48), stack, per_device_batch_size=4, **options)]
    for window in whole[:5]:
        hf_ga.backward_window(accelerator, model, window)
    with pytest.raises(LossNotAdditive, match="BatchNorm"):
        hf_ga.backward_window(accelerator, model, split[5])


def test_a_sum_with_a_number_of_0_counts(monkeypatch):
    """Positives are what the loss divides by; micro-batches without one have a gradient."""

    def per_positive(outputs, batch):
        losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="sum")
        return losses, (batch["labels"] == 2).sum()

    samples = points(12)
    for i, sample in enumerate(samples):
        sample["labels"] = torch.tensor(2 if i in (0, 5) else i % 2)
    model = Head()
    reference = Head()
    total, number = per_positive(reference(**stack(samples)), stack(samples))
    (total / number).backward()
    train(samples, model, size=2, window=12, loss_fn=per_positive, monkeypatch=monkeypatch)
    for trained, p in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(trained, p - 0.1 * p.grad, rtol=1e-5, atol=1e-6)


def test_weights_that_add_up_to_0_have_no_mean(monkeypatch):
    def signed(outputs, batch):
        losses = F.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
        sign = torch.where(batch["labels"] == 2, -2.0, 1.0)
        return (sign * losses).sum(), sign.sum()

    with pytest.raises(DataError, match="add up to 0"):
        train(points(6), Head(), size=2, window=6, loss_fn=signed, monkeypatch=monkeypatch)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_no_false_alarm_in_a_run_with_dropout(precision, own_accelerator_state):
    """Of lengths that differ."""
    accelerator = Accelerator(mixed_precision=precision)
    samples = h.token_samples(32)
    model = h.gpt2(0.1)
    windows = hf_ga.WindowLoader(
        samples, h.pad_right, accelerator=accelerator, per_device_batch_size=2, global_batch_size=8
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    sizes = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    for number, window in enumerate([*windows, *windows]):
        is_rehearsed = number < 3
        # All were planned with padding, which is not computed in the later ones.
        planned = window.planned_for(Computed.PADDED if is_rehearsed else window.state.computed)
        sizes.clear()
        hf_ga.train_step(accelerator, model, optimizer, window)
        assert len(sizes) == len(planned.micro_batches) + is_rehearsed


def on_a_rank() -> int:
    """The late sample is on one rank only."""
    torch.manual_seed(0)
    accelerator = make_accelerator("ddp")
    with pytest.MonkeyPatch.context() as monkeypatch:
        options = {"accelerator": accelerator, "size": 2, "monkeypatch": monkeypatch}
        return train(points(64, **LARGE), Head(), loss_fn=centred_of_large, **options)


def test_a_rank_that_finds_it_stops_all():
    found = on_two_ranks(on_a_rank)
    assert len(found) == 2
    assert all("compares samples" in str(text) for text in found), found


def test_the_longest_sample_of_a_micro_batch_is_seen_padded():
    """XLNet reads the last column, which is padding for all but the longest samples: those of a
    shorter micro-batch have none there.
    """
    samples = h.class_samples(12)
    full = h.full_batch_gradient(h.xlnet_classifier(), h.pad_right(samples[:8]))
    found, _ = window_gradient(h.xlnet_classifier(), one_window(samples[:8], 5))
    assert h.relative_error(found, full) < 1e-6


def late_widths() -> list[dict]:
    """Windows of 4 samples: all have 9 tokens, but those of the fifth window 5, 5, 11 and 11."""
    lengths = [9] * 16 + [5, 5, 11, 11]
    torch.manual_seed(2)
    rows = [torch.randint(1, h.VOCABULARY, (length,)).tolist() for length in lengths]
    return [
        {"input_ids": row, "attention_mask": [1] * len(row), "labels": sum(row) % h.NUM_CLASSES}
        for row in rows
    ]


def error_of_late_widths(mode: str = "no", *, knows_padding: bool = False) -> float:
    """Of the gradient of the fifth window.

    Args:
        knows_padding: Whether the loader believes that padding was tried.
    """
    accelerator = make_accelerator(mode) if mode == "ddp" else Accelerator()
    samples = late_widths()
    plain = h.xlnet_classifier()
    optimizer = torch.optim.SGD(plain.parameters(), 0.0)
    model, _ = hf_ga.prepare(accelerator, plain, optimizer)
    sizes = {"per_device_batch_size": 2, "global_batch_size": 4}
    loader = hf_ga.WindowLoader(
        samples, h.pad_right, accelerator=accelerator, shuffle=False, **sizes
    )
    loader.state.is_width_tried = knows_padding
    for window in loader:
        model.zero_grad()
        hf_ga.backward_window(accelerator, model, window)
    full = h.full_batch_gradient(h.xlnet_classifier(), h.pad_right(samples[16:]))
    return h.relative_error(h.gradients(plain), full)


def test_padding_is_tried_in_the_first_window_of_several_widths():
    """Those that were rehearsed had one width."""
    assert error_of_late_widths() < 1e-6
    assert error_of_late_widths(knows_padding=True) > 1e-2  # control


def test_padding_is_tried_where_only_ranks_have_other_widths():
    """Each rank has one micro-batch of each window, so sees one width."""

    def work() -> tuple[float, float]:
        return error_of_late_widths("ddp"), error_of_late_widths("ddp", knows_padding=True)

    for error, unknown in without_errors(on_two_ranks(work)):
        assert error < 1e-6
        assert unknown > 1e-2  # control
