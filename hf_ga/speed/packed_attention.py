"""Attention of packed tokens: each sample attends to itself only.

Three ways. The model's own function on samples that are padded again for this one call: right for every mask and with attention
dropout, on every device. For plain full or causal attention without dropout, on CUDA, a kernel that takes the samples' boundaries
(`torch.nn.attention.varlen.varlen_attn`); with dropout, on a CPU, a function that takes one sample after the other.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_ga.exact.dropped_attention import DroppedAttentionBySample, attention_weights
from hf_ga.exact.packed_tokens import PackedTokens

if TYPE_CHECKING:
    from hf_ga.exact.places import KeyedPlaces

Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value
# What models hand to attention functions and what changes nothing in plain attention. Anything else that is set: not plain.
WITHOUT_EFFECT = {"position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD, MULTIPLE_OF_HEAD = 256, 8  # of FlashAttention


def padded_attention(
    tokens: PackedTokens,
    original: Callable,
    module: nn.Module,
    heads: Heads,
    mask: Tensor | None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The model's own function with the model's own mask on samples that are padded for this call.

    Args:
        heads: query, key and value, each (1, heads, T, size). mask: as the model made it for (n, S).

    Returns:
        (output of shape (1, T, heads, size), None) as functions of transformers' attention interface return it.
    """
    query, key, value = (tokens.spread(x.transpose(1, 2)).transpose(1, 2) for x in heads)
    if "position_ids" in more:
        more["position_ids"] = None  # of the packed tokens; the mask says all
    return tokens.pack(original(module, query, key, value, mask, **more)[0]), None


def is_plain(dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **more: Any) -> bool:
    """Whether these arguments of an attention function ask for nothing but attention, full or causal, with dropout or without."""
    return all(value is None or value is False or name in WITHOUT_EFFECT for name, value in more.items())


def separate_attention(
    tokens: PackedTokens, places: "KeyedPlaces", module: nn.Module, heads: Heads, dropout: float, **more: Any
) -> tuple[Tensor, None]:
    """Each sample by itself, with keyed dropout of its attention weights: on a CPU."""
    query, key, value = (x[0] for x in in_groups(heads))
    with places.padded():  # dropout of attention weights is drawn for padded samples
        kept = places.mask(torch.Size((tokens.num_samples, len(query), tokens.width, tokens.width)), dropout)
    bias = tokens.causal_bias if is_causal(module, **more) else None
    scale = more.get("scaling") or query.shape[-1] ** -0.5
    output = DroppedAttentionBySample.apply(query, key, value, kept, bias, tokens.spans, scale, dropout)
    return output.transpose(0, 1).unsqueeze(0), None


def in_groups(heads: Heads) -> Heads:
    """Key and value once for each head of the query."""
    query, key, value = heads
    if groups := query.shape[1] // key.shape[1] - 1:
        key, value = (x.repeat_interleave(groups + 1, dim=1) for x in (key, value))
    return query, key, value


def is_causal(module: nn.Module, is_causal: bool | None = None, **more: Any) -> bool:
    """Whether a token attends to earlier ones only, as transformers' own functions read it."""
    return getattr(module, "is_causal", True) if is_causal is None else is_causal


def takes_separately(query: Tensor, tokens: PackedTokens) -> bool:
    """Whether `separate_attention` computes these."""
    in_full = query.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return query.device.type == "cpu" and in_full and tokens.spans is not None


def varlen_attention(tokens: PackedTokens, run: Callable, module: nn.Module, heads: Heads, **more: Any) -> tuple[Tensor, None]:
    """The same by a kernel that takes boundaries. `run` is `varlen_attn`, or `reference_varlen` in the proof."""
    query, key, value = (x.transpose(1, 2)[0] for x in in_groups(heads))
    bounds, longest, window = tokens.boundaries, tokens.longest, (-1, 0 if is_causal(module, **more) else -1)
    output = run(query, key, value, bounds, bounds, longest, longest, scale=more.get("scaling"), window_size=window)
    return output.unsqueeze(0), None


def kernel_takes(query: Tensor, value: Tensor) -> bool:
    """Whether `varlen_attn` computes these: half precision on a GPU that FlashAttention knows, heads of a size that it knows."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and size == value.shape[-1]
        and size <= LARGEST_HEAD
        and not size % MULTIPLE_OF_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def in_autocast(heads: Heads) -> Heads:
    """Cast as autocast casts the inputs of torch's own attention."""
    kind = heads[0].device.type
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in heads) if torch.is_autocast_enabled(kind) else heads


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds_q: Tensor,
    bounds_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """What `varlen_attn` computes from these arguments, sample by sample in any precision, on any device: for the proof."""
    outputs, scale = [], query.shape[-1] ** -0.5 if scale is None else scale
    for (a, b), (c, d) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        outputs.append((attention_weights(q, k, None, window_size == (-1, 0), scale) @ v).transpose(0, 1))
    return torch.cat(outputs)
