"""Switches off what makes a step's gradient no weighted sum of those of its micro-batches: random
numbers and clipping. Notes which of them were called.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.draw import Draw
from hf_ga.draws.dropout.dropout_functions import dropped_attention
from hf_ga.draws.hashing import signed
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.draws.refusal import user_code
from hf_ga.model.override import override

_HASH = signed(0x9E3779B97F4A7C15)  # uniform: 0.62, normal: -0.98


class ConstantDraws(KeyedDraws):
    """Draws that give every element the same number, so that they depend on no split, and dropout
    that keeps all elements. `places` has those of tensors, as loaders draw scalar seeds.

    Args:
        device: The device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the draws; no micro-batch begins later."""
        super().__init__(allow_unkeyed=True)
        # The last argument is the rate of dropout.
        self.attend = lambda *arguments: dropped_attention(*arguments[:-1], 0.0)
        self._key = torch.zeros(1, dtype=torch.int64, device=device)
        self.begin(self._key, self._key)

    def draw(
        self, function: str, shape: torch.Size, device: torch.device, *args: Any, **kwargs: Any
    ) -> Draw:
        """Return a draw of the same numbers."""
        if len(shape) and function not in self.places:
            self.places[function] = user_code()
        return _ConstantDraw(self._key, 0, torch.Size(shape), None)

    def drop(self, input: Tensor, drop_probability: float) -> Tensor:
        """Return the input, as in evaluation mode."""
        self.draw("dropout", input.shape, input.device)
        return input


class _ConstantDraw(Draw):
    """A draw in which all elements have the same number."""

    def keep_mask(self, drop_probability: float) -> Tensor:
        """Return the mask of a dropout that keeps all."""
        return torch.ones(self.shape, dtype=torch.bool, device=self.keys.device)

    def _draw(self, from_hashes: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the number of one hash in each element."""
        return from_hashes(torch.full(self.shape, _HASH, device=self.keys.device))


@contextmanager
def unclipped() -> Iterator[dict[Tensor, list[float]]]:
    """In the block, torch's `clip_grad_norm_`, which Accelerate and Trainer call, does not clip.

    Yields:
        The first parameter of each call -> the norms to which gradients with a larger norm were to
        be clipped.
    """
    clipped: dict[Tensor, list[float]] = defaultdict(list)
    clip_grad_norm = nn.utils.clip_grad_norm_

    def only_norm(
        parameters: Tensor | Iterable[Tensor], max_norm: float, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Replacement of `clip_grad_norm_` that returns the norm only."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = clip_grad_norm(parameters, math.inf)
        if norm > max_norm:
            clipped[parameters[0]].append(float(max_norm))
        return norm

    with override(nn.utils, clip_grad_norm_=only_norm):
        yield clipped
