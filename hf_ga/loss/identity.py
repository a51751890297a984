"""What a term is, in words that do not depend on the sizes of a micro-batch."""

from torch.autograd.graph import Node

from hf_ga.loss.nodes.saved import inputs
from hf_ga.loss.penalty import PARAMETER

MAX_NAMES = 6
MAX_NODES = 400  # below a term, in the search for its parameters
# Nodes that leave all elements as they are. Whether a forward has one may depend on sizes:
# `contiguous` copies in some micro-batches, `reshape` does, `expand` does nothing in others.
VIEWS = {
    "AliasBackward0", "CloneBackward0", "ContiguousBackward0", "CopyBackwards", "ExpandBackward0",
    "PermuteBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "SqueezeBackward2", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip


def identity_of(node: Node, entries: tuple[int, ...] = ()) -> tuple:
    """Return what a term is: the kinds of its nodes, and the nearest parameters.

    Args:
        node: The node of the term.
        entries: If the loss stacks heads, the indices in the stacks that lead to the term.
    """
    return (_names(node), nearest_parameters(node), entries)


def _names(node: Node) -> tuple[str, ...]:
    """Return the kinds of nodes along first inputs, without views, down to a parameter."""
    names = []
    while len(names) < MAX_NAMES:
        if node.name() not in VIEWS:
            names.append(node.name() if _product_below(node) is None else "AddmmBackward0")
        below = inputs(node)
        if not below or any(child.name() == PARAMETER for child, _ in below):
            break
        node = below[0][0]
    return tuple(names)


def nearest_parameters(node: Node) -> tuple[int, ...]:
    """Return the ids of the parameters that are the fewest nodes below, views not counted."""
    if node.name() == PARAMETER:
        return (id(node.variable),)
    level = [node]
    seen = {node}
    while level and len(seen) < MAX_NODES:
        below = []
        found = set()
        waiting = level
        while waiting:
            current = waiting.pop()
            product = _product_below(current)
            for child, _ in [*inputs(current), *(inputs(product) if product else ())]:
                if child in seen:
                    continue
                seen.add(child)
                if child.name() == PARAMETER:
                    found.add(id(child.variable))
                elif child.name() in VIEWS:
                    waiting.append(child)
                else:
                    below.append(child)
        if found:
            return tuple(sorted(found))
        level = below
    return ()


def _product_below(node: Node) -> Node | None:
    """Return the product of a linear layer whose bias a node adds. None: it does something else.
    Torch computes both in one node if the inputs are contiguous, as rows of one sample may be.
    """
    below = [child for child, _ in inputs(node)]
    if node.name() != "AddBackward0" or len(below) < 2 or below[1].name() != PARAMETER:
        return None
    product = below[0]
    while product.name() in VIEWS:
        product, _ = inputs(product)[0]
    return product if product.name() == "MmBackward0" else None
