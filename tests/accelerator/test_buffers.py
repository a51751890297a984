"""A buffer of a model that counts samples, as BatchNorm's running statistics do, counts each sample
of a window once: not again in a rehearsal, nor where the window is computed again.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from documented_loop import reset_states
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from hf_ga import Accelerator
from hf_ga.engine.window_engine import WindowEngine

WINDOW = 8
NUM_SAMPLES = 29  # windows of 8, 8, 8 and 5 samples, of which the last is not rehearsed
MICRO_BATCH = 2
NUM_MICRO_BATCHES = 4
GENERATOR = torch.Generator().manual_seed(5)
# Rows of 1 to 7 numbers, and a class. In the last window only, there is class 0.
SAMPLES = [
    (torch.randn(1 + i % 7, generator=GENERATOR), 0 if i == 27 else 1 + i % 2)
    for i in range(NUM_SAMPLES)
]


@pytest.fixture(autouse=True)
def _fresh_states():
    yield
    reset_states()


class Counting(nn.Module):
    """Classifies rows by their means, and counts those that it got in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden = nn.Linear(1, 6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.number = 0
        self.tally = torch.zeros(())

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.seen += len(x)
        self.number += len(x)
        self.tally += len(x)  # in place, so that the attribute is the same tensor
        means = x.sum(1) / lengths
        return self.head(self.hidden(means[:, None]).tanh())


def collate(rows: list) -> tuple[Tensor, Tensor, Tensor]:
    numbers, labels = zip(*rows, strict=True)
    lengths = torch.tensor([len(row) for row in numbers])
    return pad_sequence(list(numbers), batch_first=True), lengths, torch.tensor(labels)


def plain(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x, lengths), y)


def over_the_padded_width(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    """Windows are padded to one width."""
    return F.cross_entropy(model(x, torch.full_like(lengths, x.shape[1])), y)


def two_means(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    """One over all samples, one over those of two classes; their proportion changes.""" ""
    logits = model(x, lengths)
    return F.cross_entropy(logits, y) + F.cross_entropy(logits, y, ignore_index=0)


def through_a_teacher(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    """A prepared model that is not trained counts, too."""
    logits = model(x, lengths)
    return F.cross_entropy(logits, y) + F.mse_loss(logits, model.teacher[0](x, lengths))


def number_seen(model: Counting) -> int:
    """How many samples it has counted, in the buffer as in the attributes."""
    assert model.seen == model.number == model.tally
    return model.number


def count(body) -> int:
    """How many samples a run of one epoch has counted."""
    reset_states()
    accelerator = Accelerator(gradient_accumulation_steps=NUM_MICRO_BATCHES)
    model = Counting()
    teacher = Counting().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(SAMPLES, MICRO_BATCH, collate_fn=collate)
    model, teacher, optimizer, loader = accelerator.prepare(model, teacher, optimizer, loader)
    model.teacher = [teacher]  # in a list, so that it is no part of the model
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(body(model, *batch))
            optimizer.step()
            optimizer.zero_grad()
    return number_seen(teacher if body is through_a_teacher else model)


def count_by_hand(body) -> int:
    """As `count`, in a loop whose first iteration turns into a rehearsal of its window."""
    reset_states()
    accelerator = Accelerator()
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(SAMPLES, MICRO_BATCH, collate_fn=collate, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for index, batch in enumerate(loader):
        accelerator.backward(body(model, *batch) / NUM_MICRO_BATCHES)
        if (index + 1) % NUM_MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()
    return number_seen(model)


@pytest.mark.parametrize("body", [plain, through_a_teacher])
def test_a_rehearsal_counts_nothing(body):
    assert count(body) == NUM_SAMPLES


@pytest.mark.parametrize(
    ("run", "body", "reason"),
    [
        (count, over_the_padded_width, "is computed once more: a sample's gradient"),
        (count, two_means, "is computed once more: terms of the loss have divisors"),
        (count_by_hand, plain, ""),
    ],
    ids=["padded", "regrouped", "by hand"],
)
def test_samples_that_come_again_count_once(run, body, reason, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "hf_ga"):
        assert run(body) == NUM_SAMPLES - (run is count_by_hand)
    assert reason in caplog.text
    monkeypatch.setattr(WindowEngine, "restore_buffers", lambda self: None)  # the control
    assert run(body) > NUM_SAMPLES
