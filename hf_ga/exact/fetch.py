"""Samples -> collated micro-batches, in the main process or in workers; everything random is seeded
from the request.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.batches import Batch, as_batch, equal_batches, take_rows
from hf_ga.exact.chunks import ChunkTree
from hf_ga.exact.entries import Entries, put_together
from hf_ga.exact.generators import (
    moved_generators,
    preserved_random_states,
    random_states,
    seed_generators,
)
from hf_ga.exact.hashing import Purpose, fold_in

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class WindowRequest:
    """The plan of one window: all that a worker must know to make this process's micro-batches.

    Attributes:
        seed: Of the run.
        epoch: Of the window (0-based).
        index: Of the window in its epoch (0-based).
        positions: Of its samples in the order of the epoch: int64, shape (samples,).
        sample_ids: Of its samples: int64, shape (samples,).
        micro_batches: For each micro-batch of this process, the offsets of its samples in the
            window.
        pad_to_window: Whether all micro-batches are padded to one width.
        max_micro_batches: How many the process has that has most of them.
        lengths: Tokens of the samples, if the window was planned by them. None: the micro-batches
            are somebody's own.
        chunks: Of the window, if it is cut into chunks (same bits): each micro-batch is one.
    """

    seed: int
    epoch: int
    index: int
    positions: np.ndarray
    sample_ids: np.ndarray
    micro_batches: list[np.ndarray]
    pad_to_window: bool
    max_micro_batches: int = 0
    lengths: np.ndarray | None = None
    chunks: ChunkTree | None = None


class Fetcher:
    """Fetches and collates samples. Runs in the workers; everything random is seeded from the
    request.
    """

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.is_repeatable = False  # not known yet
        self.entries: Entries | None = None  # not known yet

    def __getitem__(self, request: WindowRequest) -> list[dict[str, Any]]:
        with preserved_random_states():
            batches = self._collated(request)
            if not self.is_repeatable and not equal_batches(batches, self._collated(request)):
                raise UnkeyedRandomness(
                    "the dataset or the collate function gave two different batches for the same "
                    "samples and seeds: it draws from its own generator, so the split of a window "
                    "would change its result. Let it draw from torch's, numpy's or Python's global "
                    "generator, which are seeded for it: leave its seed or generator argument out."
                )
        self.is_repeatable = True
        return batches

    def offsets(self, request: WindowRequest) -> np.ndarray:
        """Return the offsets of the samples of a window that can be collated here: all of them."""
        return np.arange(len(request.positions))

    def samples(self, request: WindowRequest, offsets: np.ndarray) -> list[Any]:
        """Fetch samples by their offsets. A random transform draws from generators seeded by (seed,
        epoch, position).
        """
        samples = []
        for position, sample_id in zip(
            request.positions[offsets], request.sample_ids[offsets], strict=True
        ):
            seed_generators(fold_in(Purpose.SAMPLE, request.seed, request.epoch, int(position)))
            samples.append(self.dataset[int(sample_id)])
        return samples

    def probe_samples(self, request: WindowRequest, count: int) -> list[Any]:
        """Fetch about `count` samples from all over the dataset, for a proof: one window's may be
        too few or too alike.
        """
        ids = np.unique(np.linspace(0, len(self.dataset) - 1, count).astype(np.int64))
        with preserved_random_states():
            return self.samples(
                replace(request, positions=ids, sample_ids=ids), np.arange(len(ids))
            )

    def _collated(self, request: WindowRequest) -> list[dict[str, Any]]:
        batches = None if request.pad_to_window else self._one_by_one(request)
        return self._cut_from_whole_window(request) if batches is None else batches

    def _one_by_one(self, request: WindowRequest) -> list[dict[str, Any]] | None:
        """Collate each micro-batch by itself.

        Returns None if the collate function drew random numbers: its result then depends on the
        split.
        """
        batches = []
        for offsets in request.micro_batches:
            samples = self.samples(request, offsets)
            before = random_states()
            batches.append(as_batch(self.collate_fn(samples)))
            if moved_generators(before):
                return None
        return batches

    def _cut_from_whole_window(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Collate the window at once and cut rows: one width for all, and random collators draw
        once, for any split.
        """
        samples = self.samples(request, np.arange(len(request.positions)))
        if self.entries is None:
            self.entries = Entries(self.collate_fn, samples[0])
            self.entries.look_at(samples)
        seed_generators(fold_in(Purpose.COLLATE, request.seed, request.epoch, request.index))
        batch = as_batch(self.collate_fn(samples))
        batch = self.entries.split(batch, samples)
        parts = (take_rows(batch, o, self.entries.of_samples) for o in request.micro_batches)
        return [put_together(part) for part in parts]


class BatchFetcher:
    """In place of a `Fetcher` where the samples of a window are collated already: cuts rows.

    Args:
        batch: Of all samples of the window, as `Entries.split` returns it.
        of_samples: Names of its entries that hold rows of samples.
    """

    def __init__(self, batch: Batch, of_samples: Collection[str]) -> None:
        self.batch = batch
        self.of_samples = of_samples

    def __getitem__(self, request: WindowRequest) -> list[dict[str, Any]]:
        parts = (take_rows(self.batch, rows, self.of_samples) for rows in request.micro_batches)
        return [put_together(part) for part in parts]
