"""Reading a stream: numbered samples -> the windows of one pass, in the main process or in a
worker.
"""

import copy
import json
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from hf_ga.errors import DataError
from hf_ga.exact.base_loader import Splitter
from hf_ga.exact.fetch import Collate, Fetcher, WindowRequest
from hf_ga.exact.generators import preserved_random_states, seed_generators
from hf_ga.exact.hashing import Purpose, fold_in
from hf_ga.exact.shuffle_buffer import shuffled

Numbered = tuple[int, Any]  # a sample with its 0-based index in the stream
NUM_FOR_PROOF = 128  # first samples of the stream, kept for the proof


class HeldSamples:
    """The samples of one window, by their index in the stream.

    Attributes:
        digest: 32-bit hash of the samples, to compare processes.
        first: first samples of the stream, chosen by length, for the proof; with the first window
            only.
    """

    def __init__(
        self, numbered: Sequence[Numbered], first: Sequence[Any] = (), digest: int = 0
    ) -> None:
        self.samples = dict(numbered)
        self.first = first
        self.digest = digest

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample_id: int) -> Any:
        """Copy a sample: collate functions may pop entries of it."""
        return copy.copy(self.samples[sample_id])

    def __getstate__(self) -> bytes:
        """Give plain bytes: in shared memory, every tensor of a worker's samples would use a file
        descriptor.
        """
        return pickle.dumps(self.__dict__)

    def __setstate__(self, state: bytes) -> None:
        self.__dict__.update(pickle.loads(state))


class StreamFetcher(Fetcher):
    """Collates samples of one window; a proof uses the first samples of the stream."""

    def __init__(self, collate_fn: Collate) -> None:
        super().__init__(None, collate_fn)  # a window's samples, while they are collated
        self.first: Sequence[Any] = ()

    def of(self, samples: HeldSamples) -> "StreamFetcher":
        """Return the fetcher of one window, which the reader has collated; also keep what came with
        the first window.
        """
        self.first = samples.first or self.first
        self.is_repeatable = True
        fetcher = copy.copy(self)
        fetcher.dataset = samples
        return fetcher

    def probe_samples(self, request: WindowRequest, count: int) -> list[Any]:
        """Take samples from the beginning of the stream, over the whole range of lengths."""
        chosen = np.linspace(0, len(self.first) - 1, min(count, len(self.first))).astype(int)
        return [copy.copy(self.first[i]) for i in chosen]


@dataclass(eq=False)
class WindowReader(IterableDataset):
    """Reads one pass, in the main process or in a worker, and collates this process's share of each
    window.
    """

    dataset: Any
    fetcher: StreamFetcher
    splitter: Splitter
    shuffle_buffer_size: int
    length_of: Callable[[Any], int]
    drop_last_window: bool
    epoch: int = 0
    num_consumed: int = 0
    pad_to_window: bool = False

    def __iter__(self) -> Iterator[tuple[WindowRequest, HeldSamples, list[dict[str, Any]]]]:
        # Makes a worker read like the main process: in a worker, `datasets` shuffles with other
        # generators.
        worker._worker_info = None
        windows = self._windows()
        for index in count(self.num_consumed):
            with preserved_random_states():
                held = next(windows, None)
            if held is None:
                return
            ids = np.array(list(held.samples), np.int64)
            lengths = np.array([self.length_of(held.samples[i]) for i in held.samples], np.int64)
            request = self.splitter.request(self.epoch, index, ids, lengths, self.pad_to_window)
            self.fetcher.dataset = held
            batches = self.fetcher[request]
            self.fetcher.dataset = None
            yield request, held, batches
            del held, request, batches  # free the window while the next one is read

    def _windows(self) -> Iterator[HeldSamples]:
        size = self.splitter.layout.window_size
        seed = self.splitter.seed
        has_others = self.splitter.layout.num_processes > 1
        stream = numbered_samples(self.dataset, seed, self.epoch)
        head = list(islice(stream, NUM_FOR_PROOF))
        first = sorted((sample for _, sample in head), key=self.length_of)
        samples = shuffled(chain(head, stream), self.shuffle_buffer_size, seed, self.epoch)
        del head
        num_skipped = sum(1 for _ in islice(samples, size * self.num_consumed))
        if num_skipped <= size * (self.num_consumed - 1):
            raise DataError(
                f"the stream ended after {num_skipped} samples in epoch {self.epoch}, but "
                f"{self.num_consumed} windows of {size} were consumed before the checkpoint. "
                "Resume with the same stream, not split by process."
            )
        num_windows = self.num_consumed
        while True:
            window = list(islice(samples, size))
            is_short = len(window) < size
            if not window or (is_short and self.drop_last_window):
                break
            held = HeldSamples(window, first, digest=_digest(window) if has_others else 0)
            del window, first  # or they would stay in memory until the next window is read
            yield held
            del held
            first = []
            num_windows += 1
        if not num_windows:
            raise DataError(
                f"drop_last_window drops the whole stream of {len(window)} samples: use a window "
                f"below {size}."
            )


def numbered_samples(dataset: Any, seed: int, epoch: int) -> Iterator[Numbered]:
    """Read a stream once, with the index of each sample.

    Seeds the global generators for every sample; the caller restores them
    (`preserved_random_states`).

    Raises:
        DataError: If the stream is empty or can be read only once, or a sample is not a dict, list,
            tuple or tensor.
    """
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    seed_generators(fold_in(Purpose.BUFFER, seed, epoch))
    iterator = iter(dataset)
    for number in count():
        seed_generators(fold_in(Purpose.SAMPLE, seed, epoch, number))
        try:
            sample = next(iterator)
        except StopIteration:
            break
        if not isinstance(sample, Mapping | list | tuple | Tensor | np.ndarray):
            raise DataError(
                f"sample {number} of the stream is a {type(sample).__name__} "
                f"({str(sample)[:40]!r}): a sample must be a dict (or a list, a tuple, a tensor). "
                "From a dict of splits, choose one split."
            )
        yield number, sample
    if not number:
        raise DataError(
            f"the stream is empty in epoch {epoch}: `iter(dataset)` must restart it for every pass."
        )


def _digest(samples: Sequence[Numbered]) -> int:
    """Return a 32-bit hash of samples.

    Of float arrays and tensors only the shape counts, as decoders may round differently.
    """
    return zlib.crc32(json.dumps(samples, default=_digest_of_array, skipkeys=True).encode())


def _digest_of_array(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind in "iubS":
        return zlib.crc32(array.tobytes())
    return str(array.shape)
