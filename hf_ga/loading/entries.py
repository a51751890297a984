"""Which rows of a collated batch's entries belong to which of its samples.

Most entries have one row per sample. Ragged entries have the rows of all samples one after the
other, a different number for each sample: the patches of all images (Qwen-VL), or one image of some
samples (LLaVA). How many rows a sample has is found by collating it alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ga.draws.generators import (
    moved_generators,
    preserved_random_states,
    random_states,
    seed_generators,
)
from hf_ga.errors import DataError
from hf_ga.loading.batches import RowsPerSample, as_batch, equal_batches, shape_of, take_rows
from hf_ga.model.forward import Batch

# Entries whose rows losses count as targets.
TARGETS = ("labels", "start_positions", "end_positions")


ABSENT = object()  # stands for an entry that is missing where a sample is collated alone


class Entries:
    """Finds out how the entries of a collated batch (its tensors by name) depend on its samples, so
    that the batch of a window can be split into micro-batches.

    An entry is ragged if it does not have exactly one row for each sample, like the patches of all
    images. Ragged entries are split by sample.

    Args:
        collate_fn: List of samples -> batch.
        sample: Any sample. Batches of 2 and 3 copies show which entries grow with the number of
            samples.

    Attributes:
        of_samples: Names of the entries that hold rows of samples. All samples share the others.
        ragged: Names of the ragged ones among them.
        counts: Names of shared entries that depend on which samples share them, such as a number of
            targets.
        draws: Whether the collate function draws random numbers.
        sorts: Whether it puts samples in an order of its own, as far as is known.

    Raises:
        DataError: If a batch cannot be split into samples: no entry has one row per sample, or an
            entry grows in another dim than the first.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sample: Any) -> None:
        """Collate 2 and 3 copies of a sample, and record which entries of the batch grow with the
        number of samples.
        """
        self.collate_fn = collate_fn
        self.of_samples: set[str] = set()
        self.ragged: set[str] = set()
        self.counts: set[str] = set()
        self.sorts = False
        self._num_shared_rows: dict[str, int] = {}  # of entries that do not grow with the samples
        with preserved_random_states():
            seed_generators(0)
            before = random_states()
            two = self._collate([sample] * 2)
            self.draws = bool(moved_generators(before))
            seed_generators(0)
            three = self._collate([sample] * 3)
        for name in two:
            self._find_growth(name, two[name], three[name])
        for name, value in two.items():
            if isinstance(value, Mapping):
                raise DataError(
                    f"the collate function's {name!r} is a nested dict: put its tensors at the "
                    "top level."
                )
        self._check(two)

    def _find_growth(self, name: str, two: Any, three: Any) -> None:
        """Record whether an entry of a collated batch is shared by all samples, has one row per
        sample, or another number of rows (ragged), from its values for two and three equal samples.
        """
        shape_of_two = shape_of(two)
        shape_of_three = shape_of(three)
        if shape_of_two == shape_of_three:
            self._num_shared_rows[name] = num_rows(two)
            return
        rows_per_sample = num_rows(three) - num_rows(two)
        row = shape_of_two[1:]
        grows_evenly = shape_of_two == (2 * rows_per_sample, *row) and shape_of_three == (
            3 * rows_per_sample,
            *row,
        )
        if not grows_evenly:
            raise DataError(
                f"the collate function's {name!r} has shape {shape_of_two} for 2 samples and "
                f"{shape_of_three} for 3: every tensor needs its samples in the first dim, one row "
                "per sample."
            )
        self.of_samples.add(name)
        if rows_per_sample != 1:
            self.ragged.add(name)

    def inspect_samples(self, samples: Sequence[Any]) -> None:
        """Record which entries of the batch are counts. Collate each of these samples alone, and
        record which are ragged: do not have one row per sample.

        Ragged ones are not recorded if the collate function draws random numbers: one that mixes
        samples may need several.
        """
        self._find_counts(samples)
        if self.draws:
            return
        with preserved_random_states():
            batches_of_one = [self._collate([sample]) for sample in samples]
        for batch in batches_of_one:
            self._record_row_counts(batch, 1)
        self._record_missing(batches_of_one)
        self._find_order(samples)

    def counts_of(self, samples: Sequence[Any], offsets: Sequence[int]) -> dict[str, Any]:
        """Return the counts in the batch of some of the samples of a window.

        Raises:
            DataError: If they cannot be known, as the collate function draws random numbers.
        """
        if not self.counts or len(offsets) == len(samples):
            return {}
        if self.draws:
            raise DataError(
                f"the collate function draws random numbers, so it is called for a whole window, "
                f"but its {min(self.counts)!r} is one value that depends on the samples, and would "
                "be that of the window in each micro-batch: compute it in the loop, or return a "
                "value for each sample."
            )
        batch = self._collate([samples[offset] for offset in offsets])
        return {name: batch[name] for name in self.counts}

    def split(self, batch: Batch, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a collated batch in which each ragged entry (one without exactly one row per
        sample) is split into the rows of each sample (`RowsPerSample`).

        Afterwards the batch can be split into micro-batches. Also records entries that turn out to
        be ragged.

        Args:
            batch: The batch that the collate function returned.
            samples: The samples that it was called with.

        Raises:
            DataError: If the rows of a sample differ from those of the sample collated alone, if
                labels are ragged, or if all entries are.
        """
        self._record_row_counts(batch, len(samples))
        if not self.ragged:
            return dict(batch)
        with preserved_random_states():
            batches_of_one = [self._collate([sample]) for sample in samples]
        for batch_of_one in batches_of_one:
            self._record_row_counts(batch_of_one, 1)
        self._record_missing([*batches_of_one, batch])
        self._check(batch)
        result = dict(batch)
        for name in self.ragged:
            alone = [batch_of_one.get(name, ABSENT) for batch_of_one in batches_of_one]
            result[name] = self._split_entry(name, batch.get(name), alone)
        return result

    def _find_counts(self, samples: Sequence[Any]) -> None:
        """Record the shared entries that have another value if each sample is there twice."""
        if not self._num_shared_rows:
            return
        batches = []
        with preserved_random_states():
            for repeated in (samples, [*samples, *samples]):
                seed_generators(0)
                batches.append(self._collate(repeated))
        once, twice = batches
        for name in self._num_shared_rows:
            if name in once and not equal_batches(once[name], twice.get(name)):
                self.counts.add(name)

    def _find_order(self, samples: Sequence[Any]) -> None:
        """Record whether samples in reversed order are not the rows of a batch in that order."""
        names = self.of_samples - self.ragged
        last_first = np.arange(len(samples))[::-1].copy()
        with preserved_random_states():
            batch = self._collate(samples)
            rows = take_rows(self._collate(samples[::-1]), last_first, names)
        self.sorts = not all(equal_batches(batch[name], rows[name]) for name in names)

    def _split_entry(self, name: str, value: Any, alone: list[Any]) -> RowsPerSample:
        """Split a ragged entry of a collated batch into the rows of each sample, which must be
        those of the sample collated alone.
        """
        row_counts = [num_rows(each) for each in alone]
        if sum(row_counts) != num_rows(value):
            raise DataError(
                f"the collate function's {name!r} has {num_rows(value)} rows for {len(alone)} "
                f"samples, which have {sum(row_counts)} rows when each is collated alone, so a "
                "batch cannot be split into samples: return one row per sample, or the rows of one "
                "sample after those of another."
            )
        rows_per_sample = RowsPerSample()
        start = 0
        for number, rows_alone in zip(row_counts, alone, strict=True):
            rows = value[start : start + number] if number else rows_alone
            start += number
            is_comparable = number and not self.draws and shape_of(rows) == shape_of(rows_alone)
            if is_comparable and not equal_batches(rows, rows_alone):
                raise DataError(
                    f"the collate function's {name!r} has several rows for each sample, and those "
                    "of one sample are not consecutive (torch.cat([x, x])): let the model repeat "
                    "its inputs, with x.repeat_interleave(2, dim=0)."
                )
            rows_per_sample.append(rows)
        return rows_per_sample

    def _record_row_counts(self, batch: Batch, num_samples: int) -> None:
        """Record entries of a batch as ragged that do not have one row per sample, also one that
        was empty before, so that all samples seemed to share it, and has rows now.
        """
        for name, value in batch.items():
            number = num_rows(value)
            if name in self.of_samples:
                if number != num_samples:
                    self.ragged.add(name)
            elif number and not self._num_shared_rows.get(name):
                self.of_samples.add(name)
                self.ragged.add(name)

    def _record_missing(self, batches: Sequence[Batch]) -> None:
        """Record entries of collated batches as ragged (without exactly one row per sample) if they
        are missing in some of these batches.
        """
        for name in self.of_samples:
            if any(name not in batch for batch in batches):
                self.ragged.add(name)

    def _check(self, batch: Batch) -> None:
        """Check that a collated batch can be split into micro-batches: at least one of its entries
        has one row per sample, and all labels have.
        """
        ragged_targets = [name for name in TARGETS if name in self.ragged]
        if ragged_targets:
            raise DataError(
                f"the collate function's {ragged_targets[0]!r} does not have one row for each "
                "sample, so the targets of a sample cannot be counted: return one row per sample. "
                "If the collate function repeats its samples, let the model repeat its inputs "
                "instead, with x.repeat_interleave(2, dim=0)."
            )
        if not self.of_samples - self.ragged:
            raise DataError(
                f"nothing that the collate function returns ({', '.join(batch)}) has one row per "
                "sample: let it return tensors that have. If it puts two rows of each sample into "
                "one tensor (images of instances and of classes), let it return two tensors, and "
                "call the model for each."
            )

    def _collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collate shallow copies of samples, as the collate function may remove items from them."""
        return as_batch(self.collate_fn([copy.copy(sample) for sample in samples]))


def put_together(batch: Batch) -> dict[str, Any]:
    """Concatenate the entries of a micro-batch that were split by sample (`RowsPerSample`), so that
    they are again as the collate function returns them. Other entries are unchanged.

    Such an entry is ragged: it does not have one row per sample. If it has no rows in this
    micro-batch, it is dropped if the collate function omits it for such a sample.
    """
    result = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, RowsPerSample):
            continue
        parts = [rows for rows in value if num_rows(rows)]
        if not parts and value[0] is ABSENT:
            del result[name]
        else:
            result[name] = concatenated(parts) if parts else value[0]
    return result


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several samples in a batch entry (tensors, arrays or lists)."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [row for part in parts for row in part]


def num_rows(value: Any) -> int:
    """Count the rows of an entry of a collated batch: the size of the first dim of a tensor or
    array, the length of a list or tuple, and 0 for anything else.
    """
    shape = shape_of(value)
    return shape[0] if shape else 0
