"""Whether a number computed from the whole micro-batch enters the elements of a mean.

`(loss * weights).mean()` with a scalar `loss` has a mean inside of a mean, and
`((z - z.mean()) ** 2).mean()` is a variance: neither is a sum over samples.

Also whether the elements were selected, so that their number is one of chosen samples.
"""

from torch.autograd.graph import Node

from hf_ga.loss.identity import VIEWS
from hf_ga.loss.nodes.means import reduced_shape
from hf_ga.loss.nodes.saved import inputs, output_shape, saved, signed
from hf_ga.loss.penalty import ELEMENTWISE, PARAMETER, REDUCTIONS, UNARY, Penalties
from hf_ga.loss.refusals import refusal

MAX_NODES = 64
MAX_NODES_TO_SELECTION = 16
MORE_ELEMENTWISE = {"ExpandBackward0", "MaskedFillBackward0", "WhereBackward0"}
SELECTIONS = {"IndexBackward0", "SelectBackward0", "UnbindBackward0"}
SELECTING = {"IndexBackward0", "IndexSelectBackward0", "MaskedSelectBackward0"}
ALONG_DIMENSIONS = {"MeanBackward1", "SumBackward1"}
WALKED = (UNARY - REDUCTIONS) | ELEMENTWISE | VIEWS | MORE_ELEMENTWISE


def check_elements(node: Node, penalties: Penalties, num_samples: int) -> None:
    """Check that no element of a sum or a mean depends on a number of the whole micro-batch.

    Only what computes the elements one by one is walked, not the model.

    Args:
        node: The node of the sum or the mean.
        penalties: Tells what depends on parameters only.
        num_samples: Number of samples of the micro-batch.

    Raises:
        LossNotAdditive: If one does.
    """
    if num_samples == 1:
        return
    waiting = inputs(node)
    seen = set()
    while waiting and len(seen) < MAX_NODES:
        child, index = waiting.pop()
        if child in seen or child.name() == PARAMETER:
            continue
        seen.add(child)
        if child.name() in WALKED:
            waiting.extend(inputs(child))
        elif _reduces_samples(child, num_samples):
            raise refusal(child, "a sum or mean over samples in the elements of a mean")
        elif _reduces_all(child, index) and not penalties.has(child):
            raise refusal(child, "a number of the whole micro-batch in the elements of a mean")


def selects_below(node: Node) -> bool:
    """Whether an index or a mask selects something in one of the nearest nodes below a node."""
    waiting = [node]
    for _ in range(MAX_NODES_TO_SELECTION):
        if not waiting:
            return False
        child = waiting.pop(0)
        if child.name() in SELECTING:
            return True
        waiting.extend(below for below, _ in inputs(child))
    return False


def _reduces_all(node: Node, index: int) -> bool:
    """Whether an output of a node is one number of several, other than by selecting one."""
    if node.name() in SELECTIONS or output_shape(node, index) != ():
        return False
    return any(output_shape(child, index).numel() > 1 for child, index in inputs(node))


def _reduces_samples(node: Node, num_samples: int) -> bool:
    """Whether a node reduces the first dimension only, which has one entry for each sample."""
    if node.name() not in ALONG_DIMENSIONS:
        return False
    shape = reduced_shape(node)
    dims = [signed(dim) for dim in saved(node, "dim")]
    return dims in ([0], [-len(shape)]) and shape[0] == num_samples
