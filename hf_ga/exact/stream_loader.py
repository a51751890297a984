"""StreamLoader: windows of an iterable dataset, the same Window objects as from a `WindowLoader`.

Every process reads the whole stream and keeps its share. So all processes have a window's lengths
and compute the same plan without communication.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator

from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.base_loader import BaseLoader
from hf_ga.exact.batches import sample_length
from hf_ga.exact.fetch import Collate
from hf_ga.exact.plan import Planner
from hf_ga.exact.stream_reader import HeldSamples, StreamFetcher, WindowReader
from hf_ga.exact.window import Window
from hf_ga.exact.workers import load_items


class StreamLoader(BaseLoader):
    """Iterates over one pass of a stream in windows of consecutive samples; the last window may be
    short. With `shuffle_buffer_size=0` and `length_of` they equal, bit for bit, the windows of a
    `WindowLoader` over a list of the same samples with `shuffle=False`.

    A sample's position is its index in the order of the epoch, after the shuffle buffer. Its id is
    its index in the stream, after filters and maps. Random transforms of the stream draw from
    generators seeded with (seed, epoch, index in the stream) when the sample is read.

    Every process reads the whole stream, and every pass begins with `iter(dataset)`, after
    `dataset.set_epoch(epoch)` if there is such a method. In memory are the shuffle buffer, the
    window being read and the one being trained on (and two more if a worker reads ahead), and for
    the proof the stream's first 128 samples. The state counts consumed windows: resuming reads the
    stream from its beginning (with all its maps) and skips consumed samples, and is exact for every
    stream that yields the same samples again.

    The number of samples is unknown, so there is no `len()`.

    Args:
        dataset: Yields samples (dicts, lists, tuples, tensors), with each `iter()` from the
            beginning: a torch or `datasets` IterableDataset, not split by process.
        collate_fn: See `WindowLoader`, as the arguments that are not listed here.
        shuffle_buffer_size: In samples; see `shuffle_buffer`. 0: the stream's own order.
        length_of: Sample -> number of tokens, for planning windows by length. Default: with a
            `planner`, the longest list in a sample. Without a token limit, a micro-batch has at
            most as many tokens as `per_device_batch_size` of its window's longest samples.
        num_workers: 1 reads ahead in a worker process; 0 does not.

    Raises:
        ConfigError: If sizes fit no layout, or there is more than one worker (each would read the
            whole stream).
        DataError: If the stream can be read only once. While iterating, if it is empty, ends before
            the loaded position, or has a sample that is not a dict, list, tuple or tensor; or if
            processes read different streams.

    Example:
        sizes = {"per_device_batch_size": 8, "shuffle_buffer_size": 1000}
        windows = StreamLoader(stream, collate_fn, accelerator=accelerator, **sizes)
        for window in windows:
            train_step(accelerator, model, optimizer, window)
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        *,
        accelerator: Accelerator,
        per_device_batch_size: int = 8,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle_buffer_size: int = 10_000,
        length_of: Callable[[Any], int] | None = None,
        max_tokens_per_micro_batch: int | None = None,
        planner: Planner | None = None,
        pad_to_window: bool = False,
        drop_last_window: bool = False,
        num_workers: int = 0,
        canonical_micro_batch: int | None = None,
    ) -> None:
        if isinstance(dataset, Iterator):
            name = type(dataset).__name__
            raise DataError(
                f"a {name} can be read only once, but every epoch reads it again: pass a "
                "restartable iterable."
            )
        if shuffle_buffer_size < 0:
            raise ConfigError(f"shuffle_buffer_size must be at least 0, got {shuffle_buffer_size}.")
        if num_workers > 1:
            raise ConfigError(
                f"num_workers {num_workers}: a stream is read in order, by at most one worker. "
                "Use 1 to read ahead, or 0."
            )
        super().__init__(
            accelerator,
            per_device_batch_size,
            global_batch_size,
            seed,
            pad_to_window,
            canonical_micro_batch,
        )
        self.splitter = self._make_splitter(
            planner, length_of is not None, None, max_tokens_per_micro_batch
        )
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        fetcher = StreamFetcher(collate_fn)
        length_of = length_of or sample_length
        self.reader = WindowReader(
            dataset, fetcher, self.splitter, shuffle_buffer_size, length_of, drop_last_window
        )

    def use_seed(self, seed: int) -> None:
        """Take over the seed of a saved position."""
        super().use_seed(seed)
        self.reader = replace(self.reader, splitter=self.splitter)

    def probe_samples(self, count: int) -> list[Any]:
        """Read about `count` samples of the stream's first window, for a proof."""
        window = next(iter(self))
        self.num_consumed -= 1  # it is still to be trained on
        return window.fetcher.probe_samples(window.request, count)

    def __iter__(self) -> Iterator[Window]:
        """Yield the remaining windows of the current pass; then the next pass begins."""
        reader = replace(
            self.reader,
            epoch=self.epoch,
            num_consumed=self.num_consumed,
            pad_to_window=self.state.pad_to_window,
        )
        for request, samples, batches in load_items(
            reader, self.num_workers, self.accelerator.device
        ):
            self._check_same(request.index, samples)
            self.num_consumed += 1
            window = Window(
                request, reader.fetcher.of(samples), batches, self.state, self.splitter.padded
            )
            del request, samples, batches  # free them when the caller does
            yield window
            del window
            # Without a worker; the step pads a worker's windows.
            reader.pad_to_window = self.state.pad_to_window
        self._check_same(-1, HeldSamples([]))
        self.set_epoch(self.epoch + 1)

    def _check_same(self, index: int, samples: HeldSamples) -> None:
        """Check, by one all-gather per window (index -1: the end), that all processes read the same
        stream.
        """
        if self.layout.num_processes == 1 or not torch.distributed.is_initialized():
            return
        row = torch.tensor(
            [[self.epoch, index, len(samples), samples.digest]],
            dtype=torch.float64,
            device=self.accelerator.device,
        )
        rows = self.accelerator.gather(row).cpu()
        if (rows != rows[0]).any():
            listed = "; ".join(
                f"process {process}: {number:.0f} samples, digest {digest:.0f}"
                for process, (_, _, number, digest) in enumerate(rows)
            )
            raise DataError(
                f"the processes read different streams: window {self.num_consumed} of epoch "
                f"{self.epoch} differs ({listed}). Every process must read the whole stream: do "
                "not split it by process, and fix the seed of its own shuffle."
            )

    def _identity(self) -> dict[str, int]:
        return {**super()._identity(), "shuffle_buffer_size": self.reader.shuffle_buffer_size}
