"""Whether a sum that a loop passes to `accelerator.backward` compares samples with each other.

Such a sum (the hardest half, in-batch negatives) is not the sum over the samples of what each of
them adds, so no number of targets makes it exact. The loop computes it, so it cannot be computed
again for other samples; but the graph of its backward shows the operations that made it.
"""

from collections.abc import Iterable

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
PRODUCTS = ("Mm", "Addmm")


def operation_across_samples(loss: Tensor, outputs: Iterable[Tensor]) -> str | None:
    """The name of an operation that compares rows of a model's outputs in a loss; None if there is
    none.

    Args:
        loss: What the loop passed to `backward`.
        outputs: The tensors that the model returned, with one row per sample (or several).
    """
    ends = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
    of_outputs = _nodes_above(loss.grad_fn, ends)
    for node in of_outputs:
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        if name in OVER_AN_AXIS and _is_over_rows(node):
            return name.lower()
        if name in PRODUCTS:
            factors = [n for n, _ in node.next_functions if n in of_outputs or n in ends]
            if len(factors) > 1:
                return "a matrix product of outputs"
    return None


def _nodes_above(start: Node | None, ends: set[Node]) -> dict[Node, None]:
    """The nodes of a graph from `start` through which a gradient reaches one of the ends."""
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
