"""Makes the windows of a user's DataLoader: its samples, in the order of its sampler."""

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hf_ga.accelerator.named_entries import DictCollator
from hf_ga.draws.generators import preserved_random_states, seed_generators
from hf_ga.draws.hashing import Purpose, fold_in
from hf_ga.errors import ConfigError
from hf_ga.loading.lengths import find_lengths
from hf_ga.loading.streams.stream_loader import StreamLoader
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.order.plan import plan_by_sizes
from hf_ga.parallel.processes import broadcast_from_main


def make_windows(
    accelerator: Any,
    *,
    prepared: DataLoader,
    original: DataLoader,
    collate: DictCollator,
    seed: int,
) -> WindowLoader | StreamLoader:
    """Make a loader of windows from a DataLoader that a user's loop prepares: the same samples, in
    the order of its sampler, grouped by optimizer step instead of by batch.

    With a `global_batch_size`, this sets the accelerator's gradient accumulation steps.

    Args:
        accelerator: The `hf_ga.Accelerator`.
        prepared: The DataLoader that Accelerate made of `original`.
        original: The DataLoader as the user made it.
        collate: The user's collate function, wrapped so that it returns dicts.
        seed: The seed of the order of samples; the main process's is used on all ranks.

    Returns:
        A `StreamLoader` for an iterable dataset, otherwise a `WindowLoader`.

    Raises:
        ConfigError: If windows cannot be made because of `dispatch_batches=True`, a
            `DistributedSampler`, or a batch sampler without a batch size.
    """
    dataset = original.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if isinstance(prepared, DataLoaderDispatcher) and not is_stream:
        raise ConfigError(
            "dispatch_batches=True reads the data on the main process only, but every process "
            "reads its own part of a window: leave dispatch_batches out."
        )
    batch_sampler = original if is_stream else original.batch_sampler
    batch_size = _batch_size_of(batch_sampler)
    if isinstance(original.sampler, DistributedSampler):
        raise ConfigError(
            "a DistributedSampler yields only a part of the samples on each process, but windows "
            "are made of all of them: leave it out, Accelerate (and hf_ga) distribute the samples."
        )
    micro_batch_size, window_size = _micro_batch_and_window_size(accelerator, batch_size)
    settings = {
        "accelerator": accelerator,
        "per_device_batch_size": micro_batch_size,
        "global_batch_size": window_size,
        "seed": broadcast_from_main(accelerator, seed),
        # As many micro-batches as Accelerate's loader has batches.
        "planner": partial(plan_by_sizes, sizes=[micro_batch_size]),
        "drop_last_window": bool(getattr(batch_sampler, "drop_last", False)),
        "num_workers": original.num_workers,
    }
    if is_stream:
        settings["num_workers"] = min(1, original.num_workers)  # a stream is read sequentially
        return StreamLoader(dataset, collate, shuffle_buffer_size=0, **settings)
    settings["lengths"] = find_lengths(dataset, collate) if len(dataset) else None
    windows = _make_window_loader(original, collate, settings)
    if accelerator.global_batch_size is not None:
        accelerator.set_accumulation_steps(windows.layout)
    return windows


def _batch_size_of(batch_sampler: Any) -> int:
    """Return the `batch_size` of a batch sampler, or of the DataLoader of an iterable dataset, if
    it is a positive int.
    """
    batch_size = getattr(batch_sampler, "batch_size", None)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"the {type(batch_sampler).__name__} has no batch_size, from which the window of "
            "an optimizer step follows: give the batch_sampler this attribute, or pass "
            "batch_size to the DataLoader."
        )
    return batch_size


def _micro_batch_and_window_size(accelerator: Any, batch_size: int) -> tuple[int, int]:
    """Return the samples in a micro-batch of one process, and in a window over all, from a
    DataLoader's batch size, which with `split_batches=True` is that of all processes together.
    """
    num_processes = accelerator.num_processes
    num_steps = accelerator.gradient_accumulation_steps
    micro_batch_size = batch_size
    window_size = batch_size * num_processes * num_steps
    if accelerator.split_batches:
        micro_batch_size = -(-batch_size // num_processes)  # rounded up
        window_size = batch_size * num_steps
    if accelerator.global_batch_size is not None:
        window_size = accelerator.global_batch_size
    return micro_batch_size, window_size


def _make_window_loader(
    original: DataLoader, collate: DictCollator, settings: dict[str, Any]
) -> WindowLoader:
    """Make a `WindowLoader` of a DataLoader: a shuffling one becomes one in hf_ga's own random
    order, a sequential one keeps the order, any other sampler or batch sampler is run itself.
    """
    has_default_batch_sampler = type(original.batch_sampler) is BatchSampler
    if has_default_batch_sampler and is_shuffling(original.sampler):
        return WindowLoader(original.dataset, collate, **settings)
    if has_default_batch_sampler and type(original.sampler) is SequentialSampler:
        return WindowLoader(original.dataset, collate, shuffle=False, **settings)
    return OrderedWindowLoader(
        original.dataset,
        collate,
        sampler=original.sampler if has_default_batch_sampler else original.batch_sampler,
        **settings,
    )


def is_shuffling(sampler: Any) -> bool:
    """Return whether the sampler of a DataLoader that a user prepares visits every sample once in a
    random order.

    Only torch's `RandomSampler` and Accelerate's `SeedableRandomSampler` are recognized, and not
    if they draw with replacement or draw fewer or more samples than the dataset has.
    """
    if type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class OrderedWindowLoader(WindowLoader):
    """A `WindowLoader` that visits the samples in the order of a torch sampler.

    Args:
        *args: See `WindowLoader`.
        sampler: A sampler, which yields sample ids, or a batch sampler, which yields lists of them.
            It may draw random numbers from the global generators, or from a torch generator in its
            attribute `generator`: both are seeded from (seed, epoch).
        **kwargs: See `WindowLoader`.

    Raises:
        ConfigError: If the sampler yields another order when it is run again for the same epoch.
    """

    def __init__(self, *args: Any, sampler: Any, **kwargs: Any) -> None:
        """Make the loader, and run the user's sampler for the first epoch to count its samples."""
        self.sampler = sampler
        self._cached_epoch: int | None = None  # the epoch of `_cached_ids`
        self._cached_ids = np.empty(0, np.int64)
        super().__init__(*args, **kwargs)
        self.num_samples = len(self._sample_ids(self.epoch))

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample ids of an epoch in the order of the user's sampler, int64.

        Raises:
            ConfigError: If their number differs from that of the first epoch, or if the sampler's
                order is not reproducible.
        """
        ids = self._sample_ids(epoch)
        if len(ids) != self.num_samples:
            raise ConfigError(
                f"the sampler yielded {self.num_samples} samples in one epoch and {len(ids)} in "
                f"epoch {epoch}: every epoch must have the same number of samples."
            )
        return ids

    def _sample_ids(self, epoch: int) -> np.ndarray:
        """Return, and cache, the sample ids of an epoch in the order of the main process's sampler.
        For the first epoch it is run twice, to check that its order is reproducible.
        """
        if self._cached_epoch == epoch:
            return self._cached_ids
        ids = self._run_sampler(epoch)
        is_first_epoch = self._cached_epoch is None
        if is_first_epoch and not np.array_equal(ids, self._run_sampler(epoch)):
            raise ConfigError(
                f"the sampler {type(self.sampler).__name__} draws from a generator of its own, "
                "so a resumed run would visit other samples: let it draw from torch's, numpy's "
                "or Python's global generator, or from its attribute `generator`."
            )
        self._cached_ids = broadcast_from_main(self.accelerator, ids)
        self._cached_epoch = epoch
        return self._cached_ids

    def _run_sampler(self, epoch: int) -> np.ndarray:
        """Run the user's sampler, and its own sampler, with all generators seeded from (seed,
        epoch), after `set_epoch`. Returns the ids, int64; lists of a batch sampler concatenated.
        """
        key = fold_in(Purpose.ORDER, self.seed, epoch)
        with preserved_random_states():
            seed_generators(key)
            for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
                if getattr(sampler, "generator", None) is not None:
                    sampler.generator.manual_seed(key & ((1 << 63) - 1))  # 63 bits fit an int64
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
            ids = list(self.sampler)
        if ids and isinstance(ids[0], list | tuple | torch.Tensor):
            ids = list(chain.from_iterable(ids))
        return np.array([int(sample_id) for sample_id in ids], np.int64)
