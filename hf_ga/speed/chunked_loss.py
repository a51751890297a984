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
# Elsewhere, the memory of one chunk's logits; at least that of the hidden states of all rows. Each
# chunk adds a gradient as large as the weight: with 32 MiB that was a tenth of a step of
# GPT-2-small (H200, profile of scripts/gpu_report.py).
CHUNK_BYTES = 128 << 20


@dataclass(frozen=True)
class OutputProjection:
    """A linear layer and the operations between it and the loss.

    Attributes:
        weight: Of the layer, of shape (classes, width).
        bias: Of the layer, of shape (classes,); None without.
        dtype: Compute dtype of the layer (autocast's).
        steps: Row-wise operations on its output, each (logits) -> logits.
        class_weights: `weight` of `torch.nn.functional.cross_entropy`.
        label_smoothing: See `torch.nn.functional.cross_entropy`.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    steps: Sequence[Callable[[Tensor], Tensor]] = ()
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Compute the loss summed over some rows, with the head's own operations.

        Args:
            hidden: Hidden states of the rows, of shape (rows, width).
            weight: Of the layer, in `dtype`.
            bias: Of the layer, in `dtype`; None without.
            target: int64, of shape (rows,).
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
        """Convert weight or bias to the layer's compute dtype."""
        return None if tensor is None else tensor.to(self.dtype)


def rows_of_chunk(hidden: Tensor, num_classes: int) -> int:
    """Return the number of rows per chunk.

    Args:
        hidden: Hidden states of the rows with a target, of shape (targets, width).
        num_classes: Logits of a row.
    """
    if hidden.device.type == "cpu":
        return ROWS_ON_CPU
    return max(1, max(CHUNK_BYTES, hidden.numel() * 4) // (4 * num_classes))


def cross_entropy(
    head: OutputProjection, hidden: Tensor, target: Tensor, rows: int, *, mean: bool
) -> Tensor:
    """Compute the cross entropy of targets, chunk by chunk.

    Args:
        head: The layer and what follows it.
        hidden: Hidden states, of shape (targets, width).
        target: int64, of shape (targets,). None of them is ignored.
        rows: Rows per chunk.
        mean: Whether to return the mean, not the sum.

    Returns:
        A scalar in float32 (float64 for float64 inputs).
    """
    with torch.autocast(hidden.device.type, enabled=False):
        if len(hidden) <= rows:
            total = head.loss(hidden, head.in_type(head.weight), head.in_type(head.bias), target)
        else:
            inputs = (hidden, head.weight, head.bias)
            needs_grad = [
                torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs
            ]
            total = _InChunks.apply(*inputs, target, head, rows, needs_grad)
    if not mean:
        return total
    if head.class_weights is None:
        return total / len(target)
    return total / head.class_weights[target].sum()


class _InChunks(torch.autograd.Function):
    """The sum of the losses of the chunks.

    The gradients of a chunk are computed along with its loss, and scaled in the backward. In fp16
    the backward computes them with the loss scale, so that small ones do not underflow. Gradients
    of weight and bias are accumulated in float32. A second backward computes them again.
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
        ctx.head = head
        ctx.rows = rows
        ctx.needs_grad = needs_grad
        ctx.gradients = None
        ctx.save_for_backward(hidden, weight, bias, target)
        inputs = (hidden, weight, bias)
        if any(needs_grad) and head.dtype != torch.float16:
            loss, ctx.gradients = _with_gradients(inputs, target, head, rows, needs_grad, None)
            return loss
        losses = [head.loss(*chunk) for chunk in _chunks(inputs, target, head, rows)]
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        if gradients is None:
            *inputs, target = ctx.saved_tensors
            _, gradients = _with_gradients(
                inputs, target, ctx.head, ctx.rows, ctx.needs_grad, gradient
            )
        else:
            ctx.gradients = None  # they are changed in place
            gradients = [g if g is None else g.mul_(gradient) for g in gradients]
        return *gradients, None, None, None, None


def _chunks(
    inputs: Sequence[Tensor | None], target: Tensor, head: OutputProjection, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Yield for each chunk: hidden states, weight and bias in the compute dtype, targets."""
    hidden, weight, bias = inputs
    weight = head.in_type(weight)
    bias = head.in_type(bias)
    chunks = zip(hidden.split(rows), target.split(rows), strict=True)
    for hidden_of_chunk, target_of_chunk in chunks:
        yield hidden_of_chunk, weight, bias, target_of_chunk


def _with_gradients(
    inputs: Sequence[Tensor | None],
    target: Tensor,
    head: OutputProjection,
    rows: int,
    needs_grad: Sequence[bool],
    gradient: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the sum of the losses of the chunks and its gradients.

    Args:
        inputs: Hidden states of all rows, weight, bias or None.
        target: int64, of shape (targets,).
        head: The layer and what follows it.
        rows: Rows per chunk.
        needs_grad: Which of the inputs need a gradient.
        gradient: What the gradients are multiplied by. None: 1.

    Returns:
        The sum, and the gradient of each input; None for those that need none.
    """
    sums = [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if needs else None
        for x, needs in zip(inputs, needs_grad, strict=True)
    ]
    losses = []
    for index, (*chunk, labels) in enumerate(_chunks(inputs, target, head, rows)):
        leaves = [
            x if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(chunk, needs_grad, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(target.device.type, enabled=False):
            loss = head.loss(*leaves, labels)
        losses.append(loss.detach())
        with_grad = [leaf for leaf, needs in zip(leaves, needs_grad, strict=True) if needs]
        found = iter(torch.autograd.grad(loss, with_grad, gradient))
        sum_of_hidden, *sums_of_parameters = sums
        if sum_of_hidden is not None:  # each row is in one chunk
            sum_of_hidden[index * rows : (index + 1) * rows].add_(next(found))
        for sum_of_parameter in sums_of_parameters:
            if sum_of_parameter is not None:
                sum_of_parameter.add_(next(found))
    gradients = [g if g is None else g.to(x.dtype) for g, x in zip(sums, inputs, strict=True)]
    return torch.stack(losses).sum(), gradients
