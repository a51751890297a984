"""The cross entropy of an output layer on many rows, in pieces: never more than one piece's logits lie in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_ga.exact.precision import at_least_float32

# What the logits of one piece may take, or more where the hidden states of all rows take more (then a piece takes as much as they):
# smaller pieces would spend their time on adding up gradients of the layer's weight.
PIECE_BYTES = 32 << 20
# On a CPU the logits of so many rows stay in its cache, more or less (measured: 64 and 128 are slower, 512 is no faster).
ROWS_IN_CACHE, IN_CACHE_ON = 256, ("cpu",)
HAS_CHUNKED_LOSS = hasattr(F, "linear_cross_entropy")  # torch >= 2.13


@dataclass(frozen=True)
class TypedHead:
    """A linear layer with what follows it up to the loss.

    Attributes:
        weight: shape (classes, width). bias: shape (classes,), or None. dtype: what the layer computes in (autocast's type).
        steps: what is done with its output, each (logits) -> logits, every row by itself.
        class_weights, label_smoothing: see `torch.nn.functional.cross_entropy`.
    """

    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    steps: Sequence[Callable[[Tensor], Tensor]] = ()
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        """The loss summed over these rows, by the operations of the head itself. weight, bias: those of the layer, in `dtype`."""
        logits = F.linear(hidden.to(self.dtype), weight, bias)
        for step in self.steps:
            logits = step(logits)
        return F.cross_entropy(
            at_least_float32(logits), target, self.class_weights, reduction="sum", label_smoothing=self.label_smoothing
        )

    def in_type(self, tensor: Tensor | None) -> Tensor | None:
        """Weight or bias as the layer uses it."""
        return None if tensor is None else tensor.to(self.dtype)


def rows_of_piece(hidden: Tensor, num_classes: int) -> int:
    """How many rows a piece has: its logits in float32 take PIECE_BYTES at most, or the memory of `hidden` if that is more."""
    return max(1, max(PIECE_BYTES, hidden.numel() * 4) // (4 * num_classes))


def mean_or_sum(head: TypedHead, hidden: Tensor, target: Tensor, rows: int, *, mean: bool) -> Tensor:
    """The cross entropy of the targets, a scalar in float32 (float64 of float64).

    Args:
        hidden: shape (targets, width). target: int64, shape (targets,), all of them classes. rows: of one piece.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        inputs = hidden, head.weight, head.bias
        wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
        plain = _is_plain(head, hidden)
        if plain and head.class_weights is None and hidden.device.type in IN_CACHE_ON:
            total = _InCache.apply(*inputs, target, min(rows, ROWS_IN_CACHE), wanted)
        elif len(hidden) <= rows:
            total = head.loss(hidden, head.in_type(head.weight), head.in_type(head.bias), target)
        elif HAS_CHUNKED_LOSS and plain:
            total = F.linear_cross_entropy(
                hidden,
                head.weight,
                target,
                linear_bias=head.bias,
                weight=head.class_weights,
                reduction="sum",
                options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows),
            )
        else:
            total = _InPieces.apply(*inputs, target, head, rows, wanted)
    if not mean:
        return total
    return total / (len(target) if head.class_weights is None else head.class_weights[target].sum())


def _is_plain(head: TypedHead, hidden: Tensor) -> bool:
    """What torch's own chunked loss does well: it knows no steps, and returns the type of its input, rough in half precision."""
    same = hidden.dtype == head.weight.dtype == head.dtype and head.dtype in (torch.float32, torch.float64)
    return same and not head.steps and not head.label_smoothing


class _InCache(torch.autograd.Function):
    """Sum of the losses of a plain layer, with its gradients, which the backward scales. A piece's logits become their gradient
    where they lie, so no other tensor is as large. One backward only.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rows: int, wanted: Sequence[bool]
    ) -> Tensor:
        ctx.gradients = [torch.empty_like(x) if want else None for x, want in zip((hidden, weight, bias), wanted, strict=True)]
        of_hidden, of_weight, of_bias = ctx.gradients
        parts, losses, begin = max(1, -(-len(hidden) // rows)), [], 0
        for piece, labels in zip(hidden.tensor_split(parts), target.tensor_split(parts), strict=True):
            loss, of_logits = _cross_entropy(F.linear(piece, weight, bias), labels)
            losses.append(loss)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[begin : begin + len(piece)])
            if of_weight is not None:
                torch.addmm(of_weight, of_logits.t(), piece, beta=int(begin > 0), out=of_weight)  # 0: what is there is not read
            if of_bias is not None:
                of_bias.copy_(of_logits.sum(0) if not begin else of_bias + of_logits.sum(0))
            begin += len(piece)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = [g if g is None else g.mul_(gradient) for g in ctx.gradients], None
        return *gradients, None, None, None


def _cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the rows of log(sum(exp(logits))) - logits[target], and its gradient, softmax(logits) less 1 at the target. It takes
    the place of the logits: softmax reads a row before it writes it.
    """
    largest, of_target = logits.amax(1), logits.gather(1, target.unsqueeze(1)).squeeze(1)
    shares = torch.softmax(logits, 1, out=logits)
    # The largest share is exp(largest - log(sum(exp(logits)))), at least 1 / classes: no underflow, and no second sum.
    loss = (largest - shares.amax(1).log_() - of_target).sum()
    shares.scatter_add_(1, target.unsqueeze(1), shares.new_full((len(target), 1), -1.0))
    return loss, shares


class _InPieces(torch.autograd.Function):
    """Sum of the losses of the pieces. Their gradients are computed along with the losses, and scaled in the backward; in fp16 the
    backward computes them, with the loss scale on, without which small ones would be lost. Gradients of weight and bias are added
    up in float32. One backward only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        head: TypedHead,
        rows: int,
        wanted: Sequence[bool],
    ) -> Tensor:
        ctx.head, ctx.rows, ctx.wanted, ctx.gradients = head, rows, wanted, None
        if any(wanted) and head.dtype != torch.float16:
            loss, ctx.gradients = _with_gradients((hidden, weight, bias), target, head, rows, wanted, None)
            return loss
        ctx.save_for_backward(hidden, weight, bias, target)
        return torch.stack([head.loss(*piece) for piece in _pieces((hidden, weight, bias), target, head, rows)]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None:
            gradients, ctx.gradients = [g if g is None else g.mul_(gradient) for g in ctx.gradients], None
        else:
            *inputs, target = ctx.saved_tensors
            _, gradients = _with_gradients(inputs, target, ctx.head, ctx.rows, ctx.wanted, gradient)
        return *gradients, None, None, None, None


def _pieces(
    inputs: Sequence[Tensor | None], target: Tensor, head: TypedHead, rows: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Hidden states, weight and bias as the layer uses them, targets: of each piece."""
    hidden, weight, bias = inputs
    weight, bias = head.in_type(weight), head.in_type(bias)
    for h, t in zip(hidden.split(rows), target.split(rows), strict=True):
        yield h, weight, bias, t


def _with_gradients(
    inputs: Sequence[Tensor | None], target: Tensor, head: TypedHead, rows: int, wanted: Sequence[bool], gradient: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of the losses, and its gradients, times `gradient`, of the inputs that are wanted."""
    sums = [torch.zeros_like(x, dtype=_sum_type(x)) if want else None for x, want in zip(inputs, wanted, strict=True)]
    losses = []
    for i, (*piece, labels) in enumerate(_pieces(inputs, target, head, rows)):
        leaves = [x if x is None else x.detach().requires_grad_(want) for x, want in zip(piece, wanted, strict=True)]
        with torch.enable_grad(), torch.autocast(target.device.type, enabled=False):
            loss = head.loss(*leaves, labels)
        losses.append(loss.detach())
        found = iter(torch.autograd.grad(loss, [leaf for leaf, want in zip(leaves, wanted, strict=True) if want], gradient))
        for k, total in enumerate(sums):
            if total is not None:
                (total[i * rows : (i + 1) * rows] if k == 0 else total).add_(next(found))
    return torch.stack(losses).sum(), [g if g is None else g.to(x.dtype) for g, x in zip(sums, inputs, strict=True)]


def _sum_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
