"""Items of a DataLoader whose workers forward their exceptions, so that an error has its own type and message in the main
process.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from multiprocessing.pool import ExceptionWithTraceback
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from hf_ga.errors import DataError, HfGaError


class _Failure:
    """An exception of a worker on its way to the main process, with its traceback as the cause."""

    def __init__(self, error: Exception) -> None:
        try:
            self.pickled = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
            pickle.loads(self.pickled)
        except Exception:
            raise error from None  # cannot be pickled: as torch reports it

    def error(self) -> Exception:
        error = pickle.loads(self.pickled)
        if isinstance(error, HfGaError):
            error.__cause__ = None  # its message is complete
        return error


class _Forwarding:
    """A dataset whose exceptions are items."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _Failure(error)


class _ForwardingStream(IterableDataset):
    """The same of a stream, which ends with the exception."""

    def __init__(self, stream: IterableDataset) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.stream
        except Exception as error:
            yield _Failure(error)


def load_items(dataset: Any, *, num_workers: int, pin_memory: bool, sampler: Sampler | Iterator | None = None) -> Iterator[Any]:
    """The items of a dataset or stream, fetched by `num_workers` worker processes (0: here), in order and not collated.

    Raises:
        DataError: a worker died. Whatever the dataset raised in a worker.
    """
    is_stream = isinstance(dataset, IterableDataset)
    if num_workers:
        dataset = _ForwardingStream(dataset) if is_stream else _Forwarding(dataset)
    loader = DataLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        worker_init_fn=obey_parent_only,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or else the global one would move
    )
    iterator = iter(loader)
    try:
        while (item := _next_item(iterator)) is not None:
            if isinstance(item[0], _Failure):
                raise item[0].error()
            yield item.pop()  # what the caller releases is not held here
    finally:
        del iterator  # its workers end now, also where a traceback keeps this frame


def _next_item(iterator: Iterator) -> list[Any] | None:
    """The next item, in a list; None at the end."""
    try:
        return [next(iterator)]
    except StopIteration:
        return None
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"{' '.join(str(error).split()).rstrip('.')}. Likely causes: memory ran out (a worker has its own copy of what it "
            "touches), shared memory is full (/dev/shm; --shm-size of a container), or code of the dataset crashed. Use fewer "
            "workers (--dataloader_num_workers, num_workers); with 0 the training process loads the data, and shows what fails."
        ) from error


def _unchanged(value: Any) -> Any:
    return value


def obey_parent_only(worker: int) -> None:
    """For `worker_init_fn` of a DataLoader: obey a SIGTERM of the parent only.

    With torch's handler, a SIGTERM that is sent to all processes of a job ends the workers, and the run would fail for want of
    samples instead of finishing its window and saving.
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
