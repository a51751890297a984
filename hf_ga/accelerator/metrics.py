"""Gathers the values of a training loop's metrics from all processes, each sample once."""

from typing import Any

import accelerate
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor


def gather_rows(
    accelerator: accelerate.Accelerator, values: Any, num_rows: int, *, as_objects: bool
) -> Any:
    """Gather the first `num_rows` rows of values from every process, for
    `Accelerator.gather_for_metrics` in a training loop.

    Processes may have different numbers of rows, as micro-batches of a window may be uneven.

    Args:
        accelerator: The accelerator of the loop.
        values: A tensor, or nested dicts and sequences of tensors; otherwise a sequence of
            objects. Scalar tensors have no rows and are gathered as they are.
        num_rows: The number of rows of this process to gather; the rest is dropped.
        as_objects: Pickle tensors and gather them as objects, too.

    Returns:
        The values in the same structure, with the rows of all processes; for objects, a list.
    """
    if as_objects or not _are_all_tensors(values):
        return gather_object(list(values)[:num_rows])

    def gather(value: Tensor) -> Tensor:
        """Gather the rows of one tensor of the user's metrics from all processes."""
        local_rows = value[:num_rows] if value.dim() else value
        return accelerator.gather(local_rows)

    return recursively_apply(gather, values)


def _are_all_tensors(values: Any) -> bool:
    """Return whether values that a user's loop gathers are a tensor, or nested dicts and nonempty
    sequences of tensors only, so that Accelerate can gather them without pickling.
    """
    if isinstance(values, Tensor):
        return True
    if isinstance(values, dict):
        return all(map(_are_all_tensors, values.values()))
    is_sequence = isinstance(values, list | tuple)
    return is_sequence and bool(values) and all(map(_are_all_tensors, values))
