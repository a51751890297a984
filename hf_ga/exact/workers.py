"""Items of a torch DataLoader, with clear errors, and workers that survive a SIGTERM to the whole
job.
"""

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
    """Yield the items of a dataset or stream, fetched by worker processes (0: here), in order and
    not collated.

    Raises:
        DataError: a worker died. What the dataset raised; from a worker as torch raises it: the
            same type, with a traceback in its message (an `HfGaError` keeps its message).
    """
    loader = DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=obey_parent_only,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # or else the global one would move
    )
    try:
        yield from loader  # not by a variable, which would hold what the caller releases
    except HfGaError as error:
        error.args = (str(error).rsplit(f"{type(error).__name__}: ", 1)[-1].strip(),)
        raise
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(
            f"{' '.join(str(error).split()).rstrip('.')}. Likely causes: memory ran out (a worker "
            "has its own copy of what it "
            "touches), shared memory is full (/dev/shm; --shm-size of a container), or code of "
            "the dataset crashed. Use fewer "
            "workers (--dataloader_num_workers, num_workers); with 0 the training process loads "
            "the data and shows the error."
        ) from error


def _unchanged(value: Any) -> Any:
    return value


def obey_parent_only(worker: int) -> None:
    """Let a worker of a DataLoader obey a SIGTERM of its parent only, as its `worker_init_fn`.

    With torch's handler, a SIGTERM that is sent to all processes of a job ends the workers, and the
    run would fail for want of samples instead of finishing its window and saving.
    """
    if hasattr(signal, "sigwaitinfo"):  # macOS and Windows do not tell who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
