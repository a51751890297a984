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
    """A block that raises on all ranks if it raises on one. All ranks must enter it.

    Raises:
        CheckpointError, ConfigError: the block raised one on some rank; the error of the first such
            rank.
    """
    failure = None
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        failure = error
        if accelerator.num_processes == 1:
            raise
    if accelerator.num_processes > 1 and any(
        sum_over_ranks(accelerator, [failure is not None])
    ):  # one number, mostly 0
        raise next(filter(None, gather_object([failure])))


def check_agreement(accelerator: Accelerator, what: str, value: str) -> None:
    """Check that a value is the same on all ranks.

    Raises:
        ConfigError: it differs; on all ranks.
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
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


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
    """Print on the main process. Accelerate's `print` prints once per machine."""
    if accelerator.is_main_process:
        print(text, flush=True)


def share_cores(accelerator: Accelerator) -> None:
    """Split this machine's CPU cores over its processes, to which `accelerate launch` gave one
    thread each.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    threads = max(1, cores // get_int_from_env(["LOCAL_WORLD_SIZE"], accelerator.num_processes))
    if (
        accelerator.device.type == "cpu" and "ACCELERATE_MIXED_PRECISION" in os.environ
    ):  # set by its launcher only
        torch.set_num_threads(threads)


def gather_uneven(gather: Callable, values: Any) -> Any:
    """`accelerator.gather` for a tensor that may have fewer rows on some ranks: TRL gathers a value
    per pair for its metrics.
    """
    if not isinstance(values, Tensor) or values.dim() == 0:
        return gather(values)
    sizes = gather(torch.tensor(len(values), device=values.device)).flatten().tolist()
    padded = torch.cat([values, values.new_zeros(max(sizes) - len(values), *values.shape[1:])])
    return torch.cat(
        [rows[:size] for rows, size in zip(gather(padded).chunk(len(sizes)), sizes, strict=True)]
    )
