"""Rehearsals: some samples of a window are computed twice, in other company.

If the loss of a window is a sum over samples, then the undivided gradient of each term at the
model's outputs of a sample depends on that sample alone. So its norm, and its product with the
outputs, are the same among other samples, at another place in another micro-batch. Whatever makes
them differ is refused: BatchNorm, in-batch negatives, rewards that are normalised over the
micro-batch, mixed samples, hard example mining, a queue, a random number that is not keyed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hf_ga.engine.look.footprints import (
    LOW_PRECISION_TOLERANCE,
    TOLERANCE,
    Footprint,
    FootprintKey,
    Footprints,
)
from hf_ga.engine.look.recorder import INSIDE, Place
from hf_ga.engine.sums.readings import Reading, TermKey

FLOOR = 1e-6  # of the largest value: what is smaller is rounding
# A relative difference between two widths above which it is tried whether padding removes it. That
# of rounding alone is about this large.
WIDTH_TOLERANCE = 3e-6
WIDTH_FLOOR = 1e-3  # of the largest value: the relative difference of less is rounding


class Difference(NamedTuple):
    """A sample whose gradient differs from that in its rehearsal."""

    term: TermKey
    place: Place
    before: float
    now: float


def is_inside(place: Place) -> bool:
    """Whether a place is inside of a model, not at its outputs."""
    return isinstance(place, tuple) and place[0] == INSIDE


class Rehearsal:
    """Compares the samples of a window that were rehearsed with what they give in the window.

    Attributes:
        is_low_precision: Whether outputs were in half precision.
        terms_with_gradient: Those of which a sample of the last micro-batch that was compared has a
            gradient.
        num_reclassified: `KeyedDraws.num_reclassified` after the rehearsal; None before it.
        positions: Positions of the rehearsed samples in the epoch.
        is_compared: Whether any came again. They do not in a window that is one micro-batch.
        uncompared: The terms of which no sample was found again in the window.
        numbers: For each term and function that compares its samples with numbers, these numbers.
        widths: `widths_of` its batch.
        widths_now: Those of the micro-batch that is compared with it.
        num_samples: Number of samples of its batch.
        num_samples_now: That of the micro-batch that is compared with it.
        largest_difference: The largest relative difference of a sample so far.
    """

    def __init__(self) -> None:
        """Start without any rehearsed sample."""
        self.num_reclassified: int | None = None
        self._rehearsed: dict[FootprintKey, Footprints] = {}
        self._names_of_terms: dict[int, dict[TermKey, str]] = {}  # by the number of the loss
        self.positions: set[int] = set()
        self.is_compared = False
        self.uncompared: set[TermKey] = set()
        self.numbers: dict[tuple[TermKey, str], set[frozenset[float]]] = {}
        self.widths: list[torch.Size] = []
        self.widths_now: list[torch.Size] = []
        self.num_samples = 0
        self.num_samples_now = 0
        self.largest_difference = 0.0
        self.is_low_precision = False
        self.terms_with_gradient: set[TermKey] = set()

    @property
    def has_other_width(self) -> bool:
        """Whether the samples that are compared now are padded to another width than before."""
        return self.widths != self.widths_now

    def record(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
        num_reclassified: int,
        positions: Sequence[int],
    ) -> None:
        """Keep the footprints of the rehearsed samples.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
            num_reclassified: `KeyedDraws.num_reclassified` after it.
            positions: The rehearsed samples, of which the loss may have no term at all.
        """
        names = {reading.key: reading.name for reading in readings}
        self._names_of_terms.setdefault(number, {}).update(names)
        self._rehearsed.update(footprints)
        self.positions.update(positions)
        self.num_samples = len(positions)
        self.uncompared.update(names)
        self.num_reclassified = num_reclassified

    def difference(self, footprints: Mapping[FootprintKey, Footprints]) -> Difference | None:
        """Return the first difference between a sample and its rehearsal, or None.

        Args:
            footprints: By term, output and sample.
        """
        self.is_compared = True
        self.terms_with_gradient = set()
        compared = self._compared(footprints)
        floors = _largest_values(compared.values())
        used = _with_gradient(footprints) | _with_gradient(self._rehearsed)
        doubtful: dict[TermKey, Difference] = {}  # where several rows may not be of one sample
        confirmed: set[TermKey] = set()  # terms that agree where each sample has one row
        for (term, place), by_arrangement in compared.items():
            if not by_arrangement:
                continue
            is_used = any(map(_is_any_used, by_arrangement))
            if is_used:
                self.terms_with_gradient.add(term)
            # A gradient of 0 at an output says little if the term uses another one.
            if term not in used or is_used:
                self.uncompared.discard(term)
            differences = [_largest_difference(pairs, floors) for pairs in by_arrangement]
            if not is_inside(place):  # where gradients add up more roundings
                self.largest_difference = max(self.largest_difference, min(differences))
            has_one_row = any(pairs[0][1].num_rows == 1 for pairs in by_arrangement)
            # One arrangement must fit all samples.
            found = [_first_difference(pairs, self._tolerance, floors) for pairs in by_arrangement]
            if 1 in (self.num_samples, self.num_samples_now):
                found = [
                    first or _first_nan(pairs)
                    for first, pairs in zip(found, by_arrangement, strict=True)
                ]
            if all(difference is not None for difference in found):
                difference = Difference(term, place, *found[0])
                if has_one_row or is_inside(place):
                    return difference
                doubtful.setdefault(term, difference)
            elif is_used and has_one_row and not is_inside(place):
                confirmed.add(term)
        return next((found for term, found in doubtful.items() if term not in confirmed), None)

    def _compared(
        self, footprints: Mapping[FootprintKey, Footprints]
    ) -> dict[tuple[TermKey, Place], list[list[tuple[Footprint, Footprint]]]]:
        """Return the footprints before and now of each term at each output, by arrangement."""
        by_output: dict[tuple[TermKey, Place], list[tuple[Footprints, Footprints]]] = {}
        for key, now in footprints.items():
            before = self._rehearsed.get(key)
            if before is not None:
                by_output.setdefault(key[:2], []).append((before, now))
        return {
            key: _in_common_arrangements(
                pairs,
                keeps_unused=is_inside(key[1]),
                have_same_widths=not self.has_other_width,
            )
            for key, pairs in by_output.items()
        }

    def has_term(self, term: TermKey) -> bool:
        """Whether the loss of the rehearsal had a term."""
        return any(term in names for names in self._names_of_terms.values())

    def missing_term(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
        positions: Sequence[int],
    ) -> str | None:
        """Return the name of a term that a sample has only now, or only had in its rehearsal.

        A loss may lack terms of which none of its samples has a part.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
            positions: The samples of the micro-batch, which may have no term at all.
        """
        names = {reading.key: reading.name for reading in readings}
        rehearsed_names = self._names_of_terms.get(number, {})
        largest_norm, _ = _largest_values(self._compared(footprints).values())
        floor = FLOOR * largest_norm
        for (term, _, sample), now in footprints.items():
            is_new = sample in self.positions and term not in rehearsed_names
            if is_new and _smallest_norm(now) > floor:
                return names[term]
        for (term, _, sample), before in self._rehearsed.items():
            is_missing = sample in positions and term in rehearsed_names and term not in names
            if is_missing and _smallest_norm(before) > floor:
                return rehearsed_names[term]
        return None

    def same_term(
        self,
        footprints: Mapping[FootprintKey, Footprints],
        readings: Sequence[Reading],
        number: int,
    ) -> tuple[TermKey, TermKey] | None:
        """Return a term that a sample had in its rehearsal, and another one that it has in place
        of it now, with the same gradient at the same output. None if there is none, or if several
        terms could be the one before.

        Args:
            footprints: By term, output and sample.
            readings: The terms of the loss.
            number: Which loss of its micro-batch it is.
        """
        rehearsed = self._names_of_terms.get(number, {}).keys()
        names = {reading.key for reading in readings}
        for (term, place, sample), now in footprints.items():
            if term in rehearsed or not _smallest_norm(now):
                continue
            found = [
                other
                for other in rehearsed - names
                if self._are_equal(self._rehearsed.get((other, place, sample), {}), now)
            ]
            if len(found) == 1:
                return found[0], term
        return None

    def _are_equal(self, before: Footprints, now: Footprints) -> bool:
        """Whether a sample's footprints are equal in an arrangement, and not 0."""
        floors = (0.0, 0.0)
        return any(
            before[arrangement].norm
            and not _first_difference(
                [(before[arrangement], now[arrangement])], self._tolerance, floors
            )
            for arrangement in before.keys() & now.keys()
        )

    @property
    def _tolerance(self) -> float:
        """Relative tolerance of the comparison."""
        return LOW_PRECISION_TOLERANCE if self.is_low_precision else TOLERANCE


def _in_common_arrangements(
    pairs: Sequence[tuple[Footprints, Footprints]], *, keeps_unused: bool, have_same_widths: bool
) -> list[list[tuple[Footprint, Footprint]]]:
    """Return the pairs of footprints in each arrangement that is possible before and now.

    Several rows without any gradient are left out at outputs: they would agree in a wrong
    arrangement, too, such as steps of time whose outputs are not used. Inside of a model they are
    kept: rows of heads of attention, of samples without targets, would differ in a wrong one.
    """
    before, now = pairs[0]
    found = []
    for arrangement in now:
        if arrangement not in before:
            continue
        of_arrangement = [(before[arrangement], now[arrangement]) for before, now in pairs]
        if have_same_widths and any(b.num_rows != n.num_rows for b, n in of_arrangement):
            continue  # rows of targets: those of a sample are as many in micro-batches of one width
        if keeps_unused or _is_any_used(of_arrangement) or arrangement.rows == "one":
            found.append(of_arrangement)
    return found


def _is_any_used(pairs: Sequence[tuple[Footprint, Footprint]]) -> bool:
    """Whether a sample has a gradient there, before or now."""
    return any(before.norm or now.norm for before, now in pairs)


def _smallest_norm(footprints: Footprints) -> float:
    """Return the norm of a sample's gradient, whatever its arrangement is: 0 if one has none."""
    return min((footprint.norm for footprint in footprints.values()), default=0.0)


def _with_gradient(footprints: Mapping[FootprintKey, Footprints]) -> set[TermKey]:
    """Return the terms with a gradient at any output of any sample."""
    return {key[0] for key, of_sample in footprints.items() if _smallest_norm(of_sample)}


def _largest_values(
    compared: Iterable[Sequence[Sequence[tuple[Footprint, Footprint]]]],
) -> tuple[float, float]:
    """Return the largest norm and the largest bound of a product, against which others may be
    nothing but rounding.
    """
    footprints = [
        footprint
        for by_arrangement in compared
        for pairs in by_arrangement
        for pair in pairs
        for footprint in pair
    ]
    norms = [footprint.norm for footprint in footprints]
    scales = [footprint.scale for footprint in footprints]
    return max(norms, default=0.0), max(scales, default=0.0)


def _largest_difference(
    pairs: Sequence[tuple[Footprint, Footprint]], largest: tuple[float, float]
) -> float:
    """Return the largest relative difference of the samples' norms and products."""
    largest_norm, largest_scale = largest
    found = [0.0]
    for before, now in pairs:
        norm = max(before.norm, now.norm) + WIDTH_FLOOR * largest_norm
        scale = max(before.scale, now.scale) + WIDTH_FLOOR * largest_scale
        found.append(abs(before.norm - now.norm) / (norm or 1.0))
        found.append(abs(before.product - now.product) / (scale or 1.0))
    return max(found)


def _first_difference(
    pairs: Sequence[tuple[Footprint, Footprint]], tolerance: float, largest: tuple[float, float]
) -> tuple[float, float] | None:
    """Return the values of the first sample that differs, or None."""
    largest_norm, largest_scale = largest
    for before, now in pairs:
        bound = tolerance * max(before.norm, now.norm) + FLOOR * largest_norm
        if abs(before.norm - now.norm) > bound:
            return before.norm, now.norm
        scale = max(before.scale, now.scale)
        if abs(before.product - now.product) > tolerance * scale + FLOOR * largest_scale:
            return before.product, now.product
    return None


def _first_nan(
    pairs: Sequence[tuple[Footprint, Footprint]],
) -> tuple[float, float] | None:
    """Return the norms of the first sample of which one is NaN, or None. It is if a loss divides by
    the standard deviation of a single sample; among others, NaN may come from any of them.
    """
    for before, now in pairs:
        if math.isnan(before.norm) != math.isnan(now.norm):
            return before.norm, now.norm
    return None
