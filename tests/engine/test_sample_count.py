"""Each sample of a window is computed once, on all ranks together, or the window is refused."""

import helpers as h
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from forked import on_two_ranks, outcome, without_errors
from processes import make_accelerator
from steps import backward_window
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import hf_ga
from hf_ga.engine.checks.sample_count import SampleCount, check_samples
from hf_ga.errors import ConfigError


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def points(number: int) -> list[dict]:
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(i % 3)} for i in range(number)]


def stack(samples: list[dict]) -> dict:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def planned_by(rank: int | None):
    """A planner that gives both halves of a window the other way round on one rank."""

    def work() -> str | None:
        accelerator = make_accelerator("ddp")
        model = Head()
        prepared, _ = hf_ga.prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.0))

        def plan(lengths: np.ndarray, num_processes: int) -> list[list[np.ndarray]]:
            halves = np.split(np.arange(len(lengths)), 2)
            return [
                [half] for half in (halves[::-1] if accelerator.process_index == rank else halves)
            ]

        (window,) = hf_ga.WindowLoader(
            points(8), stack, accelerator=accelerator, planner=plan, global_batch_size=8
        )
        return outcome(lambda: backward_window(accelerator, prepared, window) and None)

    return work


def test_ranks_that_plan_different_windows_are_stopped():
    """Both compute the same half. Control: the same plan."""
    for said in on_two_ranks(planned_by(1)):
        assert said.startswith("ConfigError: some samples of the window were computed twice")
    assert without_errors(on_two_ranks(planned_by(None))) == [None, None]


def test_every_split_counts_each_sample_once():
    model = Head()
    truth = h.full_batch_gradient(model, stack(points(8)))
    for size in (1, 3, 8):
        (window,) = hf_ga.WindowLoader(
            points(8),
            stack,
            accelerator=Accelerator(),
            planner=h.by_number(size),
            global_batch_size=8,
        )
        model.zero_grad()
        backward_window(Accelerator(), model, window)
        assert h.relative_error(h.gradients(model), truth) < 1e-6


@pytest.mark.parametrize("computed", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, 3, 3]])
def test_other_samples_are_found(computed):
    count = SampleCount()
    count.expect(np.arange(4))
    count.add(np.array(computed))
    with pytest.raises(ConfigError, match="Nothing was updated"):
        check_samples(count.sums(), 1)


def test_the_order_and_the_split_do_not_matter():
    count = SampleCount()
    count.expect(np.arange(4))
    count.add(np.array([3, 0]))
    count.add(np.array([1, 2]))
    check_samples(count.sums(), 1)
    check_samples((0.0, 0.0), 2)


@pytest.mark.parametrize(
    "computed",
    [(1, 2, 3, 4, 3, 4, 5, 6), (0, 1, 1, 1, 3, 4, 5, 7), (0, 1, 2, 3, 3, 4, 6, 7)],
    ids=["overlapping shards", "one three times", "one twice, another sum"],
)
def test_positions_with_the_same_sum_are_told_apart(computed):
    """In each of 2,000 windows of 8 samples, anywhere in an epoch."""
    for start in range(0, 2_000_000, 1000):
        samples = SampleCount()
        samples.add(start + np.array(computed))
        samples.expect(start + np.arange(8))
        counted, expected = samples.sums()
        assert counted != expected, start
