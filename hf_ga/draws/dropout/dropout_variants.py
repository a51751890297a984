"""Replacements of torch's rarer dropouts: in place, of whole channels, alpha dropout, and of the
randomized leaky ReLU.

They are called like those of `functions.py`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_ga.draws.dropout.masks import apply_dropout_mask
from hf_ga.draws.values import computing_dtype

if TYPE_CHECKING:
    from hf_ga.draws.keyed import KeyedDraws

SELU_LIMIT = 1.7580993408473766  # -scale x alpha of SELU (Klambauer et al. 2017)


def dropout(
    num_drawn_dims: int | None,
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    p: float,
    train: bool,
) -> Tensor:
    """Replacement of `torch.dropout_` and of `torch.feature_dropout`, which drops whole channels.

    Args:
        num_drawn_dims: How many of the input's leading dims the mask has; it is broadcast over the
            others. None: all.
        draws: The keys of the samples.
        original: The torch function; its name ends with "_" if it works in place.
        input: As in the original, like the other arguments.
    """
    if not draws.needs_mask(p, train):
        return original(input, p, train)
    kept = _mask(num_drawn_dims, draws, original, input, p)
    if original.__name__.endswith("_"):
        return input.mul_(kept.to(input.dtype)).mul_(1 / (1 - p))
    return apply_dropout_mask(input, p, kept)


def alpha_dropout(
    num_drawn_dims: int | None,
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    p: float,
    train: bool,
) -> Tensor:
    """Replacement of `torch.alpha_dropout` and of `torch.feature_alpha_dropout`, with the arguments
    of `dropout`. With s = SELU_LIMIT, it computes

        a x + b where the mask keeps, -a s + b elsewhere, a = ((1 - p) (1 + p s^2))^-1/2, b = a p s,

    so that the mean and the variance of inputs with mean 0 and variance 1 stay the same.
    """
    if not draws.needs_mask(p, train):
        return original(input, p, train)
    kept = _mask(num_drawn_dims, draws, original, input, p).to(input.dtype)
    scale = 1 / math.sqrt((1 - p) * (1 + p * SELU_LIMIT**2))
    offset = (kept - 1 + p) * (SELU_LIMIT * scale)
    if original.__name__.endswith("_"):
        return input.mul_(kept * scale).add_(offset)
    return input * (kept * scale) + offset


def rrelu(
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Replacement of `torch.rrelu` and `torch.rrelu_`: slopes of [lower, upper) where x <= 0."""
    if not training:
        return original(input, lower, upper, training)
    draw = draws.draw(original.__name__, input.shape, input.device, generator)
    slopes = draw.uniform(computing_dtype(input.dtype)).mul_(upper - lower).add_(lower)
    factors = slopes.masked_fill_(input.detach() > 0, 1.0).to(input.dtype)
    if original.__name__.endswith("_"):
        return input.mul_(factors)
    return input * factors


def _mask(
    num_drawn_dims: int | None,
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    drop_probability: float,
) -> Tensor:
    """Draw a dropout mask of the leading dims of the input."""
    drawn = input.shape[:num_drawn_dims]
    shape = torch.Size([*drawn, *[1] * (input.dim() - len(drawn))])
    draw = draws.draw(original.__name__, shape, input.device)
    return draw.keep_mask(drop_probability)
