"""StreamLoader: yields the windows of an iterable dataset (a stream).

Every process reads the whole stream and collates its own samples only. So all processes know the
lengths of all samples of a window, and compute the same plan without communication.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from hf_ga.draws.generators import preserved_random_states
from hf_ga.errors import ConfigError, DataError
from hf_ga.loading.base_loader import BaseLoader
from hf_ga.loading.batches import sample_length
from hf_ga.loading.fetch import Collate, Fetcher
from hf_ga.loading.streams.stream_reader import (
    HeldSamples,
    WindowReader,
    numbered_samples,
)
from hf_ga.loading.window import Window
from hf_ga.loading.workers import load_items
from hf_ga.order.plan import Planner

NUM_FOR_TRIAL = 128  # samples from the beginning of the stream, for the trial of the loss


class StreamLoader(BaseLoader):
    """Yields the windows of a stream: consecutive samples in the order of its shuffle buffer.

    Iterating yields the remaining windows of one pass over the stream; the last window may be
    short. With `shuffle_buffer_size=0` and `length_of`, the windows equal, bit for bit, those of a
    `WindowLoader` over a list of the same samples with `shuffle=False`.

    The position of a sample is its index in the shuffled order, and its id is its index in the
    stream (after filters and maps). Random transforms of the stream draw from global generators
    that are seeded with (seed, epoch, index in the stream) when the sample is read.

    Every process reads the whole stream. Every pass begins with `iter(dataset)`, after
    `dataset.set_epoch(epoch)` if there is such a method. Memory holds the shuffle buffer, the
    window being read, and the window being trained on (and two more windows with a worker). To
    resume, the stream is read from its beginning, and consumed samples are skipped. That is exact
    if the stream yields the same samples again.

    The number of samples is unknown, so there is no `len()`.

    Args:
        dataset: A torch or `datasets` IterableDataset, or any iterable whose `iter()` starts from
            the beginning. It yields dicts, lists, tuples or tensors, and must not be split by
            process.
        collate_fn: See `WindowLoader`, also for the arguments that are not listed here.
        shuffle_buffer_size: Number of samples in the shuffle buffer (see `shuffle_buffer`). 0: keep
            the order of the stream.
        length_of: A function from a sample to its number of tokens, to plan windows by length.
            Without a token limit, a micro-batch then has at most as many padded tokens as
            `per_device_batch_size` samples of the length of its window's longest sample. None:
            windows are split by number of samples, and a `planner` gets the length of the longest
            list in each sample.
        num_workers: 1: read ahead in a worker process. 0: read in this process.

    Raises:
        ConfigError: If the sizes contradict each other, or there is more than one worker (each
            would read the whole stream).
        DataError: If the stream can be read only once. While iterating: if the stream is empty,
            ends before the loaded position, or yields a sample that is not a dict, list, tuple or
            tensor, or if processes read different streams.

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
        """Check the settings and prepare to read the stream in windows; nothing is read yet."""
        if isinstance(dataset, Iterator):
            raise DataError(
                f"a {type(dataset).__name__} can be read only once, but every epoch reads it "
                "again: pass a restartable iterable."
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
            per_device_batch_size=per_device_batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            pad_to_window=pad_to_window,
            canonical_micro_batch=canonical_micro_batch,
        )
        self._plan_with(
            planner,
            by_length=length_of is not None,
            longest=None,
            max_tokens=max_tokens_per_micro_batch,
        )
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.reader = WindowReader(
            dataset=dataset,
            fetcher=Fetcher(None, collate_fn),
            splitter=self.splitter,
            shuffle_buffer_size=shuffle_buffer_size,
            length_of=length_of or sample_length,
            drop_last_window=drop_last_window,
            state=self.state,
        )

    def trial_samples(self, count: int) -> list[Any]:
        """Return up to `count` of the first samples of the stream, for the trial of the loss:
        evenly spaced after sorting by length, with the shortest and the longest.
        """
        with preserved_random_states():
            stream = numbered_samples(self.reader.dataset, self.seed, self.epoch)
            samples = [sample for _, sample in islice(stream, NUM_FOR_TRIAL)]
        samples.sort(key=self.reader.length_of)
        chosen = np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int)
        return [copy.copy(samples[i]) for i in chosen]

    def __iter__(self) -> Iterator[Window]:
        """Yield the remaining windows of the current pass over the stream.

        After the last one, the loader is set to the next epoch.

        Raises:
            DataError: See the class.
        """
        reader = replace(
            self.reader,
            splitter=self.splitter,
            epoch=self.epoch,
            num_consumed=self.num_consumed,
        )
        for request, samples, batches in load_items(
            reader, self.num_workers, self.accelerator.device
        ):
            self._check_same_stream(request.index, samples)
            self.num_consumed += 1
            window = Window(
                request=request,
                fetcher=reader.fetcher.holding(samples),
                batches=batches,
                state=self.state,
                replan=self.splitter.replan,
            )
            del request, samples, batches  # the caller alone keeps the window in memory
            yield window
            del window
        self._check_same_stream(-1, HeldSamples([]))
        self.set_epoch(self.epoch + 1)

    def _check_same_stream(self, index: int, samples: HeldSamples) -> None:
        """Check, in one small all-gather, that all processes read the same samples in the window
        with this index (-1: the end of the stream).
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
                f"process {process}: {num_samples:.0f} samples, digest {digest:.0f}"
                for process, (_, _, num_samples, digest) in enumerate(rows)
            )
            raise DataError(
                f"the processes read different streams: window {self.num_consumed} of epoch "
                f"{self.epoch} differs ({listed}). Every process must read the whole stream: do "
                "not split it by process, and fix the seed of its own shuffle."
            )

    def _identity(self) -> dict[str, int]:
        """Return the settings of this loader of windows that determine the order of samples, to
        compare with those of a saved position.
        """
        return {**super()._identity(), "shuffle_buffer_size": self.reader.shuffle_buffer_size}
