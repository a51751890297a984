"""One mean that different layers compute for different samples, and means that a micro-batch may
lack: the same window in micro-batches of one kind of samples, and of both.
"""

import helpers as h
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from windows import one_window, window_gradient

import hf_ga
from hf_ga.engine.sums.same_terms import SameTerms
from hf_ga.errors import LossNotAdditive

SORTED = [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
MIXED = [[0, 5, 6], [1, 2, 7], [3, 4, 8]]
LATE = [[0, 1], [2, 3], [4, 5, 6, 7, 8]]


class Kinds(nn.Module):
    """Samples of kind 0 go through one layer, those of kind 1 through the other one."""

    def __init__(self, loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.Linear(4, 7)])
        self.loss = loss

    def forward(self, x, kind, labels):
        logits = x.new_zeros(len(x), 7)
        for number, layer in enumerate(self.layers):
            rows = kind == number
            if rows.any():
                logits = logits.index_put((rows,), layer(x[rows]))
        loss = self.loss(self, logits, x, kind, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def one_mean(model, logits, x, kind, labels):
    return F.cross_entropy(logits, labels)


def beside_another(model, logits, x, kind, labels):
    """One mean beside another one, which all micro-batches have."""
    return F.cross_entropy(logits, labels) + logits.square().mean()


def mean_of_each_kind(model, logits, x, kind, labels):
    """Two means, of which a micro-batch may lack one."""
    losses = [
        F.cross_entropy(model.layers[number](x[kind == number]), labels[kind == number])
        for number in range(2)
        if (kind == number).any()
    ]
    return sum(losses)


def only_kinds_apart(model, logits, x, kind, labels):
    """A mean for each kind, but no micro-batch of both is computed."""
    if kind.float().mean() in (0, 1):
        return mean_of_each_kind(model, logits, x, kind, labels)
    return F.mse_loss(x @ model.layers[0].weight.T, x @ model.layers[1].weight.T)


def samples_of_kinds() -> list[dict]:
    torch.manual_seed(1)
    return [
        {"x": torch.randn(4), "kind": torch.tensor(int(i > 3)), "labels": torch.tensor(i % 7)}
        for i in range(9)
    ]


def stack(samples: list[dict]) -> dict:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def planned(parts: list[list[int]]):
    def plan(lengths, num_processes):
        return [[np.array(part) for part in parts]]

    return plan


@pytest.mark.parametrize("loss", [one_mean, beside_another, mean_of_each_kind])
@pytest.mark.parametrize("parts", [SORTED, MIXED, LATE], ids=["sorted", "mixed", "late"])
def test_any_split_is_the_full_batch(loss, parts):
    """Of five windows: later ones are not rehearsed. Control: divided the other way."""
    model = Kinds(loss)
    data = samples_of_kinds()
    truth = h.full_batch_gradient(model, stack(data))
    for _ in range(5):
        window = one_window(data, planned(parts), stack, shuffle=False)
        gradient, result = window_gradient(model, window)
        assert h.relative_error(gradient, truth) < 1e-6
        assert result.loss == pytest.approx(h.mean_loss(model, stack(data)).item(), rel=1e-6)
    other = Kinds(mean_of_each_kind if loss is one_mean else one_mean)
    assert h.relative_error(h.full_batch_gradient(other, stack(data)), truth) > 0.1


def test_kinds_that_meet_late_only():
    """The first windows have one kind each, so their rehearsals show one key."""
    data = samples_of_kinds()
    data = [*[data[i % 4] for i in range(9)] * 3, *[data[4 + i % 4] for i in range(9)], *data]
    model = Kinds(one_mean)
    windows = hf_ga.WindowLoader(
        data,
        stack,
        accelerator=Accelerator(),
        planner=planned(SORTED),
        global_batch_size=9,
        shuffle=False,
    )
    for start, window in zip(range(0, len(data), 9), windows, strict=True):
        gradient, _ = window_gradient(model, window)
        truth = h.full_batch_gradient(model, stack(data[start : start + 9]))
        used = {name: value for name, value in truth.items() if name in gradient}
        assert h.relative_error(gradient, used) < 1e-6


def test_what_cannot_be_known_is_refused():
    model = Kinds(only_kinds_apart)
    with pytest.raises(LossNotAdditive):
        window_gradient(
            model, one_window(samples_of_kinds(), planned(SORTED), stack, shuffle=False)
        )


def with_another_of_one_kind(model, logits, x, kind, labels):
    """One mean of both kinds, and in a micro-batch with a large input a mean beside it whose key was
    found to mean the same.
    """
    loss = F.cross_entropy(logits, labels)
    if x.max() > 100:
        other = x.new_zeros(len(x), 7).index_put((kind == 0,), model.layers[0](x[kind == 0]))
        loss = loss + F.cross_entropy(other, labels)
    return loss


def test_two_means_of_one_key_are_refused():
    """They would be divided as one."""
    data = [*samples_of_kinds(), *samples_of_kinds()]
    data[17]["x"] = torch.full((4,), 101.0)
    model = Kinds(with_another_of_one_kind)
    windows = hf_ga.WindowLoader(
        data,
        stack,
        accelerator=Accelerator(),
        planner=planned(MIXED),
        global_batch_size=9,
        shuffle=False,
    )
    plain, odd = windows
    sorted_window = one_window(data[:9], planned(SORTED), stack, shuffle=False)
    window_gradient(model, sorted_window)  # here the keys are found to be one
    window_gradient(model, plain)
    with pytest.raises(LossNotAdditive, match="but this micro-batch has both"):
        window_gradient(model, odd)


def test_classes_of_keys():
    """Those of all ranks are joined, in whatever order they come."""
    first = SameTerms()
    second = SameTerms()
    first.join("a", "b")
    first.join("c", "d")
    second.join("d", "b")
    second.note(["a", "e"])
    first.merge([first.state(), second.state()])
    second.merge([first.state(), second.state()])
    assert [first.key_of(key) for key in "abcde"] == [*"aaaae"]
    assert [second.key_of(key) for key in "abcde"] == [*"aaaae"]
    assert first.undecided(["a", "e"]) is None
    assert first.undecided(["a", "f"]) == ("a", "f")
