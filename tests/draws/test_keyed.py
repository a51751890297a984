"""Keyed dropout masks: good random bits, and a function of (sample key, dropout site, coordinate)
only.

Tests whose checker could pass on anything are shown to fail on a naive mask.
"""

import math

import numpy as np
import pytest
import torch
from hash_oracle import SIGMAS, oracle_key, splitmix64
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.draws.dropout.masks import apply_dropout_mask, keep_mask, sample_keys, window_key

SITE = 0x3DB9EABACC675CE
PROBABILITIES = [0.01, 0.1, 0.5, 0.9]


def keys_of(num_samples):
    return sample_keys(0, 0, np.arange(num_samples))


def mask(shape, p=0.5):
    return keep_mask(keys_of(shape[0]), SITE, shape, 0, p)


def correlation_sigmas(first, second):
    """Correlation of two masks of p = 0.5, from their known mean and variance, times sqrt(N):
    standard normal if independent.
    """
    product = (first.double() - 0.5) * (second.double() - 0.5)
    return abs(product.mean().item()) / 0.25 * math.sqrt(product.numel())


def shifted(kept, lags):
    """Two views of `kept`, `lags[i]` apart along axis i."""
    first = tuple(
        slice(max(0, -lag), size - max(0, lag)) for lag, size in zip(lags, kept.shape, strict=True)
    )
    second = tuple(
        slice(max(0, lag), size - max(0, -lag)) for lag, size in zip(lags, kept.shape, strict=True)
    )
    return kept[first], kept[second]


def oracle_element(sample_key: int, site: int, coordinates: list[int], p: float) -> bool:
    """One mask element in plain, unsigned Python integers.

    `coordinates`: the row within the sample, then every axis but the sample's. All but the last are
    hashed with 64 bits; the last with two rounds of 32 bits, which take the lower and the upper
    half of the row's key. Kept where the result, read as a signed integer, reaches p of the way
    from -2**31 to 2**31.
    """
    row = splitmix64((sample_key ^ site) % 2**64)
    for coordinate in coordinates[:-1]:
        row = splitmix64(row ^ coordinate)
    bits = (row % 2**32) ^ ((coordinates[-1] + 1) * 0x846CA68B % 2**32)
    bits = bits * 0x7FEB352D % 2**32
    bits = (bits ^ (bits >> 15)) + (row >> 32)
    bits = bits * 0x846CA68B % 2**32
    return (bits + 2**31) % 2**32 >= min(round(p * 2**32), 2**32 - 1)


@given(
    seed=st.integers(-(2**66), 2**66),
    epoch=st.integers(0, 2**40),
    positions=st.lists(st.integers(0, 2**62), min_size=1, max_size=4),
    site=st.integers(0, 2**64 - 1),
    coordinates=st.lists(st.integers(0, 6), max_size=3),
    rows_per_sample=st.integers(1, 3),
    p=st.sampled_from(PROBABILITIES),
    data=st.data(),
)
def test_every_element_is_that_of_the_documented_hash(
    seed, epoch, positions, site, coordinates, rows_per_sample, p, data
):
    """Catches sign extension in the shifts, a lost axis, swapped coordinates, a wrong sample axis
    or row order, a flat index (which padding moves), and masks that depend on which samples a
    micro-batch has and in which order.
    """
    keys = sample_keys(seed, epoch, np.array(positions))
    row = data.draw(st.integers(0, rows_per_sample - 1))
    axis = data.draw(st.integers(0, len(coordinates)))
    sizes = [coordinate + data.draw(st.integers(1, 4)) for coordinate in coordinates]
    shape = (*sizes[:axis], len(positions) * rows_per_sample, *sizes[axis:])
    kept = keep_mask(keys, site, shape, axis, p)
    assert kept.shape == shape
    assert kept.dtype == torch.bool
    for sample, position in enumerate(positions):
        index = (*coordinates[:axis], sample * rows_per_sample + row, *coordinates[axis:])
        assert kept[index].item() == oracle_element(
            oracle_key(4, seed, epoch, position), site, [row, *coordinates], p
        )


@given(
    seed=st.integers(),
    epoch=st.integers(0, 99),
    index=st.integers(0, 2**62),
    shape=st.lists(st.integers(1, 5), max_size=3),
)
def test_window_draws_are_that_of_the_documented_hash(seed, epoch, index, shape):
    """Catches a window draw that uses the samples' stream, one mask for all windows, or an axis of
    size 1 that is forgotten.
    """
    kept = keep_mask(window_key(seed, epoch, index), SITE, shape, None, 0.5)
    key = oracle_key(5, seed, epoch, index)
    for coordinates in np.ndindex(*shape):
        assert kept[coordinates].item() == oracle_element(key, SITE, [0, *coordinates], 0.5)


def test_parts_do_not_change_a_mask(monkeypatch):
    """On a CPU a large mask is made in parts."""
    whole = mask((6, 5, 40))
    monkeypatch.setattr("hf_ga.draws.dropout.masks.ELEMENTS_IN_CACHE", 130)
    assert torch.equal(mask((6, 5, 40)), whole)
    assert mask((3, 0, 4)).shape == (3, 0, 4)
    assert mask((3, 4, 0)).shape == (3, 4, 0)


def test_masks_are_uncorrelated_along_diagonals():
    """Catches a hash of the sum of the coordinates (see the control) and other lattice
    structure.
    """
    kept = mask((24, 96, 96))
    for down in (1, 2, 3, 8, 32):
        for right in (-32, -8, -3, -2, -1, 1, 2, 3, 8, 32):
            assert correlation_sigmas(*shifted(kept, (0, down, right))) < SIGMAS, (down, right)
            assert correlation_sigmas(*shifted(kept, (down % 8, right, 0))) < SIGMAS, (down, right)
    i, j = torch.meshgrid(torch.arange(96), torch.arange(96), indexing="ij")
    naive = mask((1, 192))[0][i + j].expand(24, 96, 96)
    assert correlation_sigmas(*shifted(naive, (0, 1, -1))) > 10 * SIGMAS


def test_long_rows_have_no_autocorrelation():
    """Catches column bits that repeat or drift: the columns of a row share one key and go through
    32 bits only.
    """
    kept = mask((64, 1 << 14))
    for lag in [
        *range(1, 33),
        *(1 << k for k in range(6, 14)),
        *((1 << k) + 1 for k in range(6, 13)),
        768,
        3072,
    ]:
        assert correlation_sigmas(*shifted(kept, (0, lag))) < SIGMAS, f"lag {lag}"


def test_keep_rate():
    """Catches an off-by-half threshold, p and 1-p exchanged, biased bits, and wrap-around of the
    threshold, which would drop everything at a tiny p or keep everything at p close to 1.
    """
    shape = (1000, 1000)
    for p in PROBABILITIES:
        assert abs(mask(shape, p).double().mean().item() - (1 - p)) < SIGMAS * math.sqrt(
            p * (1 - p) / 1000**2
        )
    assert mask(shape, 0.0).all()
    assert mask(shape, 1e-12).all()
    assert not mask(shape, 1 - 1e-12).any()
    assert (mask(shape, 0.1) >= mask(shape, 0.3)).all(), (
        "the same bits: a smaller p keeps all that a larger one keeps"
    )
    assert abs((~mask(shape, 1e-4)).sum().item() - 100) < SIGMAS * 10


@pytest.mark.parametrize("p", [0.1, 0.9])
@pytest.mark.parametrize(
    ("mask_shape", "dtype", "tolerance"),
    [
        ((4, 5, 6), torch.float64, 1e-15),
        ((4, 5, 1), torch.float64, 1e-15),
        ((4, 5, 6), torch.float32, 2e-7),
    ],
)
def test_keyed_dropout_value_and_gradient(mask_shape, dtype, tolerance, p):
    """Catches a missing scale, a scale of 1/p, and a mask that backward does not apply."""
    x = torch.randn(4, 5, 6, dtype=dtype, requires_grad=True)
    upstream = torch.randn(4, 5, 6, dtype=dtype)
    kept = mask(mask_shape, p)
    out = apply_dropout_mask(x, p, kept)
    out.backward(upstream)
    by_hand = kept.double().expand(4, 5, 6) / (1 - p)
    torch.testing.assert_close(out.double(), x.detach().double() * by_hand, rtol=tolerance, atol=0)
    torch.testing.assert_close(x.grad.double(), upstream.double() * by_hand, rtol=tolerance, atol=0)
    assert out.dtype == dtype
    assert apply_dropout_mask(x.bfloat16(), p, kept).dtype == torch.bfloat16, (
        "a float32 mask would promote it under autocast"
    )
