"""Reads one pass over a stream in windows, in the main process or in a DataLoader worker."""

import copy
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from hf_ga.draws.generators import preserved_random_states, seed_generators
from hf_ga.draws.hashing import Purpose, fold_in
from hf_ga.errors import DataError
from hf_ga.loading.base_loader import Splitter
from hf_ga.loading.fetch import Fetcher, WindowRequest
from hf_ga.loading.streams.shuffle_buffer import shuffled
from hf_ga.loading.window import LoaderState

Numbered = tuple[int, Any]  # (0-based index in the stream, sample)


class HeldSamples:
    """The samples of one window of a stream, indexed by their sample id (index in the stream).

    Args:
        numbered: The samples of the window with their ids.
        digest: 32-bit hash of the samples, to compare processes. 0 if there is a single process.
    """

    def __init__(self, numbered: Sequence[Numbered], digest: int = 0) -> None:
        """Index the samples of a window of a stream by their ids."""
        self.samples = dict(numbered)
        self.digest = digest

    def __len__(self) -> int:
        """Return the number of samples of the window, which was read from a stream."""
        return len(self.samples)

    def __getitem__(self, sample_id: int) -> Any:
        """Return a shallow copy of a sample of the window, as collate functions may remove items
        from it.
        """
        return copy.copy(self.samples[sample_id])

    def __getstate__(self) -> bytes:
        """Return the samples of a window as pickled bytes, to send them from a DataLoader worker.

        Otherwise torch would move every tensor to shared memory, with one file descriptor each.
        """
        return pickle.dumps(self.__dict__)

    def __setstate__(self, state: bytes) -> None:
        """Restore the samples of a window, which a DataLoader worker read, from pickled bytes."""
        self.__dict__.update(pickle.loads(state))


@dataclass(eq=False)
class WindowReader(IterableDataset):
    """Reads one pass over a stream, and collates this process's micro-batches of each window.

    An IterableDataset for a torch DataLoader, so that it can run in a worker.

    Attributes:
        dataset: The user's stream.
        fetcher: Collates the samples of a window. Its `dataset` is set for each of them.
        splitter: Splits windows over processes and micro-batches.
        shuffle_buffer_size: Number of samples in the shuffle buffer. 0: no shuffling.
        length_of: A function from a sample to its number of tokens.
        drop_last_window: Whether to drop a short last window.
        state: The state that the loader shares with its windows. A reader in a worker has a copy of
            when it began; the training step plans its windows again.
        epoch: The epoch of the pass (0-based).
        num_consumed: Number of windows to skip at the beginning.
    """

    dataset: Any
    fetcher: Fetcher
    splitter: Splitter
    shuffle_buffer_size: int
    length_of: Callable[[Any], int]
    drop_last_window: bool
    state: LoaderState
    epoch: int = 0
    num_consumed: int = 0

    def __iter__(self) -> Iterator[tuple[WindowRequest, HeldSamples, list[dict[str, Any]]]]:
        """Yield (plan, samples, collated micro-batches of this process) for each window."""
        # Hide from `datasets` that this is a worker, where it would shuffle in another order than
        # in the main process.
        worker._worker_info = None
        windows = self._windows()
        for index in count(self.num_consumed):
            with preserved_random_states():
                held = next(windows, None)
            if held is None:
                return
            ids = list(held.samples)
            lengths = [self.length_of(sample) for sample in held.samples.values()]
            request = self.splitter.make_request(
                self.epoch,
                index,
                sample_ids=np.array(ids, np.int64),
                lengths=np.array(lengths, np.int64),
                pad_to_window=self.state.pad_to_window,
                computed=self.state.computed,
            )
            self.fetcher.dataset = held
            batches = self.fetcher[request]
            self.fetcher.dataset = None
            yield request, held, batches
            del held, request, batches  # free the window while the next one is read

    def _windows(self) -> Iterator[HeldSamples]:
        """Read and shuffle the stream, and yield the samples of the windows that are not consumed.

        Seeds the global random generators; the caller restores their states.
        """
        size = self.splitter.layout.window_size
        seed = self.splitter.seed
        is_distributed = self.splitter.layout.num_processes > 1
        stream = numbered_samples(self.dataset, seed, self.epoch)
        samples = shuffled(stream, self.shuffle_buffer_size, seed, self.epoch)
        self._skip_consumed(samples)
        num_windows = self.num_consumed
        while True:
            window = list(islice(samples, size))
            is_short = len(window) < size
            if not window or (is_short and self.drop_last_window):
                break
            # Processes compare it: each reads the stream for itself and must see the same samples.
            digest = _digest(window) if is_distributed else 0
            held = HeldSamples(window, digest)
            del window  # otherwise it stays in memory until the next window is read
            yield held
            del held
            num_windows += 1
        if not num_windows:
            raise DataError(
                f"drop_last_window drops the whole stream of {len(window)} samples: use a window "
                f"below {size}."
            )

    def _skip_consumed(self, samples: Iterator[Numbered]) -> None:
        """Skip the samples of the consumed windows: advance the shuffled stream. DataError if it
        ends before the last of these windows.
        """
        size = self.splitter.layout.window_size
        num_skipped = sum(1 for _ in islice(samples, size * self.num_consumed))
        if num_skipped <= size * (self.num_consumed - 1):
            raise DataError(
                f"the stream ended after {num_skipped} samples in epoch {self.epoch}, but "
                f"{self.num_consumed} windows of {size} were consumed before the checkpoint. "
                "Resume with the same stream, not split by process."
            )


def numbered_samples(dataset: Any, seed: int, epoch: int) -> Iterator[Numbered]:
    """Read a stream once, to form windows, and yield (index, sample) for each of its samples.

    Calls `dataset.set_epoch` if there is such a method. Seeds the global random generators before
    each sample is read, so that random transforms depend on (seed, epoch, index) only; the caller
    restores their states (`preserved_random_states`).

    Args:
        dataset: The user's stream.
        seed: Seed of the run.
        epoch: Epoch of the pass (0-based).

    Raises:
        DataError: If the stream is empty, for example because it can be read only once, or if a
            sample is not a dict, list, tuple or tensor.
    """
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    seed_generators(fold_in(Purpose.BUFFER, seed, epoch))
    iterator = iter(dataset)
    for index in count():
        seed_generators(fold_in(Purpose.SAMPLE, seed, epoch, index))
        try:
            sample = next(iterator)
        except StopIteration:
            break
        if not isinstance(sample, Mapping | list | tuple | Tensor | np.ndarray):
            raise DataError(
                f"sample {index} of the stream is a {type(sample).__name__} "
                f"({str(sample)[:40]!r}): a sample must be a dict (or a list, a tuple, a tensor). "
                "From a dict of splits, choose one split."
            )
        yield index, sample
    if index == 0:
        raise DataError(
            f"the stream is empty in epoch {epoch}: `iter(dataset)` must restart it for every pass."
        )


def _digest(samples: Sequence[Numbered]) -> int:
    """Return a 32-bit hash of a window's samples, to compare processes: of float arrays their
    shape, as decoders of images or audio may round differently on different machines.
    """
    text = json.dumps(samples, default=_describe_for_digest, skipkeys=True)
    return zlib.crc32(text.encode())


def _describe_for_digest(value: Any) -> int | str:
    """Return what stands for an array or tensor in `_digest`: a 32-bit hash of integers, bools or
    bytes; otherwise the shape as a string.
    """
    array = np.asarray(value)
    if array.dtype.kind in "iubS":
        return zlib.crc32(array.tobytes())
    return str(array.shape)
