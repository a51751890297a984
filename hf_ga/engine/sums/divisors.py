"""What each term of a loss divides by in the micro-batches of a window, and whether their sum is
what the full batch divides by.

A divisor is trusted if it follows the micro-batch: if it is proportional to what the term sums over
(targets, or the sum of their weights), or to the number of samples. Then divisors of micro-batches
add up to that of the window. One that does neither is a constant (`sum / 100`), has a constant
added, or depends on the padded width.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from hf_ga.engine.sums.readings import Reading, TermKey
from hf_ga.errors import LossNotAdditive
from hf_ga.logs import get_logger

logger = get_logger(__name__)

RELATIVE_ROUNDING = 1e-5  # of sums that are computed in float32
BY_TARGETS = "targets"
BY_NONZERO = "targets with a weight"
BY_SAMPLES = "samples"
BY_NOTHING = "nothing"  # a constant
WINDOWS_TO_WARN = 3  # in which a mean did not grow with the samples: fewer may be by chance
NO_SUCH_FACTOR = (
    "the full batch has no such factor. Change a factor between optimizer steps only (count "
    "updates, below `if accelerator.sync_gradients:`, not iterations); if it is a share of "
    "targets, divide a sum by the number that it stands for, or pass num_targets."
)
# For each term, what its divisor follows, and the terms whose divisor it has.
Known = tuple[dict[TermKey, set[str]], dict[TermKey, set[TermKey]]]
ALL_KINDS = {BY_TARGETS, BY_NONZERO, BY_SAMPLES, BY_NOTHING}


def true_divisor(reading: Reading) -> float:
    """Return what a reading on the host adds to the divisor of the window.

    A micro-batch without targets adds 0, also where the loop raised its number of targets to 1
    (`clamp(min=1)`, `max(k, 1)`, `k + eps`). A number of elements or of samples counts whatever
    their weights add up to.
    """
    return 0.0 if is_empty(reading) else float(reading.divisor)


def is_empty(reading: Reading) -> bool:
    """Whether a term on the host sums over nothing. Signed weights may add up to 0 by chance, and a
    number of elements counts whatever their weights.
    """
    if reading.term is not None and reading.term.is_shape_divisor:
        return reading.divisor == 0
    number = reading.count if reading.num_nonzero is None else reading.num_nonzero
    return number is not None and number == 0


class DivisorChecks:
    """Checks the divisors and factors of a run's windows.

    Attributes:
        followed: For each term, what its divisor was found to be proportional to, in all windows so
            far.
        is_changed: Whether this rank knows of its terms what other ranks may not know.
        trusts_numbers: Whether numbers of targets that were passed were checked before.
        compares_rehearsal: Whether factors of the window's rehearsal must be those of the window.
            Not where each process has one micro-batch, and the loop draws what is not keyed, as
            allowed: it may draw its factor for each update.
    """

    def __init__(self) -> None:
        """Start without any term."""
        self.followed: dict[TermKey, set[str]] = {}
        self.is_changed = False
        self.trusts_numbers = False
        self.compares_rehearsal = True
        # For each term, those whose divisor it had, up to a constant factor, in all windows so far.
        self._same_as: dict[TermKey, set[TermKey]] = {}
        self._masked: set[TermKey] = set()  # means over elements, some of which had a weight of 0
        self._has_warned = False
        # Windows in which a mean did not grow with the samples.
        self._num_constant: dict[TermKey, float] = defaultdict(float)

    def follows(self, key: TermKey) -> set[str]:
        """Return what the divisor of a term, which is trusted, may be proportional to."""
        return self.followed.get(key, set()) - {BY_NOTHING}

    def state(self) -> Known:
        """Return what is known of the terms' divisors, for other ranks."""
        return self.followed, self._same_as

    def merge(self, states: Sequence[Known]) -> None:
        """Know what all ranks know, so that they count the same divisors.

        Args:
            states: The `state` of each rank.
        """
        for followed, same_as in states:
            for key, possible in followed.items():
                self.followed[key] = possible & self.followed.get(key, possible)
            for key, same in same_as.items():
                self._same_as[key] = same & self._same_as.get(key, same)
        self.is_changed = False

    def true_divisors(self, key: TermKey, readings: Sequence[Reading]) -> list[float]:
        """Return what a term adds to the divisor of the window in each micro-batch.

        One without targets adds the number of those of another term, if it always had that one's
        divisors; but not 1, to which its own may be raised.

        Args:
            key: The term.
            readings: Of all terms in these micro-batches, on the host, checked before.
        """
        of_term = [reading for reading in readings if reading.key == key]
        divisors = [self.true_divisor(reading) for reading in of_term]
        if any(reading.term is None or reading.term.is_shape_divisor for reading in of_term):
            return divisors
        others = [other for other in self._same_as.get(key, ()) if self.follows(other)]
        is_lent = bool(others) and not self.follows(key)
        if is_lent:
            divisors = [0.0] * len(of_term)
        for other in others:
            of_other = [reading for reading in readings if reading.key == other]
            if len(of_other) != len(of_term):
                continue
            for index, (reading, lender) in enumerate(zip(of_term, of_other, strict=True)):
                may_be_raised = not is_lent and abs(reading.divisor) <= 1
                if not divisors[index] and not may_be_raised and self.true_divisor(lender):
                    divisors[index] = float(reading.divisor)
        return divisors

    def true_divisor(self, reading: Reading) -> float:
        """Return what a reading on the host adds that has its own divisor, as far as is known."""
        if self.follows(reading.key) == {BY_SAMPLES}:
            return float(reading.divisor)  # of samples, also where their weights are 0
        return true_divisor(reading)

    def may_count_samples(self, reading: Reading) -> tuple[bool, bool]:
        """Return whether a term divides by the number of samples, also of micro-batches that lack
        it (`if chosen.any(): loss += losses[chosen].sum() / len(x)`), and whether it does not.

        Both are False if it is unknown, as in micro-batches all of whose samples are targets, or
        which have as many targets each and may divide by a constant.
        """
        term = reading.term
        if term is None or term.is_penalty or not self.follows(reading.key):
            return False, True
        counts_samples = self.follows(reading.key) == {BY_SAMPLES}
        if not term.node_divides:
            return counts_samples, self.followed[reading.key].isdisjoint({BY_SAMPLES, BY_NOTHING})
        if not counts_samples or not term.is_shape_divisor or reading.selects:
            return False, True  # a mean over what was chosen
        return reading.key in self._masked, False

    def is_unknown(self, reading: Reading) -> bool:
        """Whether a term has no targets in a micro-batch, and it is unknown whether it divides by
        their number, raised from 0, by that of samples, or by a constant.
        """
        return is_empty(reading) and self.may_count_samples(reading) == (False, False)

    def check(
        self,
        readings: Sequence[Reading],
        switched_off: Sequence[Reading] = (),
        *,
        is_padded: bool,
    ) -> bool:
        """Check the readings of a window, which are on the host.

        Args:
            readings: All terms of all micro-batches of this rank, those of a rehearsal included.
            switched_off: Those with a factor of 0, likewise.
            is_padded: Whether all micro-batches have the same padded width.

        Returns:
            Whether they can be trusted. False: only if all micro-batches are padded alike.

        Raises:
            LossNotAdditive: If a divisor follows neither samples nor targets, or a factor differs
                between micro-batches of the window.
        """
        by_term: Mapping[TermKey, list[Reading]] = defaultdict(list)
        for reading in readings:
            if not self.trusts_numbers:
                self._check_raised(reading)
            if reading.term is not None:
                by_term[reading.key].append(reading)
        kinds = {}
        for key, of_term in by_term.items():
            self._check_factors([*of_term, *(r for r in switched_off if r.key == key)])
            _check_class_weights(of_term)
            if of_term[0].term.is_penalty:
                continue
            kinds[key] = _proportional_to(of_term) & self.followed.get(key, ALL_KINDS)
            if any(r.num_nonzero is not None and r.num_nonzero < r.divisor for r in of_term):
                self._masked.add(key)
            if len(of_term) == max(map(len, by_term.values())):  # in each micro-batch
                self._warn_of_other_samples(of_term)
        trusted = {key for key, possible in kinds.items() if possible - {BY_NOTHING}}
        untrusted = []
        for key, possible in kinds.items():
            of_term = by_term[key]
            same = {k for k in trusted - {key} if _have_same_divisors(of_term, by_term[k])}
            same &= self._same_as.get(key, same)
            if key not in trusted and not same:
                untrusted.append(of_term)
                if is_padded and of_term[0].term.is_shape_divisor:  # a mean over what was chosen
                    self.followed[key] = possible
                continue
            self.is_changed |= (possible, same) != (self.followed.get(key), self._same_as.get(key))
            self.followed[key] = possible
            self._same_as[key] = same
        depends_on_width = any(reading.ignores_width for reading in readings)
        if not untrusted and (is_padded or not depends_on_width):
            return True
        if not is_padded:
            return False
        for of_term in untrusted:
            if not of_term[0].term.is_shape_divisor:
                raise _untrusted(of_term)
        return True

    def _warn_of_other_samples(self, readings: Sequence[Reading]) -> None:
        """Warn of a mean over as many elements whatever the number of samples is."""
        key = readings[0].key
        has_sizes = len({reading.num_samples for reading in readings}) > 1
        is_constant = _have_one_ratio([(reading.divisor, 1.0) for reading in readings])
        if not has_sizes or not readings[0].term.node_divides:
            return
        self._num_constant[key] += 1 if is_constant else -math.inf
        if self._num_constant[key] == WINDOWS_TO_WARN:
            logger.warning(
                f"hf_ga: {readings[0].name}: it is over as many elements in micro-batches of other "
                "sizes. If they are samples of another loader, some are lost, as a rehearsal takes "
                "its batches, too: pass each loader to accelerator.prepare."
            )

    def _check_factors(self, readings: Sequence[Reading]) -> None:
        """Check that a term has one factor in all iterations of a window, the rehearsal's too: it
        may be one more than the loop would have, and a factor that counts iterations be ahead.
        """
        compared = [r for r in readings if r.is_counted or self.compares_rehearsal]
        factors = [reading.factor for reading in compared if true_divisor(reading)]
        if not factors:
            return
        smallest = min(factors)
        largest = max(factors)
        if largest - smallest > RELATIVE_ROUNDING * max(abs(smallest), abs(largest)):
            remedy = ""
            if 0.0 in (smallest, largest):
                remedy = " In place of a loss without targets, pass outputs.sum() * 0."
            raise LossNotAdditive(
                f"{readings[0].name}: its factor in the loss is {smallest:.6g} in one iteration "
                f"and {largest:.6g} in another one of the same window, so {NO_SUCH_FACTOR}{remedy}"
            )

    def _check_raised(self, reading: Reading) -> None:
        """Check that a number of targets that the loop passed was not raised from 0 to 1. A 1 for
        several samples may also be the true number.
        """
        if reading.term is not None or reading.divisor != 1 or reading.num_samples == 1:
            return
        if reading.is_zero:
            raise LossNotAdditive(
                f"the sum is 0 and num_targets is 1 for a micro-batch of {reading.num_samples} "
                "samples, as with max(number, 1): such micro-batches would count as targets of the "
                "window. Pass the plain number; it may be 0."
            )
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"hf_ga: num_targets is 1 for a micro-batch of {reading.num_samples} samples. If "
                "that is max(number, 1), the window's loss is divided by too many targets: pass "
                "the plain number, which may be 0."
            )


def _have_same_divisors(readings: Sequence[Reading], others: Sequence[Reading]) -> bool:
    """Whether a term has the divisor of another one in all micro-batches, up to a constant factor:
    label smoothing divides by the weights of the targets, but sums over all classes.
    """
    if len(readings) != len(others):
        return False
    pairs = [(r.divisor, other.divisor) for r, other in zip(readings, others, strict=True)]
    return _have_one_ratio(pairs)


def factors_of(readings: Sequence[Reading]) -> dict[TermKey, float]:
    """Return the factor of each term that the window counts on this rank, from readings on the
    host, which `DivisorChecks.check` has found to have one.
    """
    return {
        reading.key: float(reading.factor)
        for reading in readings
        if reading.is_counted and true_divisor(reading)
    }


def _check_class_weights(readings: Sequence[Reading]) -> None:
    """Check that a cross entropy has the same class weights in all micro-batches of a window."""
    all_weights = [r.class_weights for r in readings if r.class_weights is not None]
    if not all_weights:
        return
    first = all_weights[0]
    for weights in all_weights[1:]:
        is_same_tensor = weights.data_ptr() == first.data_ptr()
        if not is_same_tensor and not torch.equal(weights, first):
            raise LossNotAdditive(
                f"{readings[0].name}: its class weights differ between micro-batches of a window, "
                "so the full batch has no such weights. Compute them from the dataset, once."
            )


def _proportional_to(readings: Sequence[Reading]) -> set[str]:
    """Return what the divisors of a term are proportional to in the micro-batches of a window."""
    possible = set()
    if _follows([(r.num_samples, r.divisor) for r in readings]):
        possible.add(BY_SAMPLES)
    if _have_one_ratio([(r.divisor, 1.0) for r in readings]) and not any(map(_is_number, readings)):
        possible.add(BY_NOTHING)
    if readings[0].term.is_shape_divisor or not _grows(readings):
        return possible
    with_targets = [reading for reading in readings if not is_empty(reading)]
    raised = [reading.divisor for reading in readings if is_empty(reading)]
    # To that of one target (`clamp(min=1)`), or to a constant below it (`k + eps`).
    is_constant = _have_one_ratio([(divisor, 1.0) for divisor in raised])
    limit = _raised_at_most(with_targets) * (1 + RELATIVE_ROUNDING)
    if not is_constant or max(raised, default=0.0) > limit:
        return possible
    if _follows([(reading.divisor, reading.count) for reading in with_targets]):
        possible.add(BY_TARGETS)
    if _follows([(reading.divisor, reading.num_nonzero) for reading in with_targets]):
        possible.add(BY_NONZERO)
    return possible


def _raised_at_most(readings: Sequence[Reading]) -> float:
    """Return the largest number to which a divisor of no targets can be raised: what one target
    counts, as far as the micro-batches with targets tell.
    """
    smallest = min((reading.divisor for reading in readings), default=math.inf)
    numbers = [r.count if r.num_nonzero is None else r.num_nonzero for r in readings]
    if not all(number is not None and float(number).is_integer() for number in numbers):
        return smallest
    # A target may have several elements (`mask.sum().clamp(min=1) * dims`), all of which count.
    elements = math.gcd(*map(int, numbers))
    ratios = [r.divisor * elements / n for r, n in zip(readings, numbers, strict=True)]
    ratios += [r.divisor / r.count for r in readings if r.count]  # of weights that add up to 1
    return min(smallest, max(ratios, default=math.inf))


def _is_number(reading: Reading) -> bool:
    """Whether a divisor is the number of targets itself, so hardly a constant."""
    numbers = [n for n in (reading.count, reading.num_nonzero) if n is not None]
    return any(math.isclose(reading.divisor, n, rel_tol=RELATIVE_ROUNDING) for n in numbers)


def _follows(pairs: Sequence[tuple[float, float | None]]) -> bool:
    """Whether divisors follow numbers that are all known and not 0."""
    return all(number for _, number in pairs) and _have_one_ratio(pairs)


def _grows(readings: Sequence[Reading]) -> bool:
    """Whether what a term sums over grows with the number of samples, as far as is known. A sum
    over experts or classes has weights, too, but not one for each sample.
    """
    elements = {reading.num_elements for reading in readings}
    num_samples = {reading.num_samples for reading in readings}
    return len(elements) > 1 or len(num_samples) == 1 or None in elements


def _have_one_ratio(pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether the quotient of all pairs is the same, up to rounding."""
    ratios = [divisor / number for divisor, number in pairs if number]
    if not ratios:
        return True
    tolerance = RELATIVE_ROUNDING * max(map(abs, ratios))
    return max(ratios) - min(ratios) <= tolerance


def _untrusted(readings: Sequence[Reading]) -> LossNotAdditive:
    """Return the error for a divisor that does not follow the micro-batch."""
    divisors = ", ".join(f"{reading.divisor:.6g}" for reading in readings[:4])
    counts = ", ".join(
        "?" if reading.count is None else f"{reading.count:.6g}" for reading in readings[:4]
    )
    samples = ", ".join(str(reading.num_samples) for reading in readings[:4])
    return LossNotAdditive(
        f"{readings[0].name}: it divides by {divisors} in micro-batches of {samples} samples with "
        f"{counts} targets, which follows neither: a constant, or one was added to it. The divisor "
        "of the full batch cannot be known from that. Divide by what the sum is over, or pass the "
        "sum and its number of targets: accelerator.backward(sum, num_targets=n)."
    )
