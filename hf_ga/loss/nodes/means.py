"""What a node that computes one number from many divides by."""

from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from hf_ga.loss.nodes.saved import Number, inputs, number, output_shape, saved

NONE = 0
MEAN = 1
SUM = 2

CROSS_ENTROPIES = {"NllLossBackward0", "NllLoss2DBackward0"}
ELEMENT_LOSSES = {
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "HuberLossBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "SoftMarginLossBackward0",
}
# They divide by the number of classes, too, which is the same in all micro-batches.
ROW_LOSSES = {"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
# Sums of products: node -> the name under which it keeps the second factor; the first is "self".
DOT_PRODUCTS = {
    "BmmBackward0": "mat2", "DotBackward0": "tensor", "MmBackward0": "mat2", "MvBackward0": "vec",
}  # fmt: skip
SUMS = {"NansumBackward0", "SumBackward0", "SumBackward1", *DOT_PRODUCTS}
MEANS = {"MeanBackward0", "MeanBackward1"}


@dataclass(frozen=True)
class Reduction:
    """How a node reduces its elements to one number.

    Attributes:
        divisor: What the node divides by. None: it is a sum.
        is_shape: Whether the divisor is a number of elements.
    """

    divisor: Number | None
    is_shape: bool = False


def reduction_of(node: Node) -> Reduction | None:
    """Return how a node reduces elements to one number. None: it does not."""
    kind = node.name()
    if output_shape(node).numel() != 1:
        return None
    if kind in DOT_PRODUCTS and len(inputs(node)) > 1:
        return None
    if kind in SUMS:
        return Reduction(divisor=None)
    if kind in MEANS:
        return Reduction(divisor=float(reduced_shape(node).numel()), is_shape=True)
    if kind not in CROSS_ENTROPIES | ELEMENT_LOSSES | ROW_LOSSES:
        return None
    reduction = saved(node, "reduction")
    if reduction == SUM:
        return Reduction(divisor=None)
    if reduction == NONE:
        return None
    if kind in CROSS_ENTROPIES:
        return Reduction(divisor=number(saved(node, "total_weight")))
    return Reduction(divisor=float(_num_elements(node)), is_shape=True)


def reduced_shape(node: Node) -> torch.Size:
    """Return the shape of what a sum or a mean reduces."""
    child, index = inputs(node)[0]
    return output_shape(child, index)


def _num_elements(node: Node) -> int:
    """Return what an element-wise loss, or a loss of rows, divides by for reduction="mean"."""
    shape = saved(node, "self").shape
    if node.name() in ROW_LOSSES:
        return shape[0] if len(shape) > 1 else 1
    return torch.broadcast_shapes(shape, saved(node, "target").shape).numel()
