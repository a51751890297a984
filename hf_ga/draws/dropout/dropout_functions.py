"""The functions through which torch draws dropout, each with its keyed replacement: one that
derives the mask from the random keys of the samples.

A replacement takes the `KeyedDraws` and the original function, then the original's arguments. It
calls the original where no keyed mask is needed: nothing is dropped, or the call does not come from
the model.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ga.draws.dropout.masks import apply_dropout_mask

if TYPE_CHECKING:
    from hf_ga.draws.keyed import KeyedDraws


def dropout(
    num_drawn_dims: Callable[[Tensor], int],
    draws: "KeyedDraws",
    original: Callable,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Replacement of `F.dropout`, which `nn.Dropout` calls, and of `F.dropout1d`, `2d` and `3d`,
    which drop whole channels. The mask is derived from the random keys of the samples.

    Args:
        num_drawn_dims: Returns how many of the input's leading dims the mask has; it is broadcast
            over the other dims.
        draws: The keys of the samples.
        original: The torch function, called where no such mask is needed.
        input: As in `F.dropout`.
        p: As in `F.dropout`.
        training: As in `F.dropout`.
        inplace: As in `F.dropout`.
    """
    if not draws.needs_mask(p, training):
        return original(input, p, training, inplace)
    num_drawn = num_drawn_dims(input)
    num_broadcast = input.dim() - num_drawn
    if num_broadcast == 0 and not inplace:
        return draws.drop(input, p)
    mask_shape = [*input.shape[:num_drawn], *[1] * num_broadcast]
    kept = draws.mask(torch.Size(mask_shape), p)
    if inplace:
        # As uint8: a CPU has no vector instructions for bool times float.
        return input.mul_(kept.view(torch.uint8)).mul_(1 / (1 - p))
    return apply_dropout_mask(input, p, kept)


def torch_dropout(
    draws: "KeyedDraws", original: Callable, input: Tensor, p: float, train: bool
) -> Tensor:
    """Replacement of `torch.dropout`, which has no `inplace` argument. The mask is derived from the
    random keys of the samples.

    Args:
        draws: The keys of the samples.
        original: `torch.dropout` itself, called where no such mask is needed.
        input: As in `torch.dropout`.
        p: As in `torch.dropout`.
        train: As in `torch.dropout`.
    """
    if not draws.needs_mask(p, train):
        return original(input, p, train)
    return draws.drop(input, p)


def attention(
    draws: "KeyedDraws",
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
    """Replacement of `F.scaled_dot_product_attention`.

    Torch's fused kernels draw their own dropout masks. So with dropout, this function draws a mask
    of the attention weights from the random keys of the samples, and `draws.attend` computes the
    attention with it.

    Args:
        draws: The keys of the samples.
        original: The torch function, called where no such mask is needed.
        query: The other arguments are as in `F.scaled_dot_product_attention`.
    """
    if not draws.needs_mask(dropout_p):
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kept = draws.mask(torch.Size((*query.shape[:-1], key.shape[-2])), dropout_p)
    if enable_gqa:
        num_heads = query.shape[-3]
        key = key.repeat_interleave(num_heads // key.shape[-3], dim=-3)
        value = value.repeat_interleave(num_heads // value.shape[-3], dim=-3)
    bias = None
    if is_causal:
        bias = torch.full(
            kept.shape[-2:], -torch.inf, dtype=_scores_dtype(query), device=query.device
        ).triu_(1)
    elif attn_mask is not None:
        bias, has_keys = mask_to_bias(attn_mask, _scores_dtype(query))
        kept = kept & has_keys  # a query that may attend to no key gets the output 0
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return draws.attend(query, key, value, kept, bias, scale, dropout_p)


def _scores_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of the attention scores query @ key^T, which the bias of attention with
    keyed dropout gets: that of autocast if it is enabled, otherwise that of the query.
    """
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return query.dtype


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    bias: Tensor | None,
    scale: float,
    drop_probability: float,
) -> Tensor:
    """Compute attention with a given dropout mask: dropout(softmax(query @ key^T * scale + bias))
    @ value.

    Keyed dropout needs it, because torch's fused attention draws its own masks.

    Args:
        query: Shape (..., num_heads, query length, head_dim).
        key: Shape (..., num_heads, key length, head_dim).
        value: Shape (..., num_heads, key length, value dim).
        kept: The dropout mask, True where an attention weight is kept: bool, shape (..., num_heads,
            query length, key length).
        bias: Added to the attention scores, broadcastable to the shape of `kept`; or None.
        scale: Factor of the attention scores before the bias is added.
        drop_probability: Dropout probability p, with 0 < p < 1.

    Returns:
        A tensor of shape (..., num_heads, query length, value dim).
    """
    scores = (query * scale) @ key.mT
    if bias is not None:
        scores = scores + bias
    return apply_dropout_mask(scores.softmax(-1), drop_probability, kept) @ value


# (owner of a torch function, its name, its keyed replacement)
FUNCTIONAL: list[tuple[object, str, Callable]] = [
    (F, "dropout", partial(dropout, Tensor.dim)),
    # The mask has one element per (sample, channel); or one per channel, if the input has so few
    # dims that torch treats it as a single sample.
    (F, "dropout1d", partial(dropout, lambda input: 1 if input.dim() == 2 else 2)),
    (F, "dropout2d", partial(dropout, lambda input: 2)),
    (F, "dropout3d", partial(dropout, lambda input: 1 if input.dim() == 4 else 2)),
    (F, "scaled_dot_product_attention", attention),
]


def mask_to_bias(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert an attention mask to a bias that is added to the attention scores, in the replacement
    of torch's attention that draws keyed dropout.

    In a row in which every key is masked, the bias is 0 everywhere, so that its softmax is not NaN.

    Args:
        attn_mask: The mask of `F.scaled_dot_product_attention`: bool, True where a query may attend
            to a key; or float, already a bias.
        dtype: Of the bias, if the mask is bool.

    Returns:
        The bias, and whether each row has a key that is not masked: bool, shape (..., query length,
        1).
    """
    if attn_mask.dtype == torch.bool:
        has_keys = attn_mask.any(-1, keepdim=True)
        may_attend = attn_mask | ~has_keys
        # 1 - 1/1 is 0 and 1 - 1/0 is -inf: faster than masked_fill.
        return 1 - may_attend.to(dtype).reciprocal_(), has_keys
    has_keys = (attn_mask != -torch.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~has_keys, 0.0), has_keys
