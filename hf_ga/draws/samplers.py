"""The distributions of torch's random functions: each sampler returns the numbers of one draw, with
the parameters that the in-place method of the same distribution has (`Tensor.normal_`, ...).

`low` and `high` are called `from` and `to` by torch.
"""

import math

import torch
from torch import Tensor

from hf_ga.draws.draw import Draw
from hf_ga.draws.values import computing_dtype


def uniform(draw: Draw, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniformly distributed numbers of [low, high), as `Tensor.uniform_` draws them."""
    if dtype.is_complex:
        return torch.view_as_complex(draw.pairs().uniform(dtype.to_real()))
    numbers = draw.uniform(dtype)
    if (low, high) == (0.0, 1.0):
        return numbers
    return numbers.mul_(high - low).add_(low)


def normal(draw: Draw, dtype: torch.dtype, mean: complex = 0.0, std: float = 1.0) -> Tensor:
    """Normally distributed numbers, as `Tensor.normal_` draws them. Of complex ones, the real and
    the imaginary part have half of the variance each.
    """
    if dtype.is_complex:
        numbers = torch.view_as_complex(draw.pairs().normal(dtype.to_real()))
        return numbers.mul_(std / math.sqrt(2)).add_(mean)
    _check_floating(dtype)
    numbers = draw.normal(dtype)
    if (mean, std) == (0.0, 1.0):
        return numbers
    return numbers.mul_(std).add_(mean)


def log_normal(draw: Draw, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Tensor:
    """Numbers whose logarithm is normally distributed, as `Tensor.log_normal_` draws them."""
    return normal(draw, dtype, mean, std).exp_()


def exponential(draw: Draw, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    """Exponentially distributed numbers, as `Tensor.exponential_` draws them."""
    _check_floating(dtype)
    return draw.exponential(dtype).div_(lambd)


def cauchy(draw: Draw, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    """Cauchy distributed numbers, as `Tensor.cauchy_` draws them."""
    angles = draw.uniform(computing_dtype(dtype)).sub_(0.5).mul_(math.pi)
    return angles.tan_().mul_(sigma).add_(median)


def geometric(draw: Draw, dtype: torch.dtype, p: float) -> Tensor:
    """Numbers of Bernoulli trials up to the first success, as `Tensor.geometric_` draws them."""
    if p == 1:
        return torch.ones(draw.shape, device=draw.keys.device)
    return draw.exponential(dtype).div_(-math.log1p(-p)).ceil_()


def bernoulli(draw: Draw, dtype: torch.dtype, p: Tensor | float = 0.5) -> Tensor:
    """True with probability p, as `Tensor.bernoulli_` draws it: bool."""
    if isinstance(p, Tensor):
        p = p.detach()
        dtype = p.dtype
        torch._assert_async(
            ((p >= 0) & (p <= 1)).all(), "bernoulli: a probability is not in [0, 1]"
        )
    return draw.uniform(computing_dtype(dtype)) < p


def integers(draw: Draw, dtype: torch.dtype, low: int = 0, high: int | None = None) -> Tensor:
    """Uniformly distributed integers of [low, high), as `Tensor.random_` draws them: int64.

    Without `high`, they go up to the largest integer up to which the dtype has all integers.
    """
    return draw.integers(low, _end(dtype) if high is None else high)


def _check_floating(dtype: torch.dtype) -> None:
    """Raise NotImplementedError, as torch does, unless a dtype is floating point."""
    if not dtype.is_floating_point:
        raise NotImplementedError(f"continuous distributions are not implemented for {dtype}")


def _end(dtype: torch.dtype) -> int:
    """Return the largest integer that `Tensor.random_` draws for a dtype, plus 1."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1
    return torch.iinfo(dtype).max + 1
