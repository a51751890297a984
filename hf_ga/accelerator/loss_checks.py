"""Which loss a loop passes to `accelerator.backward`, checked again from time to time.

`loss_comparison.py` compares a loss with the one that was proven, which costs extra backwards. So a
loss is compared in windows 1, 2, 4, 8, ... and whenever other operations made it than before.
"""

import warnings
from typing import Any

from torch import Tensor

from hf_ga.accelerator.across_samples import depends_across_samples, operation_across_samples
from hf_ga.accelerator.criteria import Mean
from hf_ga.accelerator.loss_comparison import Seen, check_factor, check_loss, mean_of
from hf_ga.accelerator.outputs import loss_of, tensors_of
from hf_ga.errors import LossNotAdditive
from hf_ga.exact.audit import is_power_of_two, is_small

# The names of the last operations that made a loss.
Operations = tuple[str, ...]


class LossChecks:
    """Remembers which kinds of losses were checked.

    Args:
        can_differentiate: False under FSDP, which takes a gradient of the outputs for the beginning
            of the backward.

    Attributes:
        num_windows: Windows that were begun.
    """

    def __init__(self, *, can_differentiate: bool) -> None:
        self.can_differentiate = can_differentiate
        self.num_windows = 0
        self._are_heads: dict[Operations, bool] = {}  # whether a loss is the model's own
        self._means: set[Operations] = set()
        self._sums: set[Operations] = set()
        self._has_warned = False

    @property
    def _is_due(self) -> bool:
        """Whether this is window 1, 2, 4, 8, ..."""
        return is_power_of_two(self.num_windows)

    def is_head(self, loss: Tensor, seen: Seen) -> bool:
        """Whether a loss is the model's own, up to something that does not depend on the data.

        Args:
            loss: What the loop passed to `backward`.
            seen: What was seen of the micro-batch.

        Raises:
            LossNotAdditive: If it is neither that nor a mean of torch's loss functions.
        """
        head = loss_of(seen.outputs)
        if head is None:
            return False
        if loss is head:
            return True
        operations = _operations_of(loss)
        if operations not in self._are_heads or self._is_due:
            is_head = _find_out_if_head(loss, seen)
            self._are_heads[operations] = is_head
            return is_head
        if self._are_heads[operations]:
            check_factor(loss, seen)
        return self._are_heads[operations]

    def mean_of(self, loss: Tensor, seen: Seen) -> Mean:
        """Find the mean of one of torch's loss functions that a loss is.

        Args:
            loss: What the loop passed to `backward`.
            seen: What was seen of the micro-batch.

        Raises:
            LossNotAdditive: If it is none.
        """
        operations = _operations_of(loss)
        if operations in self._means and not self._is_due:
            for mean in seen.means:
                if mean.value is loss:
                    return mean
        mean = mean_of(loss, seen)
        self._means.add(operations)
        return mean

    def check_sum(self, loss: Tensor, seen: Seen) -> None:
        """Check that a sum does not compare samples.

        Args:
            loss: What the loop passed to `backward` with `num_targets`.
            seen: What was seen of the micro-batch.

        Raises:
            LossNotAdditive: If it does.
        """
        operations = _operations_of(loss)
        if operations in self._sums and not self._is_due:
            return
        comparison = self._comparison_in(loss, seen.outputs, seen.num_samples)
        if comparison is not None:
            raise LossNotAdditive(
                "the sum that this loop passes compares the samples of a micro-batch "
                f"({comparison}), so no number of targets makes it exact: pass it as "
                "Accelerator(whole_batch=...), which gets all samples of a window."
            )
        self._sums.add(operations)

    def _comparison_in(self, loss: Tensor, outputs: Any, num_samples: int) -> str | None:
        """Find out what in a sum compares the samples of a micro-batch; None if nothing does."""
        if num_samples == 1:
            return None
        tensors = tensors_of(outputs)
        operation = operation_across_samples(loss, tensors)
        if operation is not None:
            return operation
        if not self.can_differentiate or not is_small(outputs):
            return None
        if depends_across_samples(loss, tensors, num_samples):
            return "their gradients depend on each other"
        return None

    def check_number(self, loss: Tensor, num_targets: float, num_samples: int) -> None:
        """Check that a number of targets was not raised to 1 for a micro-batch without any. Where
        the sum is not 0, that cannot be told from one target: then warn once.

        Args:
            loss: The sum that the loop passed to `backward`.
            num_targets: What it passed with it.
            num_samples: Samples in the micro-batch.

        Raises:
            LossNotAdditive: If the sum is 0: the window would be divided by too many.
        """
        if num_targets != 1 or num_samples == 1:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"hf_ga: num_targets is 1 for a micro-batch of {num_samples} samples. If that is "
                "max(number, 1), the window is divided by too many: pass the plain number, which "
                "may be 0.",
                stacklevel=6,
            )
        if bool(loss == 0):
            raise LossNotAdditive(
                f"the sum is 0 and num_targets is 1 for a micro-batch of {num_samples} samples, as "
                "with max(number, 1): such micro-batches would count as targets of the window. "
                "Pass the plain number; it may be 0."
            )


def _find_out_if_head(loss: Tensor, seen: Seen) -> bool:
    """Whether a loss is the model's own; else it is a mean of torch's loss functions."""
    try:
        check_loss(loss, seen)
    except LossNotAdditive:
        if not seen.means:
            raise
        mean_of(loss, seen)
        return False
    return True


def _operations_of(loss: Tensor) -> Operations:
    """Return the names of the last operations that made a loss."""
    node = loss.grad_fn
    if node is None:
        return ()
    before = [previous.name() for previous, _ in node.next_functions if previous is not None]
    return (node.name(), *before)
