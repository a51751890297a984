"""Random numbers from 64-bit hashes: each function converts a tensor of hashes, one per element.

Of a hash, the upper bits are used first. All bits are equally good (`hashing.mix`).
"""

import math

import torch
from torch import Tensor

from hf_ga.draws.hashing import mixed

MASK32 = (1 << 32) - 1
MAX_INT64 = (1 << 63) - 1


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers are computed: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uniform(hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert hashes to uniformly distributed numbers in [0, 1), as `torch.rand` draws them.

    The numbers are multiples of 2**-digits with the digits of the dtype (24 for float32, 53 for
    float64), so that none is rounded to 1.
    """
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return _upper_bits(hashes, digits).to(dtype).mul_(2.0**-digits)


def positive_uniform(hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert hashes to uniformly distributed numbers in (0, 1], of which the logarithm is finite.

    Args:
        hashes: int64.
        dtype: float32 or float64.
    """
    digits = 53 if dtype == torch.float64 else 32
    return _upper_bits(hashes, digits).add_(1).to(dtype).mul_(2.0**-digits)


def normal(hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert hashes to standard normal numbers (Box and Muller 1958):

        sqrt(-2 log(u1)) * cos(2 pi u2), with u1 in (0, 1] and u2 in [0, 1) uniform.

    Args:
        hashes: int64. For float32, u2 is taken from the lower half of the hash; for float64, from
            the hash of the hash.
        dtype: float32 or float64.
    """
    radius = positive_uniform(hashes, dtype).log_().mul_(-2.0).sqrt_()
    if dtype == torch.float64:
        turns = uniform(mixed(hashes), dtype)
    else:
        turns = hashes.bitwise_and(MASK32).to(dtype).mul_(2.0**-32)
    return radius.mul_(turns.mul_(2 * math.pi).cos_())


def exponential(hashes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert hashes to exponentially distributed numbers of rate 1: -log(u). None is 0, as
    `Tensor.exponential_` guarantees (`F.gumbel_softmax` takes the logarithm).

    Args:
        hashes: int64.
        dtype: float32 or float64.
    """
    smallest = torch.finfo(dtype).eps / 2
    return positive_uniform(hashes, dtype).log_().neg_().clamp_(min=smallest)


def integers(hashes: Tensor, low: int, high: int) -> Tensor:
    """Convert hashes to uniformly distributed integers of [low, high): int64.

    Args:
        hashes: int64.
        low: Smallest integer.
        high: Largest integer + 1; high - low is at most 2**63, or 2**64.
    """
    if high - low == 1 << 64:
        return hashes.clone()
    numbers = hashes.bitwise_and(MAX_INT64)
    if high - low < 1 << 63:
        numbers.remainder_(high - low)
    return numbers.add_(low)


def _upper_bits(hashes: Tensor, bits: int) -> Tensor:
    """Return the upper bits of hashes as non-negative int64."""
    return hashes.bitwise_right_shift(64 - bits).bitwise_and_((1 << bits) - 1)
