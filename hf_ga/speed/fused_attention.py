"""Attention with dropout on a CPU as one autograd function, with less memory than separate
operations.

As separate autograd operations, attention reads its tokens x tokens matrices twice as often and
keeps copies of query and key.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.dropout_functions import dropped_attention
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.override import override


class FusedAttention(SpeedUp):
    """Computes attention with keyed dropout by `DroppedAttention` if possible."""

    name = "fused attention"

    def __init__(self) -> None:
        self._was_used = False

    def attach(
        self, model: nn.Module, dropout: KeyedDropout, *, reads_logits: bool, has_router: bool
    ) -> str | None:
        self._dropout = dropout
        if not dropout.sites:
            return "the model draws no dropout"
        return None

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        return override(self._dropout, attend=self._attend)

    def verdict(self) -> str | None:
        if not self._was_used:
            return "no attention with dropout in full precision"
        return None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, *others: Any
    ) -> Tensor:
        """Replace `dropped_attention`; see there."""
        if not _is_supported(query, key, value):
            return dropped_attention(query, key, value, kept, *others)
        self._was_used = True
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        attended = DroppedAttention.apply(query, key, value, kept, *others)
        return attended.view(*kept.shape[:-1], value.shape[-1])


def _is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether tensors are in full precision on a CPU, with equal numbers of heads."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.dtype == key.dtype == value.dtype
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and not torch.is_autocast_enabled("cpu")
    )


class DroppedAttention(torch.autograd.Function):
    """dropout(softmax(query key^T * scale + bias)) value, with a given dropout mask.

    Saves its inputs and the weights before dropout for the backward, and recomputes the dropped
    weights, to save their memory. Both factors, the scale and 1 / (1 - p), are applied within the
    matrix products.

    Args of `apply`:
        query, key, value: shape (N, L or S, size): the heads of all samples.
        kept: bool, N x L x S elements in any shape: True for weights to keep.
        bias: None, or a tensor to add to the scores, in the shape of `kept`.

    Returns:
        shape (N, L, size of a value).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: Tensor,
        bias: Tensor | None,
        scale: float,
        probability: float,
    ) -> Tensor:
        nothing = query.new_empty(1, 1, 1)  # what is added: beta is 0
        scores = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=scale)
        if bias is not None:
            scores.view(kept.shape).add_(bias)
        weights = torch.softmax(scores, -1, out=scores)
        mask = kept.view(torch.uint8).reshape(weights.shape)
        ctx.save_for_backward(query, key, value, mask, bias, weights)
        ctx.shape = kept.shape
        ctx.scale = scale
        ctx.drop_probability = probability
        return torch.baddbmm(nothing, weights * mask, value, beta=0, alpha=1 / (1 - probability))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, bias, weights = ctx.saved_tensors
        nothing = query.new_empty(1, 1, 1)
        rescale = 1 / (1 - ctx.drop_probability)
        scale = ctx.scale * rescale
        mask = mask.to(weights.dtype)
        of_weight = torch.bmm(gradient, value.mT).mul_(mask)
        # Without the factor `rescale`, which the products below apply.
        of_score = torch._softmax_backward_data(of_weight, weights, -1, weights.dtype)
        of_query = torch.baddbmm(nothing, of_score, key, beta=0, alpha=scale)
        of_key = torch.baddbmm(nothing, of_score.mT, query, beta=0, alpha=scale)
        of_value = torch.baddbmm(nothing, mask.mul_(weights).mT, gradient, beta=0, alpha=rescale)
        of_bias = None
        if ctx.needs_input_grad[4]:
            of_bias = of_score.mul_(rescale).view(ctx.shape).sum_to_size(bias.shape)
        return of_query, of_key, of_value, None, of_bias, None, None
