"""Fetches and collates the samples of windows, in the main process or in DataLoader workers.

Random transforms and collate functions draw from generators that are seeded from the request.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_ga.draws.generators import (
    moved_generators,
    preserved_random_states,
    random_states,
    seed_generators,
)
from hf_ga.draws.hashing import Purpose, fold_in, fold_in_each
from hf_ga.errors import UnkeyedRandomness
from hf_ga.loading.batches import as_batch, equal_batches, take_rows
from hf_ga.loading.entries import Entries, put_together
from hf_ga.order.chunks import ChunkTree
from hf_ga.order.length_plan import Computed

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class WindowRequest:
    """The plan of one window: what a worker needs to fetch and collate this process's samples.

    Attributes:
        seed: Seed of the run.
        epoch: Epoch of the window (0-based).
        index: Index of the window in its epoch (0-based).
        positions: Positions of the window's samples in the order of the epoch: int64, shape
            (samples,).
        sample_ids: Ids of the window's samples in the dataset: int64, shape (samples,).
        micro_batches: For each micro-batch of this process, the offsets of its samples in the
            window.
        pad_to_window: Whether all micro-batches are padded to the longest sample of the window.
        max_micro_batches: Maximum number of micro-batches of any process in this window.
        lengths: Number of tokens of each sample, if the window was planned by them (`ByLength`).
            None if the micro-batches were chosen in another way.
        chunk_tree: For same bits, the tree over the chunks of the window; every micro-batch is one
            chunk. None otherwise.
        computed: Which tokens the model computes, as the plan takes for granted.
        max_tokens: Maximum number of real tokens of a micro-batch in all such plans of a run. None:
            unknown.
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
    chunk_tree: ChunkTree | None = None
    computed: Computed = Computed.PADDED
    max_tokens: int | None = None


class Fetcher:
    """Fetches and collates the samples of windows, by `fetcher[request]`.

    Runs in DataLoader workers or in the main process. The global random generators are seeded from
    the request, so that random transforms and collate functions give the same batches anywhere.

    Args:
        dataset: Any dataset with integer indexing.
        collate_fn: A function from a list of samples to a batch, a dict of the model's arguments.
    """

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        """Store the dataset and the collate function of the windows; nothing is fetched yet."""
        self.dataset = dataset
        self.collate_fn = collate_fn
        # Whether dataset and collate function gave the same batches twice, for the first window.
        self.is_repeatable = False
        # Whether the collate function draws for several samples only. None until that is tried.
        self._mixes_samples: bool | None = None
        # Which rows of a batch belong to which sample. None until that is first needed.
        self.entries: Entries | None = None

    def __getitem__(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Return the collated micro-batches of this process for a window.

        The first window is collated twice, to check that dataset and collate function are
        repeatable. The states of the global random generators are restored.

        Raises:
            UnkeyedRandomness: If the two results differ.
        """
        with preserved_random_states():
            batches = self._collate(request)
            if not self.is_repeatable and not equal_batches(batches, self._collate(request)):
                raise UnkeyedRandomness(
                    "the dataset or the collate function gave two different batches for the same "
                    "samples and seeds: it draws from its own generator, so the split of a window "
                    "would change its result. Let it draw from torch's, numpy's or Python's global "
                    "generator, which are seeded for it: omit its seed or generator argument."
                )
        self.is_repeatable = True
        return batches

    def holding(self, samples: Any) -> "Fetcher":
        """Return a fetcher for the samples of one window of a stream, which its reader, perhaps in
        a worker, has already collated.
        """
        self.is_repeatable = True
        fetcher = copy.copy(self)
        fetcher.dataset = samples
        return fetcher

    def offsets(self, request: WindowRequest) -> np.ndarray:
        """Return the offsets of those samples of a window that this process can fetch: all of them.

        A subclass may return fewer.
        """
        return np.arange(len(request.positions))

    def samples(self, request: WindowRequest, offsets: np.ndarray) -> list[Any]:
        """Fetch some samples of a window from the dataset.

        The global random generators are seeded with (seed, epoch, position) for each sample, so
        random transforms do not depend on the split. The caller restores their states.

        Args:
            request: The plan of the window.
            offsets: Offsets in the window of the samples to fetch.
        """
        key_of_epoch = fold_in(Purpose.SAMPLE, request.seed, request.epoch)
        keys = fold_in_each(key_of_epoch, request.positions[offsets]).tolist()
        sample_ids = request.sample_ids[offsets].tolist()
        samples = []
        for key, sample_id in zip(keys, sample_ids, strict=True):
            seed_generators(key)
            samples.append(self.dataset[sample_id])
        return samples

    def has_random_collate(self, request: WindowRequest) -> bool:
        """Whether the collate function draws random numbers, tried on this process's samples of a
        window.
        """
        with preserved_random_states():
            return self._collate_separately(request) is None

    def _collate(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Collate the micro-batches of this process separately; split them from the collated window
        if they are padded to its longest sample, or if the collate function is random.
        """
        if not request.pad_to_window:
            batches = self._collate_separately(request)
            if batches is not None:
                return batches
        return self._collate_window_and_split(request)

    def _collate_separately(self, request: WindowRequest) -> list[dict[str, Any]] | None:
        """Collate each micro-batch separately. None if the collate function draws random numbers,
        as its result would then depend on the split of the window.
        """
        samples = [self.samples(request, offsets) for offsets in request.micro_batches]
        states_before = random_states()
        batches = [as_batch(self.collate_fn(of_micro_batch)) for of_micro_batch in samples]
        if moved_generators(states_before):
            return None
        are_single = bool(samples) and all(len(of_micro_batch) == 1 for of_micro_batch in samples)
        return None if are_single and self._mixes(request) else batches

    def _mixes(self, request: WindowRequest) -> bool:
        """Whether the collate function draws random numbers for two samples of a window: one that
        permutes or mixes them draws none for a single one. Tried once.
        """
        offsets = self.offsets(request)[:2]
        if self._mixes_samples is None and len(offsets) == 2:
            samples = self.samples(request, offsets)
            states_before = random_states()
            with suppress(Exception):  # samples that cannot be collated together
                self.collate_fn(samples)
            self._mixes_samples = moved_generators(states_before)
        return bool(self._mixes_samples)

    def sorts(self, request: WindowRequest) -> bool:
        """Whether the collate function puts samples in an order of its own."""
        with preserved_random_states(), suppress(Exception):  # as the window cannot be split
            self._inspect(self.samples(request, self.offsets(request)))
        return self.entries is not None and self.entries.sorts

    def _inspect(self, samples: Sequence[Any]) -> None:
        """Find out once how the entries of a collated batch depend on its samples."""
        if self.entries is None:
            entries = Entries(self.collate_fn, samples[0])
            entries.inspect_samples(samples)
            self.entries = entries

    def _collate_window_and_split(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Collate the window into one batch, and take the rows of each micro-batch: all have one
        padded length, and a random collate function draws the same numbers for any split.
        """
        samples = self.samples(request, np.arange(len(request.positions)))
        self._inspect(samples)
        counts = [self.entries.counts_of(samples, offsets) for offsets in request.micro_batches]
        seed_generators(fold_in(Purpose.COLLATE, request.seed, request.epoch, request.index))
        batch = as_batch(self.collate_fn(samples))
        batch = self.entries.split(batch, samples)
        return [
            put_together(take_rows(batch, offsets, self.entries.of_samples)) | of_micro_batch
            for offsets, of_micro_batch in zip(request.micro_batches, counts, strict=True)
        ]
