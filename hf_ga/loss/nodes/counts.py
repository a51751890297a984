"""What a sum or a mean really sums over: its elements, or the sum of their masks and weights."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.loss.nodes.means import (
    CROSS_ENTROPIES,
    DOT_PRODUCTS,
    MEANS,
    NONE,
    SUMS,
    reduced_shape,
    reduction_of,
)
from hf_ga.loss.nodes.saved import Number, inputs, number, output_shape, saved, signed


def count_of(node: Node) -> Number | None:
    """Return what the node of a term sums over, whatever the loss divides by. None: unknown.

    Computed from what the forward saved: targets that are not ignored and their class weights,
    masks and weights that the elements are multiplied by, selections.
    """
    kind = node.name()
    if kind in CROSS_ENTROPIES:
        return number(saved(node, "total_weight"))
    if kind not in SUMS | MEANS:
        reduction = reduction_of(node)
        assert reduction is not None
        is_sum = reduction.divisor is None
        return float(reduced_shape(node).numel()) if is_sum else reduction.divisor
    weights = _of_reduced(node)
    if weights is not None:
        return number(weights.sum())
    return float(reduced_shape(node).numel())


def num_nonzero_of(node: Node) -> Number | None:
    """Return how many elements the node of a term sums over whose weight is not 0. None: unknown.

    Of `(losses * advantages * mask).sum()` it is the number of targets.
    """
    weights = _of_reduced(node) if node.name() in SUMS | MEANS else None
    return None if weights is None else number((weights != 0).sum())


def _of_reduced(node: Node) -> Tensor | None:
    """Return what the elements that a sum or a mean reduces are multiplied by. None: 1."""
    weights = _below(node)
    if node.name() not in DOT_PRODUCTS:
        return weights
    is_first = node.next_functions[0][0] is not None
    constant = saved(node, DOT_PRODUCTS[node.name()] if is_first else "self").detach()
    return _product(weights, constant.reshape(reduced_shape(node)))


def _weights(node: Node, index: int = 0) -> Tensor | None:
    """Return what the elements of a node's output are multiplied by, in its shape. None: 1."""
    read = _WEIGHTS.get(node.name())
    weights = None if read is None else read(node)
    return None if weights is None else weights.expand(output_shape(node, index))


def _below(node: Node) -> Tensor | None:
    """Return the weights of the first input."""
    child, index = inputs(node)[0]
    return _weights(child, index)


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Multiply weights."""
    if first is None:
        return second
    return first if second is None else first * second


def _of_product(node: Node) -> Tensor | None:
    """Weights of a product: those of its factors, and the factor that is a constant."""
    if len(inputs(node)) == 2:
        (first, i), (second, j) = inputs(node)
        return _product(_weights(first, i), _weights(second, j))
    is_first = node.next_functions[0][0] is not None
    constant = saved(node, "other" if is_first else "self").detach()
    if constant.dim() == 0:
        return _below(node)  # a number; a mask of one element has a dim
    return _product(_below(node), constant)


def _of_quotient(node: Node) -> Tensor | None:
    """Weights of what is divided by one constant number."""
    is_constant = len(inputs(node)) == 1 and node.next_functions[0][0] is not None
    # A divisor of each sample has a dim, also in a micro-batch of one sample.
    is_number = is_constant and saved(node, "other").dim() == 0
    return _below(node) if is_number else None


def _of_filled(node: Node) -> Tensor | None:
    """Weights of what is not filled."""
    return _product(_below(node), (~saved(node, "mask")).long())


def _of_chosen(node: Node) -> Tensor | None:
    """Weights of what `torch.where` chooses between a value and a constant."""
    if len(inputs(node)) != 1:
        return None
    condition = saved(node, "condition")
    is_first = node.next_functions[0][0] is not None
    return _product(_below(node), (condition if is_first else ~condition).long())


def _of_power(node: Node) -> Tensor | None:
    """Weights of a power."""
    weights = _below(node)
    return None if weights is None else weights ** saved(node, "exponent")


def _of_reshaped(node: Node) -> Tensor | None:
    """Weights of a view with as many elements."""
    weights = _below(node)
    return None if weights is None else weights.reshape(output_shape(node))


def _of_transposed(node: Node) -> Tensor | None:
    """Weights of a transposed tensor."""
    weights = _below(node)
    if weights is None:
        return None
    return weights.transpose(signed(saved(node, "dim0")), signed(saved(node, "dim1")))


def _of_permuted(node: Node) -> Tensor | None:
    """Weights of a tensor whose dimensions are permuted."""
    weights = _below(node)
    if weights is None:
        return None
    return weights.permute([signed(dim) for dim in saved(node, "dims")])


def _of_sums(node: Node) -> Tensor | None:
    """Weights of sums along dimensions."""
    weights = _below(node)
    if weights is None:
        return None
    dims = [signed(dim) for dim in saved(node, "dim")]
    return weights.sum(dims, keepdim=saved(node, "keepdim"))


def _of_cross_entropy(node: Node) -> Tensor | None:
    """Weights of targets: 0 for those that are ignored, and the weights of their classes."""
    if saved(node, "reduction") != NONE:
        return None
    targets = saved(node, "target")
    is_target = targets != signed(saved(node, "ignore_index"))
    class_weights = saved(node, "weight")
    if class_weights is None:
        return is_target.long()
    return torch.where(is_target, class_weights[targets.where(is_target, 0)], 0)


_WEIGHTS: dict[str, Callable[[Node], Tensor | None]] = {
    "AliasBackward0": _below,
    "CloneBackward0": _below,
    "DivBackward0": _of_quotient,
    "ExpandBackward0": _below,
    "MaskedFillBackward0": _of_filled,
    "MulBackward0": _of_product,
    "MulBackward1": _below,
    "NegBackward0": _below,
    "NllLoss2DBackward0": _of_cross_entropy,
    "NllLossBackward0": _of_cross_entropy,
    "PermuteBackward0": _of_permuted,
    "PowBackward0": _of_power,
    "ReshapeAliasBackward0": _of_reshaped,
    "SqueezeBackward0": _of_reshaped,
    "SqueezeBackward1": _of_reshaped,
    "SumBackward1": _of_sums,
    "ToCopyBackward0": _below,
    "TransposeBackward0": _of_transposed,
    "UnsafeViewBackward0": _of_reshaped,
    "UnsqueezeBackward0": _of_reshaped,
    "ViewBackward0": _of_reshaped,
    "WhereBackward0": _of_chosen,
}
