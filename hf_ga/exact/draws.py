"""The functions through which torch draws dropout, each with its keyed stand-in.

A stand-in gets the `KeyedPlaces` of the model that is running and the original function, then the original's own arguments. It
falls back to the original where nothing is drawn, or nothing of ours.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ga.exact.dropped_attention import dropped_attention
from hf_ga.exact.keyed import keyed_dropout

if TYPE_CHECKING:
    from hf_ga.exact.places import KeyedPlaces


def dropout(
    places: "KeyedPlaces", original: Callable, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """For `F.dropout`, which `nn.Dropout` calls."""
    if not places.is_keyed(p, training):
        return original(input, p, training, inplace)
    return _dropped(places, input, p, inplace, input.shape)


def torch_dropout(places: "KeyedPlaces", original: Callable, input: Tensor, p: float, train: bool) -> Tensor:
    """For `torch.dropout`."""
    return _dropped(places, input, p, False, input.shape) if places.is_keyed(p, train) else original(input, p, train)


def feature_dropout(
    unbatched_dim: int | None,
    places: "KeyedPlaces",
    original: Callable,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """For `F.dropout1d` and its kin: one draw for each (sample, channel), or for each channel where torch reads the input as a
    single sample, because it has `unbatched_dim` axes.
    """
    if not places.is_keyed(p, training):
        return original(input, p, training, inplace)
    drawn = 1 if input.dim() == unbatched_dim else 2
    return _dropped(places, input, p, inplace, torch.Size((*input.shape[:drawn], *[1] * (input.dim() - drawn))))


def attention(
    places: "KeyedPlaces",
    original: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For `F.scaled_dot_product_attention`: with dropout, the attention weights are computed and dropped here."""
    if not places.is_keyed(dropout_p):
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kept = places.mask(torch.Size((*query.shape[:-1], key.shape[-2])), dropout_p)
    if kept is None:
        return original(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return dropped_attention(places.last_bias, query, key, value, attn_mask, is_causal, scale, kept, dropout_p)


def stochastic_depth(places: "KeyedPlaces", original: Callable, *size: Any, **kwargs: Any) -> Tensor:
    """For `torch.rand` where a module of stochastic depth drops a sample's whole branch (Huang et al. 2016), as transformers writes
    it: floor(rand + 1 - p) is 0 or 1. And where a module asks whether to skip a layer (`rand < layerdrop`), but skips none: before
    5.23, transformers drew there with probability 0 too. All other calls go to torch.
    """
    shape = torch.Size(size[0] if size and isinstance(size[0], Sequence) else size)
    if not shape and getattr(places.running, "layerdrop", None) == 0:
        places.mask(shape, 0.0)  # a place, so that this module is known when it runs
        return torch.ones(shape, **kwargs)
    p = getattr(places.running, "drop_prob", 0.0) if type(places.running).__name__.endswith("DropPath") else 0.0
    if not places.is_keyed(p):
        return original(*size, **kwargs)
    kept = places.mask(shape, p)
    # (1 + p) / 2 lies in the middle of [p, 1), the numbers by which torch would keep it: far enough from both ends in bf16 too.
    drawn = torch.full(shape, (1 + p) / 2, **kwargs)
    return drawn if kept is None else drawn * kept


# (where the function lives, its name, its stand-in). What draws in another way is found by the generators that it moves.
DRAWING_FUNCTIONS: list[tuple[object, str, Callable]] = [
    (F, "dropout", dropout),
    (F, "dropout1d", partial(feature_dropout, 2)),
    (F, "dropout2d", partial(feature_dropout, None)),
    (F, "dropout3d", partial(feature_dropout, 4)),
    (F, "scaled_dot_product_attention", attention),
    (torch, "dropout", torch_dropout),
    (torch, "rand", stochastic_depth),
]


def _dropped(places: "KeyedPlaces", x: Tensor, p: float, inplace: bool, mask_shape: torch.Size) -> Tensor:
    kept = places.mask(mask_shape, p)
    if kept is None:  # a probing forward, which drops nothing
        return x
    return x.mul_(kept.view(torch.uint8)).mul_(1 / (1 - p)) if inplace else keyed_dropout(x, p, kept)
