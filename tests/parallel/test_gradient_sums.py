"""Gradients are summed over the ranks at a window's end: whatever is unused or in other proportions
on a rank, or fails there.
"""

from functools import partial

import helpers as h
import pytest
import torch
import torch.distributed as dist
from forked import on_ranks, on_two_ranks, without_errors
from processes import make_accelerator
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_ga
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.parallel import gradient_sums

NUM_LAYERS = 6


class Layers(nn.Module):
    """A few layers of which the last is used by samples of class 2 only, and one never.

    Attributes:
        fails: Whether the backward raises before it reaches the first layer.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_LAYERS))
        self.of_class_2 = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)
        self.head = nn.Linear(4, 3)
        self.fails = False

    def forward(self, x, labels):
        hidden = x
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden).tanh()
            if index == 0 and self.fails:
                hidden.register_hook(fail)
        logits = self.head(hidden)
        if bool((labels == 2).any()):
            logits = logits + self.of_class_2(hidden) * (labels == 2).unsqueeze(1)
        loss = nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def fail(gradient):
    raise ValueError("this backward fails")


def points(number):
    torch.manual_seed(1)
    # Classes 0 and 1 on the first rank, and one sample of class 2 on the other.
    labels = [0, 1, 0, 1, 1, 0, 2, 1]
    return [{"x": torch.randn(4), "labels": torch.tensor(label)} for label in labels[:number]]


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def prepared(accelerator, model, samples, window_size, is_tried=True):
    """Model and windows."""
    windows = hf_ga.WindowLoader(
        samples,
        stack,
        accelerator=accelerator,
        per_device_batch_size=2,
        global_batch_size=window_size,
        shuffle=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, _ = hf_ga.prepare(accelerator, model, optimizer, windows if is_tried else None)
    return model, windows


def gradients(model):
    named = model.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def truth_of(samples):
    """Gradients of the full batch in float64, of the parameters that these samples use."""
    found = h.full_batch_gradient(Layers(), stack(samples))
    return {name: gradient for name, gradient in found.items() if gradient.any()}


def small_buckets():
    """Of this rank: several for such a small model."""
    gradient_sums.BUCKET_BYTES = 100


def two_windows(number):
    """Gradients of two windows of the same samples, and the sizes of what the second one sent."""
    small_buckets()
    accelerator = make_accelerator("ddp")
    base = Layers()
    model, windows = prepared(accelerator, base, points(number), number)
    send = dist.all_reduce
    found = []
    for _ in range(2):
        sent = []
        dist.all_reduce = lambda t, *args, sent=sent, **how: (
            sent.append(t),
            send(t, *args, **how),
        )[1]
        for window in windows:
            base.zero_grad()
            hf_ga.backward_window(accelerator, model, window)
        found.append(gradients(base))
    return *found, [tensor.numel() for tensor in sent if tensor.dtype == torch.float32]


@pytest.mark.parametrize("number", [8, 2], ids=["8 samples", "a rank without samples"])
def test_sums_in_buckets_are_those_of_the_full_batch(number):
    """Each gradient is sent once, and no rank has one that no sample of the window needs."""
    truth = truth_of(points(number))
    num_elements = sum(gradient.numel() for gradient in truth.values())
    for first, second, sent in without_errors(on_two_ranks(partial(two_windows, number))):
        assert len(sent) > 2
        assert sum(sent) == num_elements
        for found in (first, second):
            used = {name: gradient for name, gradient in found.items() if gradient is not None}
            assert used.keys() == truth.keys()
            assert h.relative_error(used, truth) < 1e-6


def failing_rank():
    small_buckets()
    accelerator = make_accelerator("ddp")
    base = Layers()
    model, windows = prepared(accelerator, base, points(8), 8)
    for _ in range(2):
        for window in windows:
            hf_ga.backward_window(accelerator, model, window)
        base.fails = accelerator.process_index == 1


def test_a_backward_that_fails_on_one_rank_ends_all():
    first, second = on_two_ranks(failing_rank)
    assert first == "ProcessFailed: process 1 failed: ValueError: this backward fails"
    assert second == "ValueError: this backward fails"


class TwoMeans(nn.Module):
    """A loss of two means, of which one leaves out samples with the label -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(4, 3)

    def forward(self, x, labels, others):
        loss = nn.functional.cross_entropy(self.first(x), labels)
        loss = loss + nn.functional.cross_entropy(self.second(x), others)
        return SequenceClassifierOutput(loss=loss)


def test_two_means_in_other_proportions_on_each_rank():
    """In a window that is not rehearsed, in one micro-batch a rank, which has one proportion only:
    4 and 4 targets in all windows but the last, there 2 and 2 on the first rank, 2 and 1 on the
    other.
    """
    number = 4 * 4
    samples = points(8) + points(8)
    for index, sample in enumerate(samples):
        is_left_out = index == number - 2  # which no trial has
        sample["others"] = torch.tensor(-100 if is_left_out else index % 3)

    def work():
        accelerator = make_accelerator("ddp")
        base = TwoMeans()
        model, windows = prepared(accelerator, base, samples, 4)
        for window in windows:
            base.zero_grad()
            result = hf_ga.backward_window(accelerator, model, window)
        return gradients(base), result.loss

    last = stack(samples[-4:])
    truth = h.full_batch_gradient(TwoMeans(), last)
    loss = TwoMeans()(**last).loss.item()
    for found, found_loss in without_errors(on_two_ranks(work)):
        assert h.relative_error(found, truth) < 1e-6
        assert found_loss == pytest.approx(loss, rel=1e-6)


def test_a_rank_without_memory_for_a_rehearsal_goes_on_with_the_others():
    """It waited for them in a window that it alone began with a rehearsal, and they for it."""

    def work():
        accelerator = make_accelerator("ddp")
        base = Layers()
        model, windows = prepared(accelerator, base, points(8) * 5, 8, is_tried=False)
        run_slot = OwnLoop._run_slot

        def run_slot_in_little_memory(loop, slot, *rest):
            if slot.is_rehearsal and accelerator.process_index == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            run_slot(loop, slot, *rest)

        OwnLoop._run_slot = run_slot_in_little_memory  # in a process that ends with it
        for window in windows:
            base.zero_grad()
            hf_ga.backward_window(accelerator, model, window)
        return {name: g for name, g in gradients(base).items() if g is not None}

    truth = truth_of(points(8))
    for found in without_errors(on_two_ranks(work, limit=30)):
        assert h.relative_error(found, truth) < 1e-6


def test_a_rank_that_fails_before_its_backward_ends_all_ranks():
    """The others would send their sums while it tells that it failed."""

    def work():
        accelerator = make_accelerator("ddp")
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        failing = []

        def collate(rows):
            return {"input": torch.stack([row["input"] for row in rows])}

        def spread(outputs, batch):
            if failing and accelerator.process_index == 1:
                raise ValueError("only here")
            return outputs.std()

        windows = hf_ga.WindowLoader(
            [{"input": torch.randn(4)} for _ in range(24)],
            collate,
            accelerator=accelerator,
            per_device_batch_size=2,
            global_batch_size=8,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer = hf_ga.prepare(
            accelerator, model, optimizer, windows, whole_batch=spread
        )
        for window in windows:
            try:
                hf_ga.train_step(accelerator, prepared, optimizer, window)
            except (ValueError, hf_ga.errors.ProcessFailed) as error:
                return window.index, type(error).__name__
            failing.append(True)
        return None

    assert on_ranks(work, 2) == [(1, "ProcessFailed"), (1, "ValueError")]
