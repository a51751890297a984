"""The random draws of the reference: hf_ga's, with the same numbers in float64 as in float32."""

from typing import Any

import torch
from torch import Tensor

from hf_ga.draws.draw import Draw
from hf_ga.draws.keyed import KeyedDraws


class ReferenceDraws(KeyedDraws):
    """Keyed draws for a model that computes in float64 what it trains in float32."""

    def draw(self, *args: Any, **kwargs: Any) -> Draw:
        """Return the next draw of the micro-batch, see `KeyedDraws.draw`."""
        draw = super().draw(*args, **kwargs)
        return _Float32Draw(draw.keys, draw.site, draw.shape, draw.sample_dim)


class _Float32Draw(Draw):
    """A draw whose numbers have the digits of float32 in float64, too: with more digits, normal
    numbers are others altogether.
    """

    def uniform(self, dtype: torch.dtype) -> Tensor:
        """Draw uniformly distributed numbers of [0, 1)."""
        return super().uniform(_at_most_float32(dtype)).to(dtype)

    def normal(self, dtype: torch.dtype) -> Tensor:
        """Draw standard normal numbers."""
        numbers = super().normal(_at_most_float32(dtype))
        return numbers.double() if dtype == torch.float64 else numbers

    def exponential(self, dtype: torch.dtype) -> Tensor:
        """Draw exponentially distributed positive numbers of rate 1."""
        numbers = super().exponential(_at_most_float32(dtype))
        return numbers.double() if dtype == torch.float64 else numbers


def _at_most_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 in place of float64."""
    return torch.float32 if dtype == torch.float64 else dtype
