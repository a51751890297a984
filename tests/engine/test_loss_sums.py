"""Sums and numbers of targets that a function returns: those of halves must add up to the whole."""

import pytest
import torch

from hf_ga.engine.sums.loss_sums import LossSums
from hf_ga.errors import LossNotAdditive

POSITIVES = torch.tensor([0, 1, 0, 0, 1, 1])
OUTPUTS = torch.tensor([[1.0], [2.0], [0.5], [3.0], [0.25], [4.0]])


def call(number_of, rows, *, sums=None, is_checked=False, outputs=None):
    """The result for some rows of the data."""
    sums = sums or LossSums(lambda outputs, batch: (outputs["logits"].sum(), number_of(batch["y"])))
    outputs = {"logits": OUTPUTS[rows]} if outputs is None else outputs
    batch = {"y": POSITIVES[rows], "names": [str(row) for row in rows]}
    return sums(outputs, batch, len(rows), is_checked=is_checked)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1], [0], [1, 4, 5]])
@pytest.mark.parametrize("number_of", [len, torch.sum, lambda y: y.sum() * 0.5])
def test_numbers_that_add_up_are_returned(number_of, rows):
    total, number = call(number_of, rows, is_checked=True)
    assert float(total) == float(OUTPUTS[rows].sum())
    assert number == float(number_of(POSITIVES[rows]))


@pytest.mark.parametrize(
    ("number_of", "rows"),
    [
        (lambda y: 100, [0, 1, 2]),
        (lambda y: 100, [1]),
        (lambda y: y.sum() + 1, [1, 4]),
        (lambda y: y.sum().clamp(min=1), [0, 2]),
        (lambda y: y.sum().clamp(min=1), [0]),
        (lambda y: max(int(y.sum()), 1), [0, 1]),
        (lambda y: y.sum() if y.any() else len(y), [0, 1, 2, 3]),
    ],
)
def test_a_constant_or_a_raised_number_is_refused(number_of, rows):
    with pytest.raises(LossNotAdditive, match=r"two halves together.*true number of targets"):
        call(number_of, rows, is_checked=True)


def test_the_smallest_number_so_far_is_checked_unasked():
    """2 for the first rows, which is true; the first one that may have been raised is a 1."""
    sums = LossSums(lambda outputs, batch: (outputs["logits"].sum(), batch["y"].sum().clamp(min=1)))
    sums._smallest = 2
    call(None, [1, 4], sums=sums)
    with pytest.raises(LossNotAdditive):
        call(None, [2, 3], sums=sums)


def test_a_sum_that_compares_samples_is_refused():
    sums = LossSums(lambda outputs, batch: (outputs["logits"].max(), len(batch["y"])))
    with pytest.raises(LossNotAdditive, match="whole_batch"):
        call(None, [0, 1], sums=sums)


def test_outputs_without_rows_of_samples_are_not_taken_apart():
    """Here (time, samples): the number cannot be tried."""
    sums = LossSums(lambda outputs, batch: (outputs.sum(), 100))
    _, number = call(None, [0, 1], sums=sums, outputs=torch.ones(5, 2), is_checked=True)
    assert number == 100
