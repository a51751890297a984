"""Attention with dropout on a CPU as one autograd function, with less memory than separate
operations.

As separate autograd operations, attention reads its tokens x tokens matrices twice as often and
keeps copies of query and key.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ga.draws.dropout.dropout_functions import dropped_attention
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.model.override import Replacement
from hf_ga.speed.speed_up import SpeedUp


class FusedAttention(SpeedUp):
    """Speed-up that computes attention with keyed dropout on a CPU by one autograd function."""

    name = "fused attention"

    def __init__(self) -> None:
        """Start the fused attention without a model; `attach` keeps the model's keyed dropout."""
        self._was_used = False  # whether a forward has fused attention

    def attach(self, model: nn.Module, draws: KeyedDraws) -> str | None:
        """Keep the model's keyed draws, for fused attention.

        Returns:
            Why attention cannot be fused: the model draws no dropout. None if it can be tried.
        """
        self._dropout = draws
        if not draws.sites:
            return "the model draws no dropout"
        return None

    def obstacle(self, compiled: Sequence[nn.Module]) -> str | None:
        """Return why it cannot be used any more: the model was compiled after the trial."""
        return "the model's layers were compiled" if compiled else None

    def replacements(self) -> Sequence[Replacement]:
        """Compute attention with keyed dropout by one function."""
        return [(self._dropout, "attend", self._attend)]

    def verdict(self) -> str | None:
        """After the trial of this speed-up, return why attention was not fused; None if it was."""
        if not self._was_used:
            return "no attention with dropout in full precision"
        return None

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, *others: Any
    ) -> Tensor:
        """Compute attention with a given dropout mask by one fused function, `DroppedAttention`.

        Replaces `dropout_functions.dropped_attention`, and falls back to it for tensors that
        `DroppedAttention` does not support.

        Args:
            query: Queries, of shape (..., L, head_dim) for L query tokens.
            key: Keys, of shape (..., S, head_dim) for S key tokens.
            value: Values, of shape (..., S, value dim).
            kept: Dropout mask of the attention weights: bool, of shape (..., L, S), True where a
                weight is kept.
            others: Bias, scale and drop probability, see `DroppedAttention`.

        Returns:
            A tensor of shape (..., L, value dim).
        """
        if not _is_supported(query, key, value):
            return dropped_attention(query, key, value, kept, *others)
        self._was_used = True
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        attended = DroppedAttention.apply(query, key, value, kept, *others)
        return attended.view(*kept.shape[:-1], value.shape[-1])


def _is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether fused attention (`DroppedAttention`) supports query, key and value: on a CPU, all in
    float32 or all in float64, without autocast, with the same batch size and number of heads.
    """
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.dtype == key.dtype == value.dtype
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and not torch.is_autocast_enabled("cpu")
    )


class DroppedAttention(torch.autograd.Function):
    """Attention with a given dropout mask: dropout(softmax(query key^T * scale + bias)) value.

    Saves its inputs and the attention weights before dropout for the backward, which recomputes the
    dropped weights. The scale, and dropout's factor 1 / (1 - p), are applied within the matrix
    products, not in passes of their own.

    Args of `apply`:
        query: Queries, of shape (N, L, head_dim): N = samples x heads, L query tokens.
        key: Keys, of shape (N, S, head_dim) for S key tokens.
        value: Values, of shape (N, S, value dim).
        kept: Dropout mask: bool, N x L x S elements in any shape, True where a weight is kept.
        bias: A tensor to add to the scores, broadcastable to the shape of `kept`. None: nothing.
        scale: Factor of the scores.
        drop_probability: The dropout probability p, with 0 <= p < 1.

    Returns:
        A tensor of shape (N, L, value dim).
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
        drop_probability: float,
    ) -> Tensor:
        """Compute attention with a given dropout mask; the class docstring has the arguments."""
        not_added = query.new_empty(1, 1, 1)  # baddbmm needs a tensor to add; beta=0 ignores it
        scores = torch.baddbmm(not_added, query, key.mT, beta=0, alpha=scale)
        if bias is not None:
            scores.view(kept.shape).add_(bias)
        weights = torch.softmax(scores, -1, out=scores)
        mask = kept.view(torch.uint8).reshape(weights.shape)
        ctx.save_for_backward(query, key, value, mask, bias, weights)
        ctx.mask_shape = kept.shape
        ctx.scale = scale
        ctx.drop_probability = drop_probability
        dropout_scale = 1 / (1 - drop_probability)
        return torch.baddbmm(not_added, weights * mask, value, beta=0, alpha=dropout_scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and bias, and None for the other arguments.

        The bias has one only if it requires a gradient.

        Args:
            ctx: Context of the autograd function, with the weights that `forward` has saved.
            output_grad: Gradient of the output, of shape (N, L, value dim).
        """
        query, key, value, mask, bias, weights = ctx.saved_tensors
        not_added = query.new_empty(1, 1, 1)  # baddbmm needs a tensor to add; beta=0 ignores it
        dropout_scale = 1 / (1 - ctx.drop_probability)
        # The gradients of weights and scores lack the factor `dropout_scale`; the products below
        # apply it.
        mask = mask.to(weights.dtype)
        weight_grad = torch.bmm(output_grad, value.mT).mul_(mask)
        score_grad = torch._softmax_backward_data(weight_grad, weights, -1, weights.dtype)
        scale = ctx.scale * dropout_scale
        query_grad = torch.baddbmm(not_added, score_grad, key, beta=0, alpha=scale)
        key_grad = torch.baddbmm(not_added, score_grad.mT, query, beta=0, alpha=scale)
        dropped_weights = mask.mul_(weights)  # in place: the mask is not needed any more
        value_grad = torch.baddbmm(
            not_added, dropped_weights.mT, output_grad, beta=0, alpha=dropout_scale
        )
        bias_grad = None
        if ctx.needs_input_grad[4]:
            score_grad = score_grad.mul_(dropout_scale).view(ctx.mask_shape)
            bias_grad = score_grad.sum_to_size(bias.shape)
        return query_grad, key_grad, value_grad, None, bias_grad, None, None
