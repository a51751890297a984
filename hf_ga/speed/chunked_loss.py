"""The cross entropy of an output layer, chunk by chunk of rows: only one chunk's logits are in
memory at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ga.model.precision import at_least_float32

# On a CPU the logits of this many rows about fit the cache (measured: 64 and 128 are slower, 512 is
# not faster).
ROWS_ON_CPU = 256
# Elsewhere, the memory of one chunk's logits; at least that of the hidden states of all rows. Each
# chunk adds a gradient as large as the weight: with 32 MiB that was a tenth of a step of
# GPT-2-small (H200, profile of scripts/gpu_report.py).
CHUNK_BYTES = 128 << 20
# On these devices the products with the output layer's weight get a slow kernel unless its number
# of rows is a multiple of a power of two: GPT-2's 50,257 rows took a third of a step's device time
# (H200). Rows of zeros are added for the products only.
PADDED_DEVICES = ("cuda",)
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class OutputProjection:
    """A linear output layer, the operations on its logits, and the options of the cross entropy.

    Attributes:
        weight: The layer's weight, of shape (classes, hidden size).
        bias: The layer's bias, of shape (classes,). None if it has none.
        dtype: Compute dtype of the layer (under autocast, autocast's).
        logit_ops: Operations on the logits before the loss, each (logits) -> logits, such as a
            scale or a soft cap. They work row by row.
        class_weights: `weight` of `torch.nn.functional.cross_entropy`.
        label_smoothing: `label_smoothing` of `torch.nn.functional.cross_entropy`.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    logit_ops: Sequence[Callable[[Tensor], Tensor]] = ()
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0

    def losses(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """Compute an output layer's logits for one chunk of rows, and the losses of the rows.

        Weight and bias are arguments, so that autograd can return their gradients for these rows.

        Args:
            hidden: Hidden states of the rows, of shape (rows, hidden size).
            weight: The layer's weight, see `for_products`.
            bias: The layer's bias, see `for_products`. None if it has none.
            target: Classes of the rows: int64, of shape (rows,).

        Returns:
            The cross entropy of each row, of shape (rows,), in at least float32.
        """
        logits = F.linear(hidden.to(self.dtype), weight, bias)
        if len(weight) > len(self.weight):
            logits = logits[:, : len(self.weight)]
        for logit_op in self.logit_ops:
            logits = logit_op(logits)
        return F.cross_entropy(
            at_least_float32(logits),
            target,
            self.class_weights,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def for_products(self, parameter: Tensor | None) -> Tensor | None:
        """Return the output layer's weight or bias as its products take it; None stays None.

        In the compute dtype, on a GPU with rows of zeros up to a multiple of `ROW_MULTIPLE`.
        """
        if parameter is None:
            return None
        num_classes = len(parameter)
        num_missing = -num_classes % ROW_MULTIPLE
        if not num_missing or parameter.device.type not in PADDED_DEVICES:
            return parameter.to(self.dtype)
        # One pass over the parameter, as for the conversion alone.
        sizes = (num_classes + num_missing, *parameter.shape[1:])
        padded = parameter.new_empty(sizes, dtype=self.dtype)
        padded[:num_classes] = parameter.detach()
        padded[num_classes:] = 0
        return padded


def choose_rows_per_chunk(hidden: Tensor, num_classes: int) -> int:
    """Choose how many rows of logits a chunked loss computes at a time.

    On a GPU, the float32 logits of a chunk take `CHUNK_BYTES`, or as much memory as the hidden
    states of all rows in float32 if that is more. On a CPU, they about fit the cache.

    Args:
        hidden: Hidden states of the rows with a target, of shape (targets, hidden size).
        num_classes: Number of logits of each row.
    """
    if hidden.device.type == "cpu":
        return ROWS_ON_CPU
    bytes_of_hidden = 4 * hidden.numel()
    bytes_of_row = 4 * num_classes
    return max(1, max(CHUNK_BYTES, bytes_of_hidden) // bytes_of_row)


def chunked_cross_entropy(
    projection: OutputProjection,
    hidden: Tensor,
    target: Tensor,
    rows_per_chunk: int,
    *,
    mean: bool,
) -> Tensor:
    """Compute the cross entropy of an output layer, with the logits of one chunk at a time.

    Args:
        projection: The output layer, the operations on its logits, the options of the loss.
        hidden: Hidden states of the rows with a target, of shape (targets, hidden size).
        target: Classes: int64, of shape (targets,). None of them is ignored.
        rows_per_chunk: Rows whose logits are computed together.
        mean: Return the mean (weighted by the class weights if there are any) instead of the sum.

    Returns:
        A scalar in float32 (float64 for float64 inputs).
    """
    inputs = (hidden, projection.weight, projection.bias)
    needs_grad = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    with torch.autocast(hidden.device.type, enabled=False):
        log_likelihoods = _LogLikelihoods.apply(
            *inputs, target, projection, rows_per_chunk, needs_grad
        )
        if mean and projection.class_weights is not None:
            return -log_likelihoods.sum() / projection.class_weights[target].sum()
        # So the loss ends as that of the head does, and is read as a mean over the targets.
        only_class = torch.zeros_like(target)
        return F.nll_loss(log_likelihoods, only_class, reduction="mean" if mean else "sum")


class _LogLikelihoods(torch.autograd.Function):
    """The log likelihood (minus the cross entropy) of each row, as a tensor of shape (targets, 1),
    chunk by chunk.

    Its gradient must be the same number for all rows: that of their sum or mean. The forward
    computes the gradients of each chunk right after its losses, so that its logits can be freed;
    the backward only scales the sums. With fp16 logits the backward computes them instead, because
    only there the loss scale is known, without which small gradients underflow. Gradients of weight
    and bias are accumulated in float32. A second backward computes all gradients again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        projection: OutputProjection,
        rows_per_chunk: int,
        needs_grad: Sequence[bool],
    ) -> Tensor:
        """Compute the log likelihoods chunk by chunk, and the gradients of minus their sum.

        With fp16 logits, the backward computes the gradients instead.

        Args:
            ctx: Context of the autograd function.
            hidden: Hidden states, of shape (targets, hidden size).
            weight: The layer's weight, of shape (classes, hidden size).
            bias: The layer's bias, of shape (classes,). None if it has none.
            target: Classes: int64, of shape (targets,).
            projection: See `chunked_cross_entropy`.
            rows_per_chunk: Rows whose logits are computed together.
            needs_grad: Whether hidden, weight and bias need gradients.
        """
        ctx.projection = projection
        ctx.rows_per_chunk = rows_per_chunk
        ctx.needs_grad = needs_grad
        ctx.gradients = None
        ctx.save_for_backward(hidden, weight, bias, target)
        inputs = (hidden, weight, bias)
        if any(needs_grad) and projection.dtype != torch.float16:
            losses, ctx.gradients = _losses_and_gradients(
                inputs, target, projection, rows_per_chunk, needs_grad, loss_gradient=None
            )
        else:
            chunks = _chunks(inputs, target, projection, rows_per_chunk)
            losses = torch.cat([projection.losses(*chunk) for chunk in chunks])
        return -losses.unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, and None for the other arguments.

        Scales those that the forward of the chunked loss has computed. With fp16 logits, or in a
        second backward, computes them chunk by chunk.

        Args:
            ctx: Context of the autograd function.
            gradient: The gradient with respect to the log likelihoods, the same in all rows.
        """
        loss_gradient = -gradient[0, 0] if len(gradient) else gradient.new_zeros(())
        gradients = ctx.gradients
        if gradients is None:
            *inputs, target = ctx.saved_tensors
            _, gradients = _losses_and_gradients(
                inputs,
                target,
                ctx.projection,
                ctx.rows_per_chunk,
                ctx.needs_grad,
                loss_gradient=loss_gradient,
            )
        else:
            ctx.gradients = None  # they are changed in place
            gradients = [g if g is None else g.mul_(loss_gradient) for g in gradients]
        return *gradients, None, None, None, None


def _chunks(
    inputs: Sequence[Tensor | None],
    target: Tensor,
    projection: OutputProjection,
    rows_per_chunk: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Split the rows of a chunked loss, and yield the arguments of `OutputProjection.losses` for
    each chunk.

    Args:
        inputs: Hidden states of all rows, weight, and bias or None.
        target: Classes of all rows.
        projection: The output layer; weight and bias are prepared once, for all chunks.
        rows_per_chunk: Rows of each chunk; the last one may have fewer.
    """
    hidden, weight, bias = inputs
    weight = projection.for_products(weight)
    bias = projection.for_products(bias)
    chunks = zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
    for chunk_hidden, chunk_target in chunks:
        yield chunk_hidden, weight, bias, chunk_target


def _losses_and_gradients(
    inputs: Sequence[Tensor | None],
    target: Tensor,
    projection: OutputProjection,
    rows_per_chunk: int,
    needs_grad: Sequence[bool],
    loss_gradient: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the cross entropy of all rows, and the gradients of its sum, chunk by chunk.

    Args:
        inputs: Hidden states of all rows, weight, and bias or None.
        target: Classes: int64, of shape (targets,).
        projection: The output layer, the operations on its logits, the options of the loss.
        rows_per_chunk: Rows whose logits are computed together.
        needs_grad: Whether each of the inputs needs a gradient.
        loss_gradient: A scalar that multiplies all gradients. None: 1.

    Returns:
        The losses of the rows, and the gradient of each input; None for one that needs none.
    """
    # One tensor like each input, in at least float32.
    gradient_sums = [
        torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if needs else None
        for x, needs in zip(inputs, needs_grad, strict=True)
    ]
    hidden_gradient, *parameter_gradients = gradient_sums
    losses = []
    chunks = _chunks(inputs, target, projection, rows_per_chunk)
    for index, (*chunk_inputs, chunk_target) in enumerate(chunks):
        leaves = [
            x if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(chunk_inputs, needs_grad, strict=True)
        ]
        with torch.enable_grad(), torch.autocast(target.device.type, enabled=False):
            chunk_losses = projection.losses(*leaves, chunk_target)
            loss = chunk_losses.sum()
        losses.append(chunk_losses.detach())
        leaves_with_grad = [leaf for leaf, needs in zip(leaves, needs_grad, strict=True) if needs]
        chunk_gradients = iter(torch.autograd.grad(loss, leaves_with_grad, loss_gradient))
        if hidden_gradient is not None:  # each row is in one chunk
            first_row = index * rows_per_chunk
            rows = slice(first_row, first_row + rows_per_chunk)
            hidden_gradient[rows].add_(next(chunk_gradients))
        for parameter_gradient in parameter_gradients:
            if parameter_gradient is not None:  # that of added rows is dropped
                parameter_gradient.add_(next(chunk_gradients)[: len(parameter_gradient)])
    gradients = [
        g if g is None else g.to(x.dtype) for g, x in zip(gradient_sums, inputs, strict=True)
    ]
    return torch.cat(losses), gradients
