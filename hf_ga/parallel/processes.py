"""Helpers for several processes: run the main process first, raise errors on all ranks, compare and
broadcast values, print, share CPU cores, shut down.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env
from torch import Tensor

from hf_ga.errors import CheckpointError, ConfigError, HfGaError, ProcessFailed
from hf_ga.parallel.fsdp import is_sharded

# What the main process computes for all may take longer than the usual timeout of collectives. If
# it ends, the others stop waiting.
TIMEOUT = timedelta(days=1)


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """Run the block on the main process first, and then on the others, which find its downloads and
    caches on the disk.

    If the block raises on the main process, the others run it all the same. With Accelerate's
    `main_process_first` they would hang.
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
    """Raise a CheckpointError or ConfigError on all ranks if the block raises it on one of them, so
    that the others do not wait for the failed rank forever. All ranks must enter the block.

    Raises:
        CheckpointError, ConfigError: If the block raised it on some rank. If several ranks failed,
            all raise the error of the first of them.
    """
    failure = None
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        failure = error
    for error in gather_object([failure]):  # without other processes, the list itself
        if error is not None:
            raise error


def check_agreement(accelerator: Accelerator, description: str, value: str) -> None:
    """Check that a value is the same on all ranks. All ranks must call it.

    Args:
        accelerator: The accelerator of all ranks.
        description: What the value is, for the message: "all processes must have the same ...".
        value: This rank's value.

    Raises:
        ConfigError: If the values differ; on all ranks.
    """
    values = gather_object([value])  # without other processes, the list itself
    if len(set(values)) > 1:
        listed = ", ".join(f"process {rank}: {value}" for rank, value in enumerate(values))
        raise ConfigError(
            f"all processes must have the same {description}, but they have {listed}. Use the "
            "same files, caches and versions everywhere."
        )


def broadcast_from_main(accelerator: Accelerator, value: Any) -> Any:
    """Return the main process's value on all ranks. All ranks must call it.

    Args:
        accelerator: The accelerator of all ranks.
        value: This rank's value, any object that can be pickled; ignored except on the main
            process.
    """
    (value_of_main,) = broadcast_object_list([value])
    return value_of_main


def call_on_main(accelerator: Accelerator, function: Callable, *arguments: Any) -> Any:
    """Return `function(*arguments)`, called on the main process only, on all ranks. All ranks must
    call it.

    Raises:
        HfGaError: If the function raised it; on all ranks.
        ProcessFailed: On the other ranks, if it raised any other error.
    """
    result = None
    failure: Exception | None = None
    reported: Exception | None = None
    if accelerator.is_main_process:
        try:
            result = function(*arguments)
        except Exception as error:
            failure = reported = error
            if not isinstance(error, HfGaError):
                reported = ProcessFailed(f"process 0 failed: {type(error).__name__}: {error}")
    if accelerator.num_processes > 1:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        outcome = [result, reported]
        dist.broadcast_object_list(outcome, src=0, group=group)
        dist.destroy_process_group(group)
        result, reported = outcome
    if reported is not None:
        raise failure or reported
    return result


def end_training(accelerator: Accelerator) -> None:
    """End a run's trackers and its process group. Call it last, on all processes.

    Under FSDP on a CPU it also waits half a second. A collective returns before gloo's thread has
    freed its tensors, which needs the GIL; if the interpreter shuts down meanwhile, the process
    aborts (pytorch/pytorch#179291). Destroying the group would join its threads, but the caches of
    FSDP2's tensors keep the group alive.
    """
    uses_gloo = is_sharded(accelerator) and accelerator.device.type == "cpu"
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if uses_gloo:
        # In seconds. Freeing the tensors takes microseconds once the thread is scheduled.
        time.sleep(0.5)


def print_on_main(accelerator: Accelerator, text: str) -> None:
    """Print a line on the main process only: once, also if a run's processes are on several
    machines. Accelerate's `print` prints once on each machine.
    """
    if accelerator.is_main_process:
        print(text, flush=True)


def share_cores(accelerator: Accelerator) -> None:
    """Set the number of torch's threads in this process to its share of this machine's CPU cores.

    Does nothing on a GPU, or if the process was not started by `accelerate launch`, which gives
    each process a single thread.
    """
    # Only `accelerate launch` sets this variable.
    if accelerator.device.type != "cpu" or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return
    num_processes = get_int_from_env(["LOCAL_WORLD_SIZE"], accelerator.num_processes)
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, num_cores // num_processes))


def gather_uneven(gather: Callable, values: Any) -> Any:
    """Gather, over all ranks, a tensor that may have a different number of rows on each of them.
    TRL needs that for its metrics, which have one value for each pair of texts.

    Args:
        gather: The accelerator's own `gather`, which needs equal shapes on all ranks.
        values: A tensor of shape (rows of this rank, ...). Anything else (a scalar, a dict) is
            passed to `gather` unchanged.

    Returns:
        The rows of all ranks in the order of the ranks, shape (rows of all ranks, ...).
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        return gather(values)
    own_num_rows = torch.tensor(len(values), device=values.device)
    num_rows_by_rank = gather(own_num_rows).flatten().tolist()
    # Not Accelerate's `pad_across_processes`, which makes numbers of booleans where it pads.
    padding = values.new_zeros(max(num_rows_by_rank) - len(values), *values.shape[1:])
    padded_by_rank = gather(torch.cat([values, padding])).chunk(len(num_rows_by_rank))
    return torch.cat(
        [rows[:num_rows] for rows, num_rows in zip(padded_by_rank, num_rows_by_rank, strict=True)]
    )
