"""WindowLoader: dataset + order + plan -> windows, with workers that prefetch the next ones."""

from collections.abc import Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch.utils.data import IterableDataset

from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.base_loader import BaseLoader
from hf_ga.exact.fetch import Collate, Fetcher, WindowRequest
from hf_ga.exact.lengths import find_lengths
from hf_ga.exact.order import epoch_order
from hf_ga.exact.plan import Planner
from hf_ga.exact.window import Window
from hf_ga.exact.workers import load_items


class WindowLoader(BaseLoader):
    """Iterates over one epoch in windows; `set_epoch` chooses which.

    The windows do not depend on the layout.

    Args:
        dataset: Anything with `len` and integer indexing.
        collate_fn: List of samples -> keyword arguments of the model.
        accelerator: Gives the number of processes and `gradient_accumulation_steps`.
        per_device_batch_size: Maximum samples in one micro-batch.
        global_batch_size: Samples in a window over all processes. None: processes x
            per_device_batch_size x gradient accumulation steps.
        seed: Of the order and of everything drawn in training.
        shuffle: False visits 0, 1, 2, ...
        lengths: Tokens of each sample, shape (len(dataset),): windows are planned by them
            (`plan_by_length`), or by `planner`. None: they are taken from a `length` or `input_ids`
            column if there is one (`find_lengths`); without lengths, windows are split evenly by
            number.
        max_tokens_per_micro_batch: Maximum samples x padded width in one micro-batch, with lengths.
            None: what `per_device_batch_size` samples as long as the longest have: no more memory,
            fewer micro-batches.
        planner: Another way to split a window: `(lengths of the window, processes) -> Plan`. Its
            micro-batches are not changed.
        pad_to_window: Collate every micro-batch as wide as its window; a loss that needs it turns
            this on by itself.
        drop_last_window: Leave a short last window out.
        num_workers: Processes that prefetch windows; 0: none.
        canonical_micro_batch: Samples in one chunk: the window's gradient then has the same bits
            for any number of processes (not under FSDP) and any `per_device_batch_size`, which must
            be at least as large. Limits count for chunks.

    Raises:
        ConfigError: If sizes fit no layout, or a limit is below the longest sample.
        DataError: If the dataset is a stream or empty.

    Example:
        windows = WindowLoader(
            dataset, collate_fn, accelerator=accelerator, per_device_batch_size=8, seed=0
        )
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
        shuffle: bool = True,
        lengths: Sequence[int] | np.ndarray | None = None,
        max_tokens_per_micro_batch: int | None = None,
        planner: Planner | None = None,
        pad_to_window: bool = False,
        drop_last_window: bool = False,
        num_workers: int = 0,
        canonical_micro_batch: int | None = None,
    ) -> None:
        super().__init__(
            accelerator,
            per_device_batch_size,
            global_batch_size,
            seed,
            pad_to_window,
            canonical_micro_batch,
        )
        self.shuffle = shuffle
        self.drop_last_window = drop_last_window
        self.num_workers = num_workers
        self.num_samples = _checked_length(dataset, lengths)
        if not len(self):
            raise DataError(
                f"{self.num_samples} samples are fewer than one window of "
                f"{self.layout.window_size}: the dataset is empty, or drop_last_window leaves "
                "nothing of it. Use a smaller global batch, or keep the last window."
            )
        if lengths is None and planner is None:
            lengths = find_lengths(dataset, collate_fn)
        by_length = lengths is not None
        self.lengths = np.asarray(lengths) if by_length else np.ones(self.num_samples, np.int64)
        longest = int(self.lengths.max()) if by_length else None
        self.splitter = self._make_splitter(planner, by_length, longest, max_tokens_per_micro_batch)
        self.collate_fn = collate_fn
        self.fetcher = Fetcher(dataset, collate_fn)

    def __len__(self) -> int:
        """Count the windows in an epoch."""
        full, rest = divmod(self.num_samples, self.layout.window_size)
        return full + (rest > 0 and not self.drop_last_window)

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows of the current epoch that are not consumed yet; after the last one the
        next epoch begins.
        """
        requests, to_load = tee(self.requests())
        loaded = load_items(self.fetcher, self.num_workers, self.accelerator.device, to_load)
        for batches, request in zip(loaded, requests, strict=True):
            self.num_consumed += 1
            yield Window(request, self.fetcher, batches, self.state, self.splitter.padded)
        self.set_epoch(self.epoch + 1)

    def requests(self) -> Iterator[WindowRequest]:
        """Plan the windows of the current epoch that are not consumed yet."""
        order = self.order(self.epoch)
        size = self.layout.window_size
        for index in range(self.num_consumed, len(self)):
            ids = order[index * size : (index + 1) * size]
            yield self.splitter.request(
                self.epoch, index, ids, self.lengths[ids], self.state.pad_to_window
            )

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample ids of an epoch in the order in which they are visited."""
        return epoch_order(self.num_samples, self.seed, epoch, self.shuffle)

    def probe_samples(self, count: int) -> list[Any]:
        """Fetch about `count` samples from all over the dataset, for a proof."""
        position = WindowRequest(
            seed=self.seed,
            epoch=self.epoch,
            index=0,
            positions=np.empty(0, np.int64),
            sample_ids=np.empty(0, np.int64),
            micro_batches=[],
            pad_to_window=False,
        )
        return self.fetcher.probe_samples(position, count)

    def _identity(self) -> dict[str, int]:
        return {
            **super()._identity(),
            "num_samples": self.num_samples,
            "shuffle": int(self.shuffle),
        }


def _checked_length(dataset: Any, lengths: Any) -> int:
    """Return the length of a dataset.

    Raises:
        ConfigError: If there is not one length per sample.
        DataError: If the dataset has no length or no random access.
    """
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_both:
        raise DataError(
            f"a {type(dataset).__name__} has no length or no random access, but the order needs "
            "both: load the dataset without streaming, or take a StreamLoader."
        )
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigError(
            f"lengths must have one entry per sample: {len(lengths)} lengths, {len(dataset)} "
            "samples."
        )
    return len(dataset)
