"""Decides which loss a loop passes to `accelerator.backward`, and checks it again now and then.

`loss_comparison.py` compares a loss with the one that was proven, which costs additional backwards.
So a loss is compared in windows 1, 2, 4, 8, ... only, and whenever it was computed by other
operations than before.
"""

import warnings
from typing import Any

from torch import Tensor

from hf_ga.accelerator.across_samples import (
    gradients_depend_across_samples,
    operation_across_samples,
)
from hf_ga.accelerator.criteria import CriterionMean
from hf_ga.accelerator.loss_comparison import (
    MicroBatchRecord,
    check_is_model_loss,
    check_model_loss_is_unscaled,
    find_criterion_mean,
)
from hf_ga.accelerator.outputs import model_loss_of, output_tensors
from hf_ga.errors import LossNotAdditive
from hf_ga.exact.audit import is_power_of_two, is_small

# The names of the last operations that computed a loss: its own autograd node, and the node's
# inputs.
Operations = tuple[str, ...]


class LossChecks:
    """Checks the losses of a user's loop, and remembers which kinds were checked before.

    A kind of loss is identified by the last operations that computed it.

    Args:
        can_differentiate: Whether the loss may be differentiated with respect to the model's
            outputs before its backward. False under FSDP, which would take that for the backward.

    Attributes:
        num_windows: How many windows have begun.
    """

    def __init__(self, *, can_differentiate: bool) -> None:
        """Start with no kind of loss of the user's loop checked; see the class for the argument."""
        self.can_differentiate = can_differentiate
        self.num_windows = 0
        self._results: dict[Operations, bool] = {}  # kind of loss -> whether it is the model's own
        self._checked_means: set[Operations] = set()  # means of torch's loss functions
        self._checked_sums: set[Operations] = set()  # sums passed with num_targets
        self._has_warned = False  # of a num_targets of 1

    @property
    def _is_check_due(self) -> bool:
        """Whether the losses of the user's loop are compared again with the proven one in this
        window: in windows 1, 2, 4, 8, ...
        """
        return is_power_of_two(self.num_windows)

    def is_model_loss(self, loss: Tensor, record: MicroBatchRecord) -> bool:
        """Return whether the loss of a user's loop is the model's own, plus at most a term that
        does not depend on data, such as a penalty on the weights.

        Args:
            loss: The loss that the user's loop passed to `accelerator.backward`.
            record: The record of the micro-batch.

        Returns:
            False if it is a mean of a torch loss function, or if the model returned no loss.

        Raises:
            LossNotAdditive: If the model returned a loss, and the loop's loss is neither this one
                nor a mean of a torch loss function.
        """
        model_loss = model_loss_of(record.outputs)
        if model_loss is None:
            return False
        if loss is model_loss:
            return True
        operations = _last_operations(loss)
        if operations not in self._results or self._is_check_due:
            is_model_loss = _compare_with_model_loss(loss, record)
            self._results[operations] = is_model_loss
            return is_model_loss
        if self._results[operations]:
            check_model_loss_is_unscaled(loss, record)
        return self._results[operations]

    def criterion_mean_of(self, loss: Tensor, record: MicroBatchRecord) -> CriterionMean:
        """Find the mean of a torch loss function, such as `cross_entropy`, that a user's loop
        passed as its loss.

        Args:
            loss: The loss that the user's loop passed to `accelerator.backward`.
            record: The record of the micro-batch, with the means that such functions returned.

        Returns:
            The mean, with what it was divided by.

        Raises:
            LossNotAdditive: If the loss is not such a mean.
        """
        operations = _last_operations(loss)
        if operations in self._checked_means and not self._is_check_due:
            for mean in record.means:
                if mean.value is loss:
                    return mean
        mean = find_criterion_mean(loss, record)
        self._checked_means.add(operations)
        return mean

    def check_sum(self, loss: Tensor, record: MicroBatchRecord) -> None:
        """Check that a loss sum, passed to `accelerator.backward` with `num_targets`, does not
        compare samples with each other.

        Args:
            loss: The sum that the user's loop passed to `accelerator.backward`.
            record: The record of the micro-batch.

        Raises:
            LossNotAdditive: If the sum compares samples.
        """
        operations = _last_operations(loss)
        if operations in self._checked_sums and not self._is_check_due:
            return
        comparison = self._find_comparison(loss, record.outputs, record.num_samples)
        if comparison is not None:
            raise LossNotAdditive(
                "the sum that this loop passes compares the samples of a micro-batch "
                f"({comparison}), so no number of targets makes it exact: pass it as "
                "Accelerator(whole_batch=...), which gets all samples of a window."
            )
        self._checked_sums.add(operations)

    def _find_comparison(self, loss: Tensor, outputs: Any, num_samples: int) -> str | None:
        """Find out whether the loss sum of a user's loop compares the samples of a micro-batch: by
        its operations and, where it is possible and cheap, by its second derivatives.

        Args:
            loss: The sum that the user's loop passed to `accelerator.backward`.
            outputs: What the model returned.
            num_samples: The number of samples in the micro-batch.

        Returns:
            A description of the comparison for an error message, or None if there is none.
        """
        if num_samples == 1:
            return None
        tensors = output_tensors(outputs)
        operation = operation_across_samples(loss, tensors)
        if operation is not None:
            return operation
        if not self.can_differentiate or not is_small(outputs):
            return None
        if gradients_depend_across_samples(loss, tensors, num_samples):
            return "their gradients depend on each other"
        return None

    def check_num_targets(self, loss: Tensor, num_targets: float, num_samples: int) -> None:
        """Check that the `num_targets` which the user's loop passed was not raised from 0 to 1, as
        by `max(number, 1)`.

        Only 1 for several samples is suspicious. As it may also be the true number, this warns
        once, and raises only if the sum is 0.

        Args:
            loss: The sum that the user's loop passed to `accelerator.backward`.
            num_targets: The number that the loop passed with it.
            num_samples: The number of samples in the micro-batch.

        Raises:
            LossNotAdditive: If `num_targets` is 1 for several samples and the sum is 0, so that the
                window's loss would be divided by too many targets.
        """
        if num_targets != 1 or num_samples == 1:
            return
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"hf_ga: num_targets is 1 for a micro-batch of {num_samples} samples. If that is "
                "max(number, 1), the window's loss is divided by too many targets: pass the plain "
                "number, which may be 0.",
                stacklevel=6,
            )
        if bool(loss == 0):
            raise LossNotAdditive(
                f"the sum is 0 and num_targets is 1 for a micro-batch of {num_samples} samples, as "
                "with max(number, 1): such micro-batches would count as targets of the window. "
                "Pass the plain number; it may be 0."
            )


def _compare_with_model_loss(loss: Tensor, record: MicroBatchRecord) -> bool:
    """Find out by its gradients whether the loss of a user's loop is the model's own.

    Args:
        loss: The loss that the user's loop passed to `accelerator.backward`.
        record: The record of the micro-batch, whose outputs contain a loss.

    Returns:
        False if it is a mean of a torch loss function.

    Raises:
        LossNotAdditive: If it is neither the model's own nor a mean of a torch loss function.
    """
    try:
        check_is_model_loss(loss, record)
    except LossNotAdditive:
        if not record.means:
            raise
        find_criterion_mean(loss, record)  # raises if it is not such a mean either
        return False
    return True


def _last_operations(loss: Tensor) -> Operations:
    """Return the names of the last operations that computed a user's loss: that of its autograd
    node, and those of the node's inputs; () if it has no graph. They identify the kind of loss.
    """
    node = loss.grad_fn
    if node is None:
        return ()
    inputs = [input_node.name() for input_node, _ in node.next_functions if input_node is not None]
    return (node.name(), *inputs)
