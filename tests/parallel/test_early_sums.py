"""Gradients are summed over the ranks during the last backward: the same sums, whatever is unused,
changes late or fails.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from forked import on_ranks, without_errors
from processes import make_accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_ga
from hf_ga.exact import early_sums
from hf_ga.exact.early_sums import BucketedAllReduce

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
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Shared(nn.Module):
    """Reentrant checkpointing of a layer that is used twice: its gradient is made in two parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x, labels):
        hidden = self.first(x)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden.tanh(), use_reentrant=True)
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def fail(gradient):
    raise ValueError("this backward fails")


def points(number):
    torch.manual_seed(1)
    # Classes 0 and 1 on the first rank, and one sample of class 2 on the other.
    labels = [0, 1, 0, 1, 1, 0, 2, 1]
    return [{"x": torch.randn(4), "labels": torch.tensor(label)} for label in labels[:number]]


def stack(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def train(accelerator, model, number=8, **sizes):
    """Gradients of two windows of the same samples: the second is summed early."""
    windows = hf_ga.WindowLoader(
        points(number),
        stack,
        accelerator=accelerator,
        per_device_batch_size=2,
        global_batch_size=number,
        shuffle=False,
        **sizes,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows)
    found = []
    for _ in range(2):
        for window in windows:
            model.zero_grad()
            hf_ga.backward_window(accelerator, prepared, window)
            found.append(gradients(model))
    return found


def gradients(model):
    named = model.named_parameters()
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def small_buckets():
    """Of this rank: several for such a small model."""
    early_sums.BucketedAllReduce.__init__.__defaults__ = (100, None)


def of_rank(build, number=8):
    small_buckets()
    return train(make_accelerator("ddp"), build(), number)


@pytest.mark.parametrize("number", [8, 2], ids=["8 samples", "a rank without samples"])
@pytest.mark.parametrize("build", [Layers, Shared])
def test_the_same_bits_as_after_the_backward(build, number):
    reference = train(Accelerator(cpu=True), build(), number)[0]
    for plain, early in without_errors(on_ranks(partial(of_rank, build, number), 2)):
        assert plain.keys() == early.keys() == reference.keys()
        for name, expected in reference.items():
            if expected is None:
                assert plain[name] is early[name] is None
                continue
            assert torch.equal(plain[name], early[name])
            assert torch.allclose(early[name], expected, rtol=1e-5, atol=1e-8)


def events_of_rank():
    """What happened from the first gradient of the second window on, in its order."""
    accelerator = make_accelerator("ddp")
    model = Layers()
    small_buckets()
    events = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    send = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: (events.append("sum"), send(*args, **kwargs))[1]
    train(accelerator, model, number=4)
    first_gradients = [i for i, event in enumerate(events) if event == "head.bias"]
    return events[first_gradients[-1] :]


def test_the_first_sum_begins_before_the_last_gradient_exists():
    for events in without_errors(on_ranks(events_of_rank, 2)):
        last_gradient = max(i for i, event in enumerate(events) if event != "sum")
        assert events.index("sum") < last_gradient


def failing_rank():
    accelerator = make_accelerator("ddp")
    model = Layers()
    small_buckets()
    windows = hf_ga.WindowLoader(
        points(8),
        stack,
        accelerator=accelerator,
        per_device_batch_size=2,
        global_batch_size=8,
        shuffle=False,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    prepared, _ = hf_ga.prepare(accelerator, model, optimizer, windows)
    for _ in range(2):
        for window in windows:
            hf_ga.backward_window(accelerator, prepared, window)
        model.fails = accelerator.process_index == 1
    return None


def test_a_backward_that_fails_on_one_rank_ends_all():
    first, second = on_ranks(failing_rank, 2)
    assert first == "ProcessFailed: process 1 failed: ValueError: this backward fails"
    assert second == "ValueError: this backward fails"


def test_a_gradient_that_changes_after_it_was_sent_is_noticed(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group, async_op: None)
    first = nn.Parameter(torch.ones(2))
    second = nn.Parameter(torch.ones(2))
    sums = BucketedAllReduce([first, second], bucket_bytes=1)
    with sums.during_backward():
        (second * first).sum().backward()
        assert not sums.must_repeat
        second.sum().backward()
    assert sums.must_repeat


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
