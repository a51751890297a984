"""DataLoader workers with clear errors, which survive a SIGTERM to all processes of the job."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hf_ga.errors import DataError, HfGaError


def load_items(
    dataset: Any, num_workers: int, device: torch.device, sampler: Iterator | None = None
) -> Iterator[Any]:
    """Yield windows with their collated micro-batches in order, loaded by DataLoader workers.

    Args:
        dataset: A map-style or iterable dataset whose items are windows.
        num_workers: Number of DataLoader workers. 0: load in this process.
        device: The device that batches are copied to. Host memory is pinned if it is a GPU.
        sampler: Yields what to index the dataset with (plans of windows). None for an iterable
            dataset.

    Raises:
        DataError: If a worker died.
        Exception: Any exception that the dataset raises. From a worker it has the same type, but
            torch puts a traceback into its message (not for an `HfGaError`).
    """
    loader = DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=obey_parent_only,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # so that the DataLoader does not draw from the global one
    )
    try:
        yield from loader  # no variable for the item, which would keep it alive too long
    except HfGaError as error:
        # Drop the traceback that torch put before the message.
        error.args = (str(error).rsplit(f"{type(error).__name__}: ", 1)[-1].strip(),)
        raise
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"{' '.join(str(error).split()).rstrip('.')}. Likely causes: memory ran out (a worker "
            "has its own copy of what it touches), shared memory is full (/dev/shm; --shm-size of "
            "a container), or code of the dataset crashed. Use fewer workers "
            "(--dataloader_num_workers, num_workers); with 0 the training process loads the data "
            "and shows the error."
        ) from error


def _unchanged(value: Any) -> Any:
    """Return the value itself: the `collate_fn` of a DataLoader of windows collated already."""
    return value


def obey_parent_only(worker_id: int) -> None:
    """Make a DataLoader worker that loads windows ignore a SIGTERM unless its parent sends it; a
    `worker_init_fn`.

    Cluster schedulers send a SIGTERM to all processes of a job. With torch's handler, the workers
    would exit, and training would fail for lack of samples instead of finishing its window and
    saving a checkpoint. A no-op on macOS and Windows, which do not tell who sent a signal.

    Args:
        worker_id: Index of the worker. Unused.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_sigterm_of_parent, daemon=True).start()


def _exit_on_sigterm_of_parent() -> None:
    """Wait for a SIGTERM from the training process, then exit this DataLoader worker at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
