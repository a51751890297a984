"""Attention of packed tokens: each sample attends to itself only.

Two ways. The model's own function on samples that are padded again for this one call: right for every mask and with attention
dropout, on every device. Or a kernel that takes the samples' boundaries (`torch.nn.attention.varlen.varlen_attn`): for plain full
or causal attention without dropout, on CUDA.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.keyed import attention_weights
from hf_ga.packed_tokens import PackedTokens

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
    """Whether these arguments of an attention function ask for nothing but attention, full or causal."""
    return not dropout and all(value is None or value is False or name in WITHOUT_EFFECT for name, value in more.items())


def varlen_attention(tokens: PackedTokens, run: Callable, module: nn.Module, heads: Heads, **more: Any) -> tuple[Tensor, None]:
    """The same by a kernel that takes boundaries. `run` is `varlen_attn`, or `reference_varlen` in the proof."""
    query, key, value = (x.transpose(1, 2)[0] for x in heads)
    if groups := query.shape[1] // key.shape[1] - 1:
        key, value = (x.repeat_interleave(groups + 1, dim=1) for x in (key, value))
    causal = more.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal  # as transformers' own functions read it
    bounds, longest, window = tokens.boundaries, tokens.longest, (-1, 0 if causal else -1)
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
    outputs = []
    for (a, b), (c, d) in zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        outputs.append((attention_weights(q, k, None, window_size == (-1, 0), scale, False) @ v).transpose(0, 1))
    return torch.cat(outputs)
