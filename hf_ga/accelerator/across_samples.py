"""Whether a sum that a loop passes to `accelerator.backward` compares samples with each other.

Such a sum (the hardest half, in-batch negatives) is not the sum over the samples of what each of
them adds, so no number of targets makes it exact. The loop computes it, so it cannot be computed
again for other samples; but the graph of its backward shows the operations that made it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

# Operations over an axis whose result is not a sum of what the rows add.
OVER_AN_AXIS = (
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
PRODUCTS = ("Mm", "Addmm", "Cdist")


def operation_across_samples(loss: Tensor, outputs: Iterable[Tensor]) -> str | None:
    """Find an operation that compares rows of a model's outputs in a loss.

    Args:
        loss: What the loop passed to `backward`.
        outputs: The tensors that the model returned, with one row per sample (or several).

    Returns:
        How an error names it; None if there is none.
    """
    made_outputs = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    made_loss = _nodes_above(loss.grad_fn, made_outputs)
    for node in made_loss:
        name = node.name().rstrip("0123456789").removesuffix("Backward")  # "TopkBackward0"
        if name in OVER_AN_AXIS and _is_over_rows(node):
            return name.lower()
        if name in PRODUCTS and not _is_batched(node):
            inputs = [input_node for input_node, _ in node.next_functions]
            of_outputs = [node for node in inputs if node in made_loss or node in made_outputs]
            if len(of_outputs) > 1:
                return "a product or distances of outputs"
    return None


def depends_across_samples(loss: Tensor, outputs: Iterable[Tensor], num_samples: int) -> bool:
    """Whether the gradient with respect to the outputs of half of the samples changes with the
    outputs of the others, as no sum over samples has it. Similarities made by any operation show
    in it; a choice of samples by a mask does not.

    Args:
        loss: What the loop passed to `backward`.
        outputs: The tensors that the model returned. Those with one row per sample count.
        num_samples: In the micro-batch.
    """
    rows = [t for t in outputs if t.dim() and len(t) == num_samples and t.requires_grad]
    if not rows:
        return False
    try:
        gradients = torch.autograd.grad(
            loss, rows, create_graph=True, allow_unused=True, materialize_grads=True
        )
        changed = _change_of(gradients, rows, num_samples // 2)
    except RuntimeError:  # an operation has no second derivative, or nothing a gradient
        return False
    return any(bool((c[num_samples // 2 :].abs() > 1e-6 * c.abs().max()).any()) for c in changed)


def _change_of(
    gradients: Sequence[Tensor], outputs: Sequence[Tensor], number: int
) -> tuple[Tensor, ...]:
    """Differentiate a fixed projection of the gradients' first rows with respect to the outputs."""
    projection = torch.zeros((), device=outputs[0].device)
    for index, gradient in enumerate(gradients):
        part = gradient[:number].flatten()
        # Others for each tensor: of a difference, the gradients of both add up to 0.
        numbers = (torch.arange(part.numel(), device=part.device) * (index + 1.5)).cos()
        projection = projection + (part * numbers).sum()
    return torch.autograd.grad(
        projection,
        outputs,
        retain_graph=True,  # the loop's backward is still to come
        allow_unused=True,
        materialize_grads=True,
    )


def _nodes_above(start: Node | None, ends: set[Node]) -> dict[Node, None]:
    """Return the nodes of a graph, from `start` on, through which a gradient reaches one of the
    ends.
    """
    above: dict[Node, None] = {}
    entered: set[Node] = set()
    waiting = [(start, False)]
    while waiting:
        node, are_next_done = waiting.pop()
        if are_next_done:
            if any(n in ends or n in above for n, _ in node.next_functions):
                above[node] = None
        elif node is not None and node not in entered and node not in ends:
            entered.add(node)
            waiting.append((node, True))
            waiting += [(n, False) for n, _ in node.next_functions]
    return above


def _is_batched(node: Node) -> bool:
    """Whether distances are those within each sample, as of sets of boxes."""
    points = getattr(node, "_saved_x1", None)
    return points is not None and points.dim() > 2


def _is_over_rows(node: Node) -> bool:
    """Whether an operation is over the first axis, or over all."""
    if not hasattr(node, "_saved_dim"):
        return True  # of all elements
    axes = node._saved_dim
    if axes is None:
        return True
    axes = axes if isinstance(axes, tuple) else (axes,)
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    last = 0 if sizes is not None and len(sizes) == 1 else None
    # torch shows -1 as an unsigned number.
    return any(axis == 0 or (last == 0 and axis >= 2**63) for axis in axes)
