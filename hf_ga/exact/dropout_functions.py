"""The functions through which torch draws dropout, each with its keyed replacement.

A replacement gets the keyed dropout of the model that is running and the original function, then
the original's own arguments. It calls the original where nothing is drawn, or where the call is not
the model's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.exact.masks import keyed_dropout


class Masks(Protocol):
    """What the replacements need of `dropout.KeyedDropout`; see there."""

    attend: Callable[..., Tensor]

    @property
    def running(self) -> nn.Module | None: ...
    def is_keyed(self, drop_probability: float, training: bool = True) -> bool: ...
    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor: ...
    def drop(self, input: Tensor, drop_probability: float) -> Tensor: ...


def dropout(
    drawn_axes: Callable[[Tensor], int],
    masks: Masks,
    original: Callable,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """For `F.dropout`, which `nn.Dropout` calls, and its kin that drop whole channels.

    Args:
        drawn_axes: how many of the input's first axes have separate draws; each draw is for all
            elements of the other axes.
    """
    if not masks.is_keyed(p, training):
        return original(input, p, training, inplace)
    drawn = drawn_axes(input)
    if drawn == input.dim() and not inplace:
        return masks.drop(input, p)
    kept = masks.mask(torch.Size((*input.shape[:drawn], *[1] * (input.dim() - drawn))), p)
    return (
        input.mul_(kept.view(torch.uint8)).mul_(1 / (1 - p))
        if inplace
        else keyed_dropout(input, p, kept)
    )


def torch_dropout(masks: Masks, original: Callable, input: Tensor, p: float, train: bool) -> Tensor:
    """For `torch.dropout`, which cannot work in place."""
    return dropout(
        Tensor.dim,
        masks,
        lambda input, p, train, inplace: original(input, p, train),
        input,
        p,
        train,
    )


def attention(
    masks: Masks,
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
    """For `F.scaled_dot_product_attention`: with dropout, the attention weights are computed and
    dropped here.
    """
    if not masks.is_keyed(dropout_p):
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kept, bias = masks.mask(torch.Size((*query.shape[:-1], key.shape[-2])), dropout_p), None
    if enable_gqa:
        key, value = (
            x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value)
        )
    scores_dtype = (
        torch.get_autocast_dtype(query.device.type)
        if torch.is_autocast_enabled(query.device.type)
        else query.dtype
    )
    if is_causal:
        bias = torch.full(
            kept.shape[-2:], -torch.inf, dtype=scores_dtype, device=query.device
        ).triu_(1)
    elif attn_mask is not None:
        bias, has_keys = _bias_of(attn_mask, scores_dtype)
        kept = kept & has_keys  # a row without keys has weight 0
    return masks.attend(
        query,
        key,
        value,
        kept,
        bias,
        query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p,
    )


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    bias: Tensor | None,
    scale: float,
    drop_probability: float,
) -> Tensor:
    """keyed_dropout(softmax(query key^T * scale + bias), drop_probability, kept) value.

    Shapes: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, V), kept (...,
        heads, L, S), bool.
    """
    scores = (query * scale) @ key.mT
    scores = scores if bias is None else scores + bias
    return keyed_dropout(scores.softmax(-1), drop_probability, kept) @ value


def stochastic_depth(masks: Masks, original: Callable, *size: Any, **kwargs: Any) -> Tensor:
    """For `torch.rand` where a module of stochastic depth drops a sample's whole branch (Huang et
    al. 2016), as transformers writes
    it: floor(rand + 1 - p) is 0 or 1. Also where a module draws whether to skip a layer (`rand <
        layerdrop`) although layerdrop is
    0, as transformers did before 5.23. All other calls go to torch.
    """
    shape = torch.Size(size[0] if size and isinstance(size[0], Sequence) else size)
    if not shape and getattr(masks.running, "layerdrop", None) == 0:
        masks.mask(shape, 0.0)  # a dropout site, so that this module's calls are followed
        return torch.ones(shape, **kwargs)
    p = (
        getattr(masks.running, "drop_prob", 0.0)
        if type(masks.running).__name__.endswith("DropPath")
        else 0.0
    )
    if not masks.is_keyed(p):
        return original(*size, **kwargs)
    # (1 + p) / 2 is the middle of [p, 1), the numbers by which torch would keep it: far enough from
    # both ends in bf16 too.
    return torch.full(shape, (1 + p) / 2, **kwargs) * masks.mask(shape, p)


# (where the function lives, its name, its replacement). Draws by other functions are found by the
# generators that they move.
DRAWING_FUNCTIONS: list[tuple[object, str, Callable]] = [
    (F, "dropout", partial(dropout, Tensor.dim)),
    # One draw for each (sample, channel), or for each channel where torch takes the input for a
    # single sample.
    (F, "dropout1d", partial(dropout, lambda input: 1 if input.dim() == 2 else 2)),
    (F, "dropout2d", partial(dropout, lambda input: 2)),
    (F, "dropout3d", partial(dropout, lambda input: 1 if input.dim() == 4 else 2)),
    (F, "scaled_dot_product_attention", attention),
    (torch, "dropout", torch_dropout),
    (torch, "rand", stochastic_depth),
]


def _bias_of(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a mask adds to the scores, and which rows have keys at all (bool, (..., L, 1)).

    Nothing is masked in a row without keys, so that its softmax is not NaN.
    """
    if attn_mask.dtype == torch.bool:
        has_keys = attn_mask.any(-1, keepdim=True)
        # 1 - 1/1 is 0 and 1 - 1/0 is -inf: faster than masked_fill
        return 1 - (attn_mask | ~has_keys).to(dtype).reciprocal_(), has_keys
    has_keys = (attn_mask != -torch.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~has_keys, 0.0), has_keys
