"""The random draws of the reference: hf_ga's, with the same numbers in float64 as in float32."""

from functools import partial
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

    def _draw(self, from_hashes: partial) -> Tensor:
        """Draw the numbers from hashes; those of float64 in float32."""
        if from_hashes.keywords.get("dtype") != torch.float64:
            return super()._draw(from_hashes)
        return super()._draw(partial(from_hashes, dtype=torch.float32)).double()
