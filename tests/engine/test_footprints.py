"""Norms and products of the gradients of samples, which are compared with those of a rehearsal."""

import torch

from hf_ga.engine.look.rehearsal import _norms_and_products


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
