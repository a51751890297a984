"""Finds out whether a loss sum that a loop passes to `accelerator.backward` compares samples.

Such a sum (the hardest half of the samples, in-batch negatives) is not the sum over the samples of
one term each, so no number of targets makes its gradient exact. The user's loop computes the loss,
so hf_ga cannot compute it again for other samples; but the autograd graph of the loss shows the
operations that made it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

# Operations over a dim whose result is not a sum of one term per row.
OPERATIONS_OVER_A_DIM = (
    "Topk",
    "Sort",
    "Kthvalue",
    "Median",
    "Std",
    "Var",
    "Logsumexp",
    "Softmax",
    "LogSoftmax",
    "Max",
    "Min",
    "Amax",
    "Amin",
    "Cumsum",
)
# Operations that combine the rows of one tensor with the rows of another.
MATRIX_PRODUCTS = ("Mm", "Addmm", "Cdist")

# Autograd nodes save a negative dim as an unsigned 64-bit integer: -1 is 2**64 - 1.
FIRST_NEGATIVE_DIM = 2**63


def operation_across_samples(loss: Tensor, outputs: Iterable[Tensor]) -> str | None:
    """Search the autograd graph of a loss passed to `accelerator.backward` for an operation that
    compares samples with each other.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`, a scalar.
        outputs: The tensors that the model returned, with one or more rows per sample.

    Returns:
        A description of the first such operation for an error message ("topk"), or None if there
        is none.
    """
    output_nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    loss_nodes = _nodes_leading_to(output_nodes, start=loss.grad_fn)
    for node in loss_nodes:
        name = node.name().rstrip("0123456789").removesuffix("Backward")  # "TopkBackward0"
        if name in OPERATIONS_OVER_A_DIM and _reduces_over_samples(node):
            return name.lower()
        if name in MATRIX_PRODUCTS and not _is_batched_cdist(node):
            inputs = [input_node for input_node, _ in node.next_functions]
            from_outputs = [node for node in inputs if node in loss_nodes or node in output_nodes]
            if len(from_outputs) > 1:  # a product of outputs with outputs, not with weights
                return "a product or distances of outputs"
    return None


def gradients_depend_across_samples(
    loss: Tensor, outputs: Iterable[Tensor], num_samples: int
) -> bool:
    """Test by second derivatives whether a loss that a user's loop passed to `accelerator.backward`
    compares samples with each other.

    In a sum of one term per sample, the gradient of a sample's outputs does not depend on the
    outputs of other samples. So differentiate the gradients of the first half of the samples with
    respect to the outputs of the second half: any result but 0 shows a comparison, by whichever
    operations it was computed. A selection of samples by a mask is not found.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`, a scalar.
        outputs: The tensors that the model returned. Only those with exactly one row per sample
            are tested.
        num_samples: The number of samples in the micro-batch.

    Returns:
        False also if an operation has no second derivative, so that nothing can be tested.
    """
    per_sample_outputs = [
        tensor
        for tensor in outputs
        if tensor.dim() and len(tensor) == num_samples and tensor.requires_grad
    ]
    if not per_sample_outputs:
        return False
    half = num_samples // 2
    try:
        gradients = torch.autograd.grad(
            loss, per_sample_outputs, create_graph=True, allow_unused=True, materialize_grads=True
        )
        second_derivatives = _differentiate_first_rows(gradients, per_sample_outputs, half)
    except RuntimeError:  # an operation has no second derivative, or nothing requires a gradient
        return False
    for derivative in second_derivatives:
        magnitude = derivative.abs()
        if bool((magnitude[half:] > 1e-6 * magnitude.max()).any()):
            return True
    return False


def _differentiate_first_rows(
    gradients: Sequence[Tensor], outputs: Sequence[Tensor], num_rows: int
) -> tuple[Tensor, ...]:
    """Compute second derivatives of the loss of a user's loop: how the first rows of its gradients
    depend on all outputs.

    The rows are reduced to a scalar by fixed pseudo-random factors, and this scalar is
    differentiated.

    Args:
        gradients: The gradients of a loss with respect to `outputs`, with their graph.
        outputs: The model's output tensors.
        num_rows: How many of the first rows of each gradient are used.

    Returns:
        One tensor for each output, of the output's shape.
    """
    projection = torch.zeros((), device=outputs[0].device)
    for index, gradient in enumerate(gradients):
        first_rows = gradient[:num_rows].flatten()
        # The factors differ between outputs: in a loss of a difference a - b, the gradients of a
        # and b are opposite, and would cancel if multiplied by the same factors.
        positions = torch.arange(first_rows.numel(), device=first_rows.device)
        factors = (positions * (index + 1.5)).cos()
        projection = projection + (first_rows * factors).sum()
    return torch.autograd.grad(
        projection,
        outputs,
        retain_graph=True,  # the loop's backward is still to come
        allow_unused=True,
        materialize_grads=True,
    )


def _nodes_leading_to(ends: set[Node], *, start: Node | None) -> dict[Node, None]:
    """Return the nodes of an autograd graph that lie on a path from `start` to one of `ends`: the
    operations that computed a loss passed to `accelerator.backward` from the model's outputs.

    The graph is walked depth first with a stack instead of recursion: a node is pushed again below
    its inputs, so that all its inputs are decided when it is popped for the second time.

    Args:
        ends: Nodes at which the search stops; they are not in the result.
        start: The node to start from: the `grad_fn` of a loss, None for one without a graph.

    Returns:
        The nodes as the keys of a dict, which keeps their order.
    """
    leading: dict[Node, None] = {}
    entered: set[Node] = set()
    stack = [(start, False)]
    while stack:
        node, are_inputs_done = stack.pop()
        if are_inputs_done:
            inputs = [input_node for input_node, _ in node.next_functions]
            if any(input_node in ends or input_node in leading for input_node in inputs):
                leading[node] = None
        elif node is not None and node not in entered and node not in ends:
            entered.add(node)
            stack.append((node, True))
            stack += [(input_node, False) for input_node, _ in node.next_functions]
    return leading


def _is_batched_cdist(node: Node) -> bool:
    """Return whether an operation in the autograd graph of a loss passed to `accelerator.backward`
    is a `torch.cdist` of tensors with a batch dim.

    Its distances are between points of the same sample (sets of boxes), not between samples.
    """
    points = getattr(node, "_saved_x1", None)
    return points is not None and points.dim() > 2


def _reduces_over_samples(node: Node) -> bool:
    """Return whether an operation in the autograd graph of a loss passed to `accelerator.backward`
    mixes the rows of different samples.

    It does if it works over dim 0, the samples, or over all elements of its input.

    Args:
        node: The autograd node of an operation of `OPERATIONS_OVER_A_DIM`.
    """
    if not hasattr(node, "_saved_dim"):
        return True  # called without a dim: over all elements
    dims = node._saved_dim
    if dims is None:
        return True
    if not isinstance(dims, tuple):
        dims = (dims,)
    input_sizes = getattr(node, "_saved_self_sym_sizes", None)
    is_one_dimensional = input_sizes is not None and len(input_sizes) == 1
    for dim in dims:
        if dim == 0:
            return True
        if is_one_dimensional and dim >= FIRST_NEGATIVE_DIM:
            return True  # the last dim of a one-dimensional tensor is dim 0
    return False
