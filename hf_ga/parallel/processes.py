"""Helpers for several ranks: main process first, errors and values on all ranks, printing, CPU
cores, shutdown.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env
from torch import Tensor

from hf_ga.errors import CheckpointError, ConfigError
from hf_ga.exact.backend import sum_over_ranks
from hf_ga.parallel.fsdp import is_sharded


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Run the block on the main process first, which fills the caches for the others.

    If the block raises, the others run it too; with Accelerate's `main_process_first` they would
    hang.
    """
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """Raise on all ranks if the block raises on one. All ranks must enter it.

    Raises:
        CheckpointError: If the block raised it on some rank.
        ConfigError: If the block raised it on some rank. Of several errors, all ranks raise the one
            of the first rank.
    """
    failure = None
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        failure = error
        if accelerator.num_processes == 1:
            raise
    if accelerator.num_processes == 1:
        return
    # One number, mostly 0, tells whether the errors have to be gathered.
    (num_failures,) = sum_over_ranks(accelerator, [failure is not None])
    if num_failures:
        failures = gather_object([failure])
        raise next(error for error in failures if error is not None)


def check_agreement(accelerator: Accelerator, what: str, value: str) -> None:
    """Check that a value is the same on all ranks.

    Args:
        accelerator: The accelerator of all ranks.
        what: What the value is, for the message.
        value: This rank's value.

    Raises:
        ConfigError: If it differs; on all ranks.
    """
    found = gather_object([value])
    if len(set(found)) > 1:
        listed = ", ".join(f"process {i}: {one}" for i, one in enumerate(found))
        raise ConfigError(
            f"all processes must have the same {what}, but they have {listed}. Use the same "
            "files, caches and versions everywhere."
        )


def broadcast_from_main(accelerator: Accelerator, value: Any) -> Any:
    """Broadcast the main process's value to all ranks."""
    if accelerator.num_processes == 1:
        return value
    (value_of_main,) = broadcast_object_list([value])
    return value_of_main


def end_training(accelerator: Accelerator) -> None:
    """End the trackers and the process group. Call it last.

    A collective returns before gloo's thread has freed its tensors, which needs the GIL: if the
    interpreter shuts down meanwhile, the process aborts (pytorch/pytorch#179291). Destroying the
    group joins its threads, but the caches of FSDP2's tensors keep the group alive.
    """
    uses_gloo = is_sharded(accelerator) and accelerator.device.type == "cpu"
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if uses_gloo:
        time.sleep(0.5)  # seconds; freeing takes microseconds once the thread is scheduled


def print_on_main(accelerator: Accelerator, text: str) -> None:
    """Print on the main process, once for all machines. Accelerate's `print` prints on each."""
    if accelerator.is_main_process:
        print(text, flush=True)


def share_cores(accelerator: Accelerator) -> None:
    """Split this machine's CPU cores over its processes, to which `accelerate launch` gave one
    thread each.
    """
    # Only the launcher sets this variable.
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if accelerator.device.type != "cpu" or not is_launched:
        return
    num_processes = get_int_from_env(["LOCAL_WORLD_SIZE"], accelerator.num_processes)
    torch.set_num_threads(max(1, _num_cores() // num_processes))


def _num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gather_uneven(gather: Callable, values: Any) -> Any:
    """Gather a tensor that may have fewer rows on some ranks: TRL gathers a value per pair for its
    metrics.

    Args:
        gather: The accelerator's own `gather`, which needs equal shapes.
        values: A tensor of shape (rows of this rank, ...), or anything else that `gather` accepts.

    Returns:
        The rows of all ranks, shape (rows of all ranks, ...).
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        return gather(values)
    own_size = torch.tensor(len(values), device=values.device)
    sizes = gather(own_size).flatten().tolist()
    padding = values.new_zeros(max(sizes) - len(values), *values.shape[1:])
    padded = gather(torch.cat([values, padding]))
    of_ranks = padded.chunk(len(sizes))
    return torch.cat([rows[:size] for rows, size in zip(of_ranks, sizes, strict=True)])
