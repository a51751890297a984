"""The cross entropy of an output layer, chunk by chunk of rows: only one chunk's logits are in
memory at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ga.exact.precision import at_least_float32

# On a CPU the logits of this many rows about fit the cache (measured: 64 and 128 are slower, 512 is
# not faster).
ROWS_ON_CPU = 256
# Elsewhere: memory of one chunk's logits; at least that of the hidden states of all rows. Smaller
# chunks would spend their time on accumulating the gradient of the layer's weight.
# Of the logits of a chunk on a GPU. Each chunk adds a gradient as large as the weight: with 32 MiB
# that was a tenth of a step of GPT-2-small (H200, profile of scripts/gpu_report.py).
CHUNK_BYTES = 128 << 20


@dataclass(frozen=True)
class OutputProjection:
    """A linear layer and the operations between it and the loss.

    Attributes:
        weight: shape (classes, width). bias: shape (classes,), or None. dtype: compute dtype of the
            layer (autocast's).
        steps: row-wise operations on its output, each (logits) -> logits.
        class_weights, label_smoothing: see `torch.nn.functional.cross_entropy`.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    steps: Sequence[Callable[[Tensor], Tensor]] = ()
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """The loss summed over these rows, with the head's own operations. weight, bias: the
        layer's, in `dtype`.
        """
        logits = F.linear(hidden.to(self.dtype), weight, bias)
        for step in self.steps:
            logits = step(logits)
        return F.cross_entropy(
            at_least_float32(logits),
            target,
            self.class_weights,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def in_type(self, tensor: Tensor | None) -> Tensor | None:
        """Weight or bias in the layer's compute dtype."""
        return None if tensor is None else tensor.to(self.dtype)


def rows_of_chunk(hidden: Tensor, num_classes: int) -> int:
    """The number of rows per chunk. hidden: shape (targets, width)."""
    if hidden.device.type == "cpu":
        return ROWS_ON_CPU
    return max(1, max(CHUNK_BYTES, hidden.numel() * 4) // (4 * num_classes))


def cross_entropy(
    head: OutputProjection, hidden: Tensor, target: Tensor, rows: int, *, mean: bool
) -> Tensor:
    """The mean or sum of the targets' cross entropy, a scalar in float32 (float64 for float64
    inputs).

    Args:
        hidden: shape (targets, width). target: int64, shape (targets,), none ignored. rows: per
            chunk.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        inputs = hidden, head.weight, head.bias
        if len(hidden) <= rows:
            total = head.loss(hidden, head.in_type(head.weight), head.in_type(head.bias), target)
        else:
            needs_grad = [
                torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs
            ]
            total = _InChunks.apply(*inputs, target, head, rows, needs_grad)
    if not mean:
        return total
    return total / (len(target) if head.class_weights is None else head.class_weights[target].sum())


class _InChunks(torch.autograd.Function):
    """Sum of the losses of the chunks. Their gradients are computed along with the losses and
    scaled in the backward; in fp16 the backward computes them with the loss scale, so that small
    ones do not underflow. Gradients of weight and bias are accumulated in float32. A
    second backward computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: OutputProjection,
        rows: int,
        needs_grad: Sequence[bool],
    ) -> Tensor:
        ctx.head, ctx.rows, ctx.needs_grad, ctx.gradients = head, rows, needs_grad, None
        ctx.save_for_backward(hidden, weight, bias, target)
        if any(needs_grad) and head.dtype != torch.float16:
            loss, ctx.gradients = _with_gradients(
                (hidden, weight, bias), target, head, rows, needs_grad, None
            )
            return loss
        return torch.stack(
            [head.loss(*chunk) for chunk in _chunks((hidden, weight, bias), target, head, rows)]
        ).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None:
            gradients, ctx.gradients = (
                [g if g is None else g.mul_(gradient) for g in ctx.gradients],
                None,
            )
        else:
            *inputs, target = ctx.saved_tensors
            _, gradients = _with_gradients(
                inputs, target, ctx.head, ctx.rows, ctx.needs_grad, gradient
            )
        return *gradients, None, None, None, None


def _chunks(
    inputs: Sequence[Tensor | None], target: Tensor, head: OutputProjection, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Per chunk: hidden states, weight and bias in the compute dtype, targets."""
    hidden, weight, bias = inputs
    weight, bias = head.in_type(weight), head.in_type(bias)
    for h, t in zip(hidden.split(rows), target.split(rows), strict=True):
        yield h, weight, bias, t


def _with_gradients(
    inputs: Sequence[Tensor | None],
    target: Tensor,
    head: OutputProjection,
    rows: int,
    needs_grad: Sequence[bool],
    gradient: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of the losses, and its gradients times `gradient` for the inputs that need them."""
    sums = [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if needs else None
        for x, needs in zip(inputs, needs_grad, strict=True)
    ]
    losses = []
    for i, (*chunk, labels) in enumerate(_chunks(inputs, target, head, rows)):
        leaves = [
            x if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(chunk, needs_grad, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(target.device.type, enabled=False):
            loss = head.loss(*leaves, labels)
        losses.append(loss.detach())
        found = iter(
            torch.autograd.grad(
                loss,
                [leaf for leaf, needs in zip(leaves, needs_grad, strict=True) if needs],
                gradient,
            )
        )
        for k, total in enumerate(sums):
            if total is not None:
                (total[i * rows : (i + 1) * rows] if k == 0 else total).add_(next(found))
    return torch.stack(losses).sum(), [
        g if g is None else g.to(x.dtype) for g, x in zip(sums, inputs, strict=True)
    ]
