"""The kernels that draw dropout, on a GPU or in Triton's interpreter: the bits of `masks.py`."""

import helpers as h
import numpy as np
import pytest
import torch
from tried import later, tried
from windows import one_window, window_gradient

from hf_ga.draws.dropout import mask_kernel, masks
from hf_ga.rows.packing import Packing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SITE = 0x9E3779B97F4A7C15
SHAPES = [(5, 16), (5, 3, 9, 9), (10, 1500), (5, 2, 3, 4, 3), (5, 3, 17, 33), (5, 0, 3)]
# The kernel's places follow from the shape, its threshold from p, its rounding from the type: each
# value of each meets a usual one of the others.
SHAPES_AND_RATES = [*((shape, 0.1) for shape in SHAPES), ((5, 16), 0.0), ((5, 16), 0.999)]
SHAPES_AND_TYPES = [
    *((shape, torch.float32) for shape in SHAPES),
    ((5, 3, 9, 9), torch.bfloat16),
    ((5, 3, 9, 9), torch.float16),
]


def use_kernels(monkeypatch):
    """Triton's kernels run on DEVICE: without a GPU, in the interpreter on a CPU."""
    monkeypatch.setattr(masks, "has_kernels", lambda device: device.type == DEVICE.type)


@pytest.fixture
def with_kernels(monkeypatch):
    use_kernels(monkeypatch)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; in bf16 up to a step in the interpreter, which rounds towards zero."""
    if found.dtype == torch.bfloat16 and DEVICE.type == "cpu":
        assert torch.equal(found == 0, expected == 0)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, expected)


def keys_of(num_samples: int) -> torch.Tensor:
    return masks.sample_keys(1, 2, np.arange(num_samples))


@pytest.mark.parametrize(("shape", "p"), SHAPES_AND_RATES)
def test_the_mask_is_that_of_the_cpu_bit_for_bit(shape, p, monkeypatch):
    expected = masks.keep_mask(keys_of(5), SITE, shape, 0, p)
    use_kernels(monkeypatch)
    keys = keys_of(5).to(DEVICE)
    assert torch.equal(masks.keep_mask(keys, SITE, shape, 0, p).cpu(), expected)
    if p == 0.1 and expected.numel() > 100:
        assert not torch.equal(masks.keep_mask(keys, SITE + 1, shape, 0, p).cpu(), expected)


@pytest.mark.parametrize(("shape", "axis"), [((6, 5, 4), 1), ((3, 4), None), ((2, 7, 8), None)])
def test_other_sample_axes_too(shape, axis, monkeypatch):
    keys = keys_of(5) if axis == 1 else masks.window_key(1, 2, 3)
    expected = masks.keep_mask(keys, SITE, shape, axis, 0.4)
    use_kernels(monkeypatch)
    assert torch.equal(masks.keep_mask(keys.to(DEVICE), SITE, shape, axis, 0.4).cpu(), expected)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_TYPES)
def test_dropped_values_and_gradients_are_those_with_a_mask(shape, dtype, with_kernels):
    """Also the gradient of the gradient, which a penalty on gradients needs."""
    keys = keys_of(5).to(DEVICE)
    x = torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)
    kept = masks.keep_mask(keys, SITE, shape, 0, 0.3)
    y = masks.drop(x, keys, SITE, 0, 0.3)
    assert_same(y, masks.apply_dropout_mask(x.detach(), 0.3, kept))
    upstream = torch.randn_like(y).requires_grad_()
    (of_x,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    assert_same(of_x, masks.apply_dropout_mask(upstream.detach(), 0.3, kept))
    (of_upstream,) = torch.autograd.grad(of_x, upstream, torch.ones_like(of_x))
    assert_same(of_upstream, masks.apply_dropout_mask(torch.ones_like(y), 0.3, kept))


def test_what_the_kernel_cannot_do_is_left_to_the_mask(with_kernels):
    keys = keys_of(5).to(DEVICE)
    for x, axis in [
        (torch.ones(5, 4, dtype=torch.float64), 0),
        (torch.ones(4, 5, 3), 1),
        (torch.ones(5, 1, 1, 1, 1, 2), 0),
    ]:
        assert masks.drop(x.to(DEVICE), keys, SITE, axis, 0.3) is None


def test_packed_tokens_keep_what_padded_ones_do(with_kernels):
    samples = torch.tensor([0, 0, 2, 2, 2], device=DEVICE)
    positions = torch.tensor([0, 1, 0, 1, 2], device=DEVICE)
    keys = keys_of(3).to(DEVICE)
    x = torch.randn(3, 3, 20, device=DEVICE)
    padded = masks.drop(x, keys, SITE, 0, 0.5)
    packed = x[samples, positions].unsqueeze(0)
    found = masks.drop(packed, keys, SITE, 0, 0.5, (samples, positions))
    assert torch.equal(found[0], padded[samples, positions])
    other = masks.drop(packed, keys, SITE, 0, 0.5, (samples, positions + 1))
    assert not torch.equal(other, found)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares a CPU with its interpreter")
def test_a_window_has_the_gradient_without_kernels(monkeypatch):
    samples = h.class_samples(4)
    drawn = []

    def gradient():
        model = h.bert_classifier(0.1, num_hidden_layers=1)
        assert not tried(model, samples, speed_ups=[Packing()]).left_out
        return window_gradient(model, later(one_window(samples, 2)))[0]

    launch = mask_kernel._launch
    monkeypatch.setattr(mask_kernel, "_launch", lambda *a: drawn.append(a) or launch(*a))
    expected = gradient()
    assert not drawn
    use_kernels(monkeypatch)
    found = gradient()
    assert drawn
    assert all(torch.equal(found[name], expected[name]) for name in expected)
