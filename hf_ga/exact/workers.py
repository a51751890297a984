"""Items of a DataLoader: what goes wrong in a worker, or with it, comes out as one clear error where its item is waited for."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.pool import ExceptionWithTraceback
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from hf_ga.errors import DataError, HfGaError

if TYPE_CHECKING:
    from hf_ga.exact.base_loader import BaseLoader

END = 1.0  # seconds in which a process whose connection broke can be seen to have ended


class Failed:
    """An exception of a worker on its way to the main process, with its traceback."""

    def __init__(self, error: Exception) -> None:
        self.pickled = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
        pickle.loads(self.pickled)  # one that cannot be read again is refused here, in the worker

    def error(self) -> Exception:
        error = pickle.loads(self.pickled)
        if isinstance(error, HfGaError):
            error.__cause__ = None  # its message says it all
        return error


class Telling:
    """A dataset in a worker whose exceptions are items. torch would make one long text of message and traceback."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _failed(error)


class TellingStream(IterableDataset):
    """The same of a stream, which ends with the exception."""

    def __init__(self, stream: IterableDataset) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.stream
        except Exception as error:
            yield _failed(error)


def telling(dataset: Any, num_workers: int) -> Any:
    """The dataset of a loader whose items `items_of` reads."""
    if not num_workers:
        return dataset
    return TellingStream(dataset) if isinstance(dataset, IterableDataset) else Telling(dataset)


def items_of(loader: DataLoader, windows: "BaseLoader") -> Iterator[Any]:
    """The items of a loader of a `telling` dataset. Its workers end with the iteration, also one that is left early.

    Args:
        windows: what the items are made for: its epoch and number of consumed windows name the one that is waited for.

    Raises:
        DataError: a worker died. Whatever the dataset or the collate function raised in a worker, as without workers.
    """
    iterator = iter(loader)
    if not loader.num_workers:
        yield from iterator
        return
    try:
        _set_watch(iterator, on=False)
        while (item := _next_item(iterator, windows)) is not None:
            if isinstance(item[0], Failed):
                raise item[0].error()
            yield item.pop()
    finally:
        iterator._shutdown_workers()


def _next_item(iterator: Any, windows: "BaseLoader") -> list[Any] | None:
    """The next item, in a list, so that the caller can let it go; None at the end."""
    try:
        with _watched(iterator):
            return [next(iterator)]
    except StopIteration:
        return None
    except (RuntimeError, OSError, EOFError) as error:
        ended = wait([worker.sentinel for worker in iterator._workers], END)
        if not ended:
            raise
        worker = next(worker for worker in iterator._workers if worker.sentinel in ended)
        raise DataError(_why(worker, windows)) from error


@contextmanager
def _watched(iterator: Any) -> Iterator[None]:
    """torch's handler of ended children raises in whatever the main process does at that time: here only while it waits for them,
    not in the middle of a step.
    """
    _set_watch(iterator, on=True)
    try:
        if any(worker.exitcode is not None for worker in iterator._workers):
            raise RuntimeError("a worker has ended")
        yield
    finally:
        _set_watch(iterator, on=False)


def _set_watch(iterator: Any, *, on: bool) -> None:
    if on == iterator._worker_pids_set:
        return
    if on:
        signal_handling._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
    else:
        signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = on


def _why(worker: BaseProcess, windows: "BaseLoader") -> str:
    worker.join()
    code = worker.exitcode
    how = f"ended by itself with code {code}"
    causes = "the code of the dataset or the collate function ended it"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        causes = (
            "the system ran out of memory (a worker has its own copy of what it touches), shared memory is full (/dev/shm; "
            "--shm-size of a container), compiled code of the dataset crashed, or somebody ended it"
        )
    return (
        f"a worker of the data loader (process {worker.pid}) {how} while window {windows.num_consumed} of epoch {windows.epoch} "
        f"was waited for. Likely causes: {causes}. Use fewer workers (--dataloader_num_workers, num_workers); with 0 the training "
        "process reads, and shows what fails."
    )


def _failed(error: Exception) -> Failed:
    try:
        return Failed(error)
    except Exception:
        raise error from None  # as torch tells it


def end_with_parent_only(worker: int) -> None:
    """For `worker_init_fn` of a DataLoader: obey a SIGTERM of the parent only, which ends its workers by it.

    By torch's own handler, one that is sent to all processes of a job ends the workers, and the run would fail for want of samples
    instead of finishing its window.
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
