"""What a whole run needs where there are several processes: who goes first, who writes, and that all have the same before them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env
from transformers.utils import logging

from hf_ga.errors import CheckpointError, ConfigError, HfGaError
from hf_ga.exact.backend import sum_over_ranks

# Seconds in which the main process can say what is wrong for all, before another one says it.
PATIENCE = 5.0
# How many processes this machine has, as the launchers tell it: torch's, Intel MPI, Open MPI, MVAPICH.
_LOCAL_SIZES = ["LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"]


@contextmanager
def main_process_first(accelerator: Accelerator) -> Iterator[None]:
    """The main process runs the block alone, then all others do: they find in the caches what it left there.

    Accelerate's `main_process_first` leaves the others waiting for ever where the block raises; here they raise too.
    """
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    try:
        yield
    finally:
        if accelerator.is_main_process:
            accelerator.wait_for_everyone()


@contextmanager
def main_process_reports_first() -> Iterator[None]:
    """What is wrong for all processes is said once: the others wait a little before they raise, and are ended meanwhile.

    Launchers end all processes as soon as one has failed. An error of one process alone comes out after the wait.
    """
    try:
        yield
    except HfGaError:
        if get_int_from_env(["RANK"], 0):
            time.sleep(PATIENCE)
        raise


@contextmanager
def raise_on_all_ranks(accelerator: Accelerator) -> Iterator[None]:
    """A block that every process enters, whatever each does in it, and that all have left when one goes on.

    Raises:
        CheckpointError: raised by the block on any process: on all, instead of waiting for it for ever. Of several the first's.
    """
    failure = None
    try:
        yield
    except CheckpointError as error:
        failure = str(error)
        if accelerator.num_processes == 1:
            raise
    if accelerator.num_processes > 1 and any(sum_over_ranks(accelerator, [failure is not None])):  # one number, mostly 0
        raise CheckpointError(next(filter(None, gather_object([failure]))))


def check_agreement(accelerator: Accelerator, what: str, value: str) -> None:
    """Check that a value, of which each process made its own, is the same on all.

    Raises:
        ConfigError: it is not; on all processes.
    """
    found = gather_object([value])
    if len(set(found)) > 1:
        listed = ", ".join(f"process {i}: {one}" for i, one in enumerate(found))
        raise ConfigError(
            f"all processes must have the same {what}, or each would train on something else, but they have {listed}. Give all of "
            "them the same files, caches and versions."
        )


def broadcast_from_main(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value, on all processes."""
    return broadcast_object_list([value])[0] if accelerator.num_processes > 1 else value


def print_on_main(accelerator: Accelerator, text: str) -> None:
    """Print once. Accelerate's own `print` does so on every machine."""
    if accelerator.is_main_process:
        print(text)


def silence_other_ranks(accelerator: Accelerator) -> None:
    """No progress bars and hints of the libraries but on the main process; errors remain."""
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def share_cores(accelerator: Accelerator) -> None:
    """Give each process on this machine an equal part of the CPU cores, at least one; `accelerate launch` gives one thread unless
    told otherwise. Nothing is done on a GPU, or where the launcher was another one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // get_int_from_env(_LOCAL_SIZES, accelerator.num_processes))
    launched = accelerator.device.type == "cpu" and "ACCELERATE_MIXED_PRECISION" in os.environ
    if launched and (accelerator.num_processes > 1 or torch.get_num_threads() < threads):
        torch.set_num_threads(threads)
