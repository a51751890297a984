"""The windows of a user's DataLoader: its samples, in the order of its sampler."""

from collections.abc import Callable
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

from hf_ga.accelerator.named_entries import NamedEntries
from hf_ga.errors import ConfigError
from hf_ga.exact.generators import preserved_random_states, seed_generators
from hf_ga.exact.hashing import Purpose, fold_in
from hf_ga.exact.lengths import find_lengths
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.processes import broadcast_from_main


def make_windows(
    accelerator: Any, prepared: DataLoader, given: DataLoader, collate: NamedEntries, seed: int
) -> WindowLoader | StreamLoader:
    """Make the windows of a user's loader: its samples, in the order of its sampler.

    Args:
        accelerator: The `hf_ga.Accelerator`.
        prepared: The loader that Accelerate made.
        given: The loader as the user made it.
        collate: The user's collate function with named entries.
        seed: Of the order.

    Raises:
        ConfigError: If the loader reads its data in a way that windows cannot be made of.
    """
    dataset = given.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if isinstance(prepared, DataLoaderDispatcher) and not is_stream:
        raise ConfigError(
            "dispatch_batches=True reads the data on the main process only, but every process "
            "reads its own part of a window: leave dispatch_batches out."
        )
    batch_sampler = given if is_stream else given.batch_sampler
    batch_size = _batch_size_of(batch_sampler)
    if isinstance(given.sampler, DistributedSampler):
        raise ConfigError(
            "a DistributedSampler shows each process a part of the samples only, but windows "
            "are made of all of them: leave it out, Accelerate (and hf_ga) distribute them."
        )
    micro_batch_size, window_size = _sizes(accelerator, batch_size)
    settings = {
        "accelerator": accelerator,
        "per_device_batch_size": micro_batch_size,
        "global_batch_size": window_size,
        "seed": broadcast_from_main(accelerator, seed),
        "planner": partial(plan_by_sizes, sizes=[micro_batch_size]),  # as many as Accelerate's
        "drop_last_window": bool(getattr(batch_sampler, "drop_last", False)),
        "num_workers": given.num_workers,
    }
    if is_stream:
        settings["num_workers"] = min(1, given.num_workers)  # a stream is read in order
        return StreamLoader(dataset, collate, shuffle_buffer_size=0, **settings)
    settings["lengths"] = find_lengths(dataset, collate) if len(dataset) else None
    windows = _windows_in_order(given, collate, accelerator, settings)
    if accelerator.global_batch_size is not None:
        accelerator.set_accumulation_steps(windows.layout)
    return windows


def _batch_size_of(batch_sampler: Any) -> int:
    """Return the batch size of a sampler.

    Raises:
        ConfigError: If it has none.
    """
    batch_size = getattr(batch_sampler, "batch_size", None)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"the {type(batch_sampler).__name__} has no batch_size, from which the window of "
            "an optimizer step follows: give the batch_sampler this attribute, or pass "
            "batch_size to the DataLoader."
        )
    return batch_size


def _sizes(accelerator: Any, batch_size: int) -> tuple[int, int]:
    """Return the samples in a micro-batch of one process, and in a window."""
    num_processes = accelerator.num_processes
    num_steps = accelerator.gradient_accumulation_steps
    micro_batch_size = batch_size
    window_size = batch_size * num_processes * num_steps
    if accelerator.split_batches:  # the DataLoader's batch is that of all processes
        micro_batch_size = -(-batch_size // num_processes)
        window_size = batch_size * num_steps
    if accelerator.global_batch_size is not None:
        window_size = accelerator.global_batch_size
    return micro_batch_size, window_size


def _windows_in_order(
    given: DataLoader, collate: NamedEntries, accelerator: Any, settings: dict[str, Any]
) -> WindowLoader:
    """Make windows in the order of the user's loader: shuffled, as the dataset is, or its
    sampler's.
    """
    has_plain_batches = type(given.batch_sampler) is BatchSampler
    if has_plain_batches and is_shuffle(given.sampler):
        return WindowLoader(given.dataset, collate, **settings)
    if has_plain_batches and type(given.sampler) is SequentialSampler:
        return WindowLoader(given.dataset, collate, shuffle=False, **settings)
    return OrderedWindowLoader(
        given.dataset,
        collate,
        sampler=given.sampler if has_plain_batches else given.batch_sampler,
        share=partial(broadcast_from_main, accelerator),
        **settings,
    )


def is_shuffle(sampler: Any) -> bool:
    """Whether a sampler visits every sample once in a random order."""
    if type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


class OrderedWindowLoader(WindowLoader):
    """A `WindowLoader` in the order of a torch sampler.

    Args:
        sampler: Yields sample ids, or lists of them. It may draw from the global generators or
            from a torch generator of its own: both are seeded from (seed, epoch).
        share: Gives the main process's value to all ranks.
        Others: See `WindowLoader`.

    Raises:
        ConfigError: If the sampler gives another order when it is asked again.
    """

    def __init__(
        self, *args: Any, sampler: Any, share: Callable[[Any], Any], **kwargs: Any
    ) -> None:
        self.sampler = sampler
        self.share = share
        self._epoch_of_ids: int | None = None
        self._known_ids = np.empty(0, np.int64)
        super().__init__(*args, **kwargs)
        self.num_samples = len(self._ids(self.epoch))

    def order(self, epoch: int) -> np.ndarray:
        ids = self._ids(epoch)
        if len(ids) != self.num_samples:
            raise ConfigError(
                f"the sampler gave {self.num_samples} samples in one epoch and {len(ids)} in "
                f"epoch {epoch}: every epoch must have as many."
            )
        return ids

    def _ids(self, epoch: int) -> np.ndarray:
        """Return the sample ids of an epoch in the sampler's order. Those of the last epoch are
        kept.

        Raises:
            ConfigError: If the sampler gives another order when it is asked again.
        """
        if self._epoch_of_ids == epoch:
            return self._known_ids
        ids = self._draw(epoch)
        is_first_time = self._epoch_of_ids is None
        if is_first_time and not np.array_equal(ids, self._draw(epoch)):
            raise ConfigError(
                f"the sampler {type(self.sampler).__name__} draws from a generator of its own, "
                "so a resumed run would visit other samples: let it draw from torch's, numpy's "
                "or Python's global generator, or from its attribute `generator`."
            )
        self._known_ids = self.share(ids)
        self._epoch_of_ids = epoch
        return self._known_ids

    def _draw(self, epoch: int) -> np.ndarray:
        """Run the sampler for an epoch. What it yields is a function of (seed, epoch)."""
        key = fold_in(Purpose.ORDER, self.seed, epoch)
        with preserved_random_states():
            seed_generators(key)
            for part in (self.sampler, getattr(self.sampler, "sampler", None)):
                if getattr(part, "generator", None) is not None:
                    part.generator.manual_seed(key & ((1 << 63) - 1))
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            ids = list(self.sampler)
        if ids and isinstance(ids[0], list | tuple | torch.Tensor):
            ids = list(chain.from_iterable(ids))
        return np.array([int(i) for i in ids], np.int64)
