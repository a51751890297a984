"""Which entries of a collated batch belong to which of its samples.

Most entries have one row for each sample. Some are the rows of all samples one after the other, of
each sample as many as it has: the patches of all images (Qwen-VL), or one image of some samples
(LLaVA). How many rows a sample has shows where it is collated alone.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ga.errors import DataError
from hf_ga.exact.batches import Batch, Parts, as_batch, equal_batches, shape_of
from hf_ga.exact.generators import (
    moved_generators,
    preserved_random_states,
    random_states,
    seed_generators,
)

TARGETS = ("labels", "start_positions", "end_positions")  # the counting rules read their rows


ABSENT = object()  # an entry of a sample that has none


class Entries:
    """The entries of what one collate function returns.

    Args:
        collate_fn: List of samples -> batch.
        sample: Any sample. Batches of 2 and 3 copies show which entries grow with the samples.

    Attributes:
        of_samples: Names of the entries that hold rows of samples. The others are shared by all.
        joined: Those of them that do not have exactly one row for each sample.
        draws: The collate function draws random numbers.

    Raises:
        DataError: If a batch cannot be cut into samples: no entry grows with the samples, or not on
            its first axis.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], sample: Any) -> None:
        self.collate_fn = collate_fn
        self.of_samples: set[str] = set()
        self.joined: set[str] = set()
        self._num_shared: dict[str, int] = {}  # rows of an entry that did not grow
        with preserved_random_states():
            seed_generators(0)
            before = random_states()
            two = self._collated([sample] * 2)
            self.draws = bool(moved_generators(before))
            seed_generators(0)
            three = self._collated([sample] * 3)
        for name in two:
            self._find_growth(name, shape_of(two[name]), shape_of(three[name]))
        for name, value in two.items():
            if isinstance(value, Mapping):
                raise DataError(
                    f"the collate function's {name!r} is a nested dict: put its tensors at the "
                    "top level."
                )
        self._check(two)

    def _find_growth(self, name: str, of_two: tuple[int, ...], of_three: tuple[int, ...]) -> None:
        """Note whether an entry grows with the samples.

        Args:
            name: Of the entry.
            of_two: Its shape for two samples.
            of_three: Its shape for three samples.

        Raises:
            DataError: If it grows in another way than by the same number of rows for each sample.
        """
        if of_two == of_three:
            self._num_shared[name] = of_two[0] if of_two else 0
            return
        is_first_axis = len(of_two) == len(of_three) and of_two[1:] == of_three[1:]
        if not is_first_axis or of_two[0] % 2 or of_two[0] * 3 != of_three[0] * 2:
            raise DataError(
                f"the collate function's {name!r} has shape {of_two} for 2 samples and {of_three} "
                "for 3: every tensor needs its samples on the first axis, one row per sample."
            )
        self.of_samples.add(name)
        if of_two[0] != 2:
            self.joined.add(name)

    def look_at(self, samples: Sequence[Any]) -> None:
        """Find entries that have other than one row for some of these samples."""
        if self.draws:
            return  # such a collate function may need several samples
        with preserved_random_states():
            alone = [self._collated([sample]) for sample in samples]
        for batch in alone:
            self._note(batch, 1)
        self._note_missing(alone)

    def num_joined(self, sample: Any) -> int:
        """Count the rows of a sample in the joined entries."""
        with preserved_random_states():
            alone = self._collated([sample])
        return sum(num_rows(alone.get(name)) for name in self.joined)

    def split(self, batch: Batch, samples: Sequence[Any]) -> dict[str, Any]:
        """Replace each joined entry of a batch by `Parts`.

        Args:
            batch: What the collate function returned.
            samples: Of which.

        Raises:
            DataError: If the rows of a sample are not those that it has alone.
        """
        self._note(batch, len(samples))
        if not self.joined:
            return dict(batch)
        with preserved_random_states():
            alone = [self._collated([sample]) for sample in samples]
        for each in alone:
            self._note(each, 1)
        self._note_missing([*alone, batch])
        self._check(batch)
        changed = dict(batch)
        for name in self.joined:
            parts = self._parts(name, batch.get(name), [each.get(name, ABSENT) for each in alone])
            changed[name] = parts
        return changed

    def _parts(self, name: str, value: Any, alone: list[Any]) -> Parts:
        """Cut an entry into the rows of each sample.

        Args:
            name: Of the entry.
            value: The entry of the whole batch.
            alone: For each sample, the entry where it is collated alone.

        Raises:
            DataError: If the rows of a sample are not those that it has alone.
        """
        numbers = [num_rows(each) for each in alone]
        if sum(numbers) != num_rows(value):
            raise DataError(
                f"the collate function's {name!r} has {num_rows(value)} rows for {len(alone)} "
                f"samples, which have {sum(numbers)} rows when each is collated alone, so a batch "
                "cannot be cut into samples: give it one row per sample, or the rows of one sample "
                "after those of another."
            )
        parts = Parts()
        start = 0
        for number, own in zip(numbers, alone, strict=True):
            part = value[start : start + number] if number else own
            start += number
            is_comparable = number and not self.draws and shape_of(part) == shape_of(own)
            if is_comparable and not equal_batches(part, own):
                raise DataError(
                    f"the collate function's {name!r} has several rows for each sample, and those "
                    "of one sample do not follow each other (torch.cat([x, x])): let the model "
                    "repeat its inputs, with x.repeat_interleave(2, dim=0)."
                )
            parts.append(part)
        return parts

    def _note(self, batch: Batch, num_samples: int) -> None:
        """Note entries with other numbers of rows than were seen before."""
        for name, value in batch.items():
            number = num_rows(value)
            if name in self.of_samples:
                if number != num_samples:
                    self.joined.add(name)
            elif number and not self._num_shared.get(name):  # the first sample had none
                self.of_samples.add(name)
                self.joined.add(name)

    def _note_missing(self, batches: Sequence[Batch]) -> None:
        """Note entries that only some batches have."""
        for name in self.of_samples:
            if any(name not in batch for batch in batches):
                self.joined.add(name)

    def _check(self, batch: Batch) -> None:
        """Check that there is an entry with one row for each sample, and the targets are.

        Raises:
            DataError: If not.
        """
        several = [name for name in TARGETS if name in self.joined]
        if several:
            raise DataError(
                f"the collate function's {several[0]!r} does not have one row for each sample, so "
                "the targets of a sample cannot be counted: give it one row per sample. If the "
                "collate function repeats its samples, let the model repeat its inputs, with "
                "x.repeat_interleave(2, dim=0)."
            )
        if not self.of_samples - self.joined:
            raise DataError(
                f"nothing that the collate function returns ({', '.join(batch)}) has one row per "
                "sample: let it return tensors."
            )

    def _collated(self, samples: list[Any]) -> dict[str, Any]:
        # Copies: a collate function may take entries out of its samples.
        return as_batch(self.collate_fn([copy.copy(sample) for sample in samples]))


def put_together(batch: Batch) -> dict[str, Any]:
    """Return a batch with each entry of `Parts` as the collate function would return it."""
    whole = dict(batch)
    for name, value in batch.items():
        if not isinstance(value, Parts):
            continue
        parts = [part for part in value if num_rows(part)]
        if not parts and value[0] is ABSENT:
            del whole[name]
        else:
            whole[name] = concatenated(parts) if parts else value[0]
    return whole


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of several tensors, arrays or lists."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [row for part in parts for row in part]


def num_rows(value: Any) -> int:
    """Return the size of the first axis."""
    shape = shape_of(value)
    return shape[0] if shape else 0
