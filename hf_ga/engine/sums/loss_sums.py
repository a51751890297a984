"""A loss that is passed as (sum, number of targets) is not read: whether both add up over samples
is tried on the two halves of a micro-batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_ga.errors import LossNotAdditive
from hf_ga.model.forward import Batch, LossFunction, call_loss_fn
from hf_ga.model.outputs import named_tensors, with_tensors

TOLERANCE = 1e-4  # relative, of sums in float32


class LossSums:
    """Calls a loss function, and checks what it returns.

    A number that was raised (`clamp(min=1)`, `max(k, 1)`) is the smallest of the run. Then those of
    the halves are raised, too, so that they do not add up.

    Args:
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets).
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        """Start before the first micro-batch."""
        self.loss_fn = loss_fn
        self._smallest = float("inf")

    def __call__(
        self, outputs: Any, batch: Batch, num_samples: int, *, is_checked: bool
    ) -> tuple[Tensor, float]:
        """Compute the sum and the number of targets of a micro-batch.

        Args:
            outputs: What the model returned.
            batch: The batch.
            num_samples: Its number of samples.
            is_checked: Whether to try both halves. They are also tried if the number of targets is
                the smallest one so far.

        Returns:
            (sum, a scalar; number of targets). A sum that is NaN without targets, as a mean of
            nothing times 0, is 0.

        Raises:
            LossNotAdditive: If the sums or the numbers of the halves do not add up.
            ConfigError: If the function returns something else.
        """
        total, number = call_loss_fn(self.loss_fn, outputs, batch)
        if number == 0 and bool(total.isnan()):
            return _zero_of(outputs), number
        is_new = number < self._smallest or (number == self._smallest and num_samples == 1)
        self._smallest = min(self._smallest, number)
        if is_checked or is_new:
            with torch.no_grad():
                self._check(outputs, batch, num_samples, total, number)
        return total, number

    def _check(
        self, outputs: Any, batch: Batch, num_samples: int, total: Tensor, number: float
    ) -> None:
        """Compare a micro-batch with its halves: a single sample is taken twice."""
        tensors = named_tensors(outputs)
        has_rows = [len(tensor) == num_samples for tensor in tensors.values() if tensor.dim()]
        if not has_rows or not all(has_rows):
            return  # they cannot be taken apart
        middle = max(1, num_samples // 2)
        rows = list(range(num_samples))
        halves = [rows[:middle], rows[middle:] or rows]
        if num_samples == 1:
            pair = _rows_of(outputs, batch, [0, 0], num_samples)
            total, number = call_loss_fn(self.loss_fn, *pair)
        found = [
            call_loss_fn(self.loss_fn, *_rows_of(outputs, batch, half, num_samples))
            for half in halves
        ]
        sum_of_parts = sum(float(part_total) for part_total, _ in found)
        number_of_parts = sum(part_number for _, part_number in found)
        if not _is_close(number_of_parts, number):
            raise LossNotAdditive(
                f"the number of targets that the loss function returns is {number:g} for some "
                f"samples, but {number_of_parts:g} for their two halves together: it is a "
                "constant, or was raised (clamp(min=1), max(k, 1)). Return the true number of "
                "targets, also 0: only that of the whole window is divided by."
            )
        if not _is_close(sum_of_parts, float(total)):
            raise LossNotAdditive(
                f"the sum that the loss function returns is {float(total):.6g} for some "
                f"samples, but {sum_of_parts:.6g} for their two halves together: it is "
                'a mean, or compares samples. Return a sum over samples (reduction="sum"), or use '
                "whole_batch for a loss of all samples."
            )


def _zero_of(outputs: Any) -> Tensor:
    """Return a 0 with a gradient of zeros at the outputs, whatever their values are."""
    tensors = named_tensors(outputs).values()
    return sum(tensor.flatten()[:0].sum() for tensor in tensors if tensor.requires_grad)


def _rows_of(
    outputs: Any, batch: Batch, rows: Sequence[int], num_samples: int
) -> tuple[Any, dict[str, Any]]:
    """Return (outputs, batch) of some samples of a micro-batch. Scalars are kept."""
    indices = list(rows)
    tensors = {
        name: tensor[indices] if tensor.dim() else tensor
        for name, tensor in named_tensors(outputs).items()
    }
    entries = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and len(value) == num_samples:
            entries[name] = value[indices]
        elif isinstance(value, list) and len(value) == num_samples:
            entries[name] = [value[row] for row in indices]
    return with_tensors(outputs, tensors), entries


def _is_close(value: float, expected: float) -> bool:
    """Whether two numbers are equal up to rounding; two that are not finite are."""
    difference = abs(value - expected)
    return not difference > TOLERANCE * max(abs(value), abs(expected), 1e-6)
