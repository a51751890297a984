"""Values of a training loop gathered from all processes, each sample once."""

from typing import Any

import accelerate
from accelerate.utils import gather_object
from accelerate.utils.operations import recursively_apply
from torch import Tensor

from hf_ga.parallel.processes import gather_uneven


def gather_rows(
    accelerator: accelerate.Accelerator, values: Any, num_rows: int, *, as_objects: bool
) -> Any:
    """Gather the first rows of values, of which every process may have another number.

    Args:
        accelerator: The accelerator of the loop.
        values: A tensor, or nested dicts and sequences of tensors; else a sequence of objects.
            Tensors without an axis are gathered whole.
        num_rows: How many rows of this process count.
        as_objects: Gather tensors as objects, too.
    """
    if as_objects or not _are_all_tensors(values):
        return gather_object(list(values)[:num_rows])

    def gather(value: Tensor) -> Tensor:
        own_rows = value[:num_rows] if value.dim() else value
        return gather_uneven(accelerator.gather, own_rows)

    return recursively_apply(gather, values)


def _are_all_tensors(values: Any) -> bool:
    if isinstance(values, Tensor):
        return True
    if isinstance(values, dict):
        return all(map(_are_all_tensors, values.values()))
    is_sequence = isinstance(values, list | tuple)
    return is_sequence and bool(values) and all(map(_are_all_tensors, values))
