"""The value of a mean, computed again from what its node saved, to log it on its own."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.loss.nodes.means import MEAN, SUM
from hf_ga.loss.nodes.saved import saved, signed

REDUCTIONS = {MEAN: "mean", SUM: "sum"}


def value_of(node: Node) -> Tensor | None:
    """Return the value of a node that is a loss function of torch. None: it is not known."""
    compute = _VALUES.get(node.name())
    return None if compute is None else compute(node).detach()


def _cross_entropy(node: Node) -> Tensor:
    """Compute the mean or sum of negative log likelihoods."""
    return F.nll_loss(
        saved(node, "self").detach(),
        saved(node, "target"),
        saved(node, "weight"),
        ignore_index=signed(saved(node, "ignore_index")),
        reduction=REDUCTIONS[saved(node, "reduction")],
    )


def _of_pairs(function: Callable[..., Tensor]) -> Callable[[Node], Tensor]:
    """Return a function that computes a loss of inputs and targets."""

    def compute(node: Node) -> Tensor:
        """Compute the mean or sum of the element-wise losses."""
        reduction = REDUCTIONS[saved(node, "reduction")]
        return function(
            saved(node, "self").detach(), saved(node, "target").detach(), reduction=reduction
        )

    return compute


_VALUES: dict[str, Callable[[Node], Tensor]] = {
    "MseLossBackward0": _of_pairs(F.mse_loss),
    "NllLoss2DBackward0": _cross_entropy,
    "NllLossBackward0": _cross_entropy,
    "SoftMarginLossBackward0": _of_pairs(F.soft_margin_loss),
}
