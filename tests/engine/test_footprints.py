"""Norms and products of the gradients of samples, which are compared with those of a rehearsal."""

import numpy as np
import pytest
import torch

from hf_ga.engine.look import footprints
from hf_ga.engine.look.choice import Choice, rehearsal_parts, rehearsed_offsets
from hf_ga.engine.look.footprints import _norms_and_products, _numbers_of


def test_float32_against_float64():
    """Also where squares overflow or underflow, and where values that are not used are infinite."""
    torch.manual_seed(0)
    gradients = torch.randn(3, 1_000_000) ** 3
    values = torch.randn(3, 1_000_000) * 3 + 1
    gradients[0] *= 1e-28
    gradients[1] *= 1e20
    values[2] *= 1e25
    gradients[2, :100] = 0
    values[2, :100] = torch.inf
    norms, products, bounds = _norms_and_products(values, gradients)
    exact = gradients.double()
    used = torch.where(gradients == 0, 0.0, values).double()
    torch.testing.assert_close(norms, exact.norm(dim=1), rtol=2e-7, atol=0)
    torch.testing.assert_close(bounds, used.norm(dim=1) * exact.norm(dim=1), rtol=4e-7, atol=0)
    assert bool(((products - (used * exact).sum(1)).abs() < 2e-7 * bounds).all())
    naive = torch.linalg.vecdot(gradients, gradients).sqrt()
    assert naive[0] == 0, "control"
    assert naive[1].isinf(), "control"


def test_samples_without_elements_have_no_gradient():
    assert not _norms_and_products(torch.zeros(2, 0), torch.zeros(2, 0)).any()


@pytest.mark.parametrize("has_values", [True, False])
def test_samples_are_compared_a_few_at_a_time(has_values, monkeypatch):
    """The copies that the numbers take of all logits at once were three times a micro-batch."""
    gradients = torch.randn(7, 5, 11)
    values = torch.randn(7, 5, 11) if has_values else None
    chosen = [6, 0, 3, 2, 5]
    at_once = torch.tensor(_numbers_of(values, gradients, chosen))
    sizes = []

    def noted(values, gradients):
        sizes.append(len(gradients))
        return _norms_and_products(values, gradients)

    monkeypatch.setattr(footprints, "MAX_ELEMENTS", 2 * 5 * 11)
    monkeypatch.setattr(footprints, "_norms_and_products", noted)
    torch.testing.assert_close(torch.tensor(_numbers_of(values, gradients, chosen)), at_once)
    assert sizes == [2, 2, 1]
    assert at_once[:, 0] == pytest.approx(gradients[chosen].flatten(1).norm(dim=1), rel=1e-6)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rehearsal_takes_no_more_memory_than_the_largest_micro_batch(is_first):
    """A plan by length has many short samples in one micro-batch, and the longest one is always
    rehearsed.
    """
    lengths = np.array([3] * 20 + [50] * 5 + [70, 80, 90, 95, 100])
    planned = [np.arange(20), np.arange(20, 25), np.arange(25, 30)]  # at most 500 padded tokens
    choice = Choice(np.empty(0, int), lengths, np.empty(0, int), is_first)
    for rehearsed in (rehearsed_offsets(planned, choice), rehearsal_parts(planned, 2, choice)[0]):
        assert 29 in rehearsed
        assert 3 <= len(rehearsed) <= 5
    unknown = Choice(np.empty(0, int), np.zeros(30, int), np.empty(0, int), True)
    assert len(rehearsed_offsets(planned, unknown)) > 15, "control"
