"""WindowLoader: yields the windows of a map-style dataset, with workers that prefetch them."""

from collections.abc import Iterator, Sequence
from itertools import tee
from typing import Any

import numpy as np
from accelerate import Accelerator
from torch.utils.data import IterableDataset

from hf_ga.draws.generators import preserved_random_states
from hf_ga.errors import ConfigError, DataError
from hf_ga.loading.base_loader import BaseLoader
from hf_ga.loading.fetch import Collate, Fetcher, WindowRequest
from hf_ga.loading.lengths import find_lengths
from hf_ga.loading.window import Window
from hf_ga.loading.workers import load_items
from hf_ga.order.order import epoch_order
from hf_ga.order.plan import Planner


class WindowLoader(BaseLoader):
    """Yields the windows of a map-style dataset: the samples of each optimizer step.

    Iterating yields the remaining windows of the current epoch (see `set_epoch`). Which samples a
    window holds does not depend on the number of processes or the size of micro-batches.

    Args:
        dataset: Anything with `len` and integer indexing.
        collate_fn: A function from a list of samples to a dict of the model's keyword arguments.
        accelerator: Its number of processes and `gradient_accumulation_steps` are used.
        per_device_batch_size: Maximum number of samples in one micro-batch.
        global_batch_size: Number of samples in a window over all processes. None: processes x
            per_device_batch_size x gradient accumulation steps.
        seed: Seed of the order and of all random numbers that are drawn in training.
        shuffle: Whether to shuffle. If False, the order is 0, 1, 2, ...
        lengths: Number of tokens of each sample, shape (len(dataset),). Windows are planned by
            length (`ByLength`), or by `planner`. None: the lengths are read from a `length`
            or `input_ids` column, if there is one (`find_lengths`). Without lengths, windows are
            split evenly by number of samples.
        max_tokens_per_micro_batch: Maximum number of samples x padded length in one micro-batch, if
            windows are planned by length. None: as many as `per_device_batch_size` samples of the
            length of the longest sample. That needs no more memory, and fewer micro-batches.
        planner: Another function to split a window: (lengths of its samples, number of processes)
            -> `Plan`. Its micro-batches are not changed.
        pad_to_window: Whether to pad all micro-batches to the longest sample of their window. It is
            enabled automatically if the trial of the loss finds that the loss needs it.
        drop_last_window: Whether to drop the last window of the epoch if it is short.
        num_workers: Number of worker processes that prefetch windows. 0: load in this process.
        canonical_micro_batch: For same bits: windows are split into chunks of this many samples,
            each computed in one forward. The window's gradient then has the same bits for any
            number of processes (not under FSDP) and any `per_device_batch_size`, which must be at
            least as large. Token limits apply to chunks.

    Raises:
        ConfigError: If the sizes contradict each other, or the token limit is below the longest
            sample.
        DataError: If the dataset is a stream, or is too small for a single window.

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
        """Check the dataset, find the lengths of its samples, and choose how windows are split."""
        super().__init__(
            accelerator,
            per_device_batch_size=per_device_batch_size,
            global_batch_size=global_batch_size,
            seed=seed,
            pad_to_window=pad_to_window,
            canonical_micro_batch=canonical_micro_batch,
        )
        self.shuffle = shuffle
        self.drop_last_window = drop_last_window
        self.num_workers = num_workers
        self.num_samples = _checked_length(dataset, lengths)
        if not len(self):
            raise DataError(
                f"{self.num_samples} samples are fewer than one window of "
                f"{self.layout.window_size}: the dataset is empty, or drop_last_window drops all "
                "of it. Use a smaller global batch, or keep the last window."
            )
        if lengths is None and planner is None:
            lengths = find_lengths(dataset, collate_fn)
        if lengths is not None:
            self.lengths = np.asarray(lengths)
            longest = int(self.lengths.max())
        else:
            self.lengths = np.ones(self.num_samples, np.int64)
            longest = None
        self._plan_with(
            planner,
            by_length=lengths is not None,
            longest=longest,
            max_tokens=max_tokens_per_micro_batch,
        )
        self.collate_fn = collate_fn
        self.fetcher = Fetcher(dataset, collate_fn)

    def __len__(self) -> int:
        """Return the number of windows (optimizer steps) in an epoch."""
        full, rest = divmod(self.num_samples, self.layout.window_size)
        return full + (rest > 0 and not self.drop_last_window)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of an epoch on each process, if windows are not planned by
        length: the same on all of them.
        """
        layout = self.layout
        num_full_windows, num_rest = divmod(self.num_samples, layout.window_size)
        num_last = 0  # of a short last window
        if num_rest and not self.drop_last_window:
            samples_of_all_processes = layout.micro_batch_size * layout.num_processes
            num_last = -(-num_rest // samples_of_all_processes)  # rounded up
        return num_full_windows * layout.accumulation_steps + num_last

    def __iter__(self) -> Iterator[Window]:
        """Yield the windows of the current epoch that are not consumed yet, with this process's
        collated micro-batches.

        After the last one, the loader is set to the next epoch.
        """
        # The workers read their copy of the requests ahead, to prefetch windows.
        requests, requests_to_load = tee(self.requests())
        device = self.accelerator.device
        loaded = load_items(self.fetcher, self.num_workers, device, sampler=requests_to_load)
        for batches, request in zip(loaded, requests, strict=True):
            window = Window(
                request=request,
                fetcher=self.fetcher,
                batches=batches,
                state=self.state,
                replan=self.splitter.replan,
            )
            self.num_consumed += 1
            yield window
        self.set_epoch(self.epoch + 1)

    def requests(self) -> Iterator[WindowRequest]:
        """Yield the plans of the windows of the current epoch that are not consumed yet."""
        order = self.order(self.epoch)
        size = self.layout.window_size
        for index in range(self.num_consumed, len(self)):
            ids = order[index * size : (index + 1) * size]
            yield self.splitter.make_request(
                self.epoch,
                index,
                ids,
                self.lengths[ids],
                pad_to_window=self.state.pad_to_window,
                computed=self.state.computed,
            )

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample ids of an epoch (0-based) in the order in which windows take them."""
        return epoch_order(self.num_samples, self.seed, epoch, self.shuffle)

    def trial_samples(self, count: int) -> list[Any]:
        """Fetch about `count` samples of the dataset, evenly spaced, for the trial of the loss.

        The samples of a single window may be too few or too similar for a trial.
        """
        ids = np.unique(np.linspace(0, len(self.fetcher.dataset) - 1, count).astype(np.int64))
        request = WindowRequest(
            seed=self.seed,
            epoch=self.epoch,
            index=0,
            positions=ids,
            sample_ids=ids,
            micro_batches=[],
            pad_to_window=False,
        )
        with preserved_random_states():
            return self.fetcher.samples(request, np.arange(len(ids)))

    def _identity(self) -> dict[str, int]:
        """Return the settings of this loader of windows that determine the order of samples, to
        compare with those of a saved position.
        """
        return {
            **super()._identity(),
            "num_samples": self.num_samples,
            "shuffle": int(self.shuffle),
        }


def _checked_length(dataset: Any, lengths: Any) -> int:
    """Return the number of samples of a dataset, after checking that it fits a `WindowLoader`: it
    has random access, and one length per sample if there are any.
    """
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        raise DataError(
            f"a {type(dataset).__name__} has no length or no random access, but the order needs "
            "both: load the dataset without streaming, or use a StreamLoader."
        )
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigError(
            f"lengths must have one entry per sample: {len(lengths)} lengths, {len(dataset)} "
            "samples."
        )
    return len(dataset)
