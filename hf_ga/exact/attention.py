"""Attention whose weights are dropped by a given mask, as it is defined."""

import torch
from torch import Tensor

from hf_ga.exact.masks import keyed_dropout


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    kept: Tensor,
    drop_probability: float,
) -> Tensor:
    """keyed_dropout(attention_weights(...), drop_probability, kept) @ value.

    Shapes: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, V), kept (..., heads, L, S), bool.
    """
    return keyed_dropout(attention_weights(query, key, attn_mask, is_causal, scale), drop_probability, kept) @ value


def attention_weights(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(query key^T * scale + mask) as `torch.nn.functional.scaled_dot_product_attention` defines it.

    Shapes: query (..., heads, L, E), key (..., heads, S, E); returns (..., heads, L, S). A row in which everything is masked is
    zero, as there.
    """
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        return scores.add_(causal_bias(*scores.shape[-2:], scores)).softmax(-1)
    if attn_mask is None:
        return scores.softmax(-1)
    bias, has_keys = bias_of(attn_mask, scores.dtype)
    return (scores + bias).softmax(-1) * has_keys.to(scores.dtype)


def bias_of(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a mask adds to the scores, and which rows have keys at all (bool, (..., L, 1)).

    Nothing is masked in a row without keys, so that its softmax is not NaN: its weights are to be set to zero.
    """
    if attn_mask.dtype == torch.bool:
        has_keys = attn_mask.any(-1, keepdim=True)
        # 1 - 1/1 is 0 and 1 - 1/0 is -inf: faster than masked_fill
        return 1 - (attn_mask | ~has_keys).to(dtype).reciprocal_(), has_keys
    has_keys = (attn_mask != -torch.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~has_keys, 0.0), has_keys


def causal_bias(num_queries: int, num_keys: int, like: Tensor) -> Tensor:
    """-inf above the diagonal, 0 elsewhere: shape (num_queries, num_keys), with the type and device of `like`."""
    return torch.full((num_queries, num_keys), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
