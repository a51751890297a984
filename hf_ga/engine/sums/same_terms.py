"""Which keys of terms mean one term of the loss.

The key of a term is made of what computes it. A model may compute one mean by other layers for
other samples (a head for each language, a router): some micro-batches then show one key, some
another one, and they must be divided by the sum of both divisors. Two means, of which a micro-batch
may lack one, show two keys as well, and must be divided apart. A micro-batch with samples of both
tells which is true: it shows both keys in the second case only.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

from hf_ga.engine.sums.readings import TermKey

Pair = frozenset[TermKey]


class SameTerms:
    """What is known of the keys of a run.

    Attributes:
        is_changed: Whether this rank knows what other ranks may not know.
        looked_at: Pairs of keys whose samples were put together on purpose.
    """

    def __init__(self) -> None:
        """Start without any key."""
        self.is_changed = False
        self.looked_at: set[Pair] = set()
        self._beside: set[Pair] = set()  # seen in one micro-batch, so two terms
        self._classes: list[set[TermKey]] = []  # of keys that mean one term

    def key_of(self, key: TermKey) -> TermKey:
        """Return the key that stands for all that mean the same term."""
        for keys in self._classes:
            if key in keys:
                return min(keys, key=repr)
        return key

    def note(self, keys: Iterable[TermKey]) -> None:
        """Note the keys of one micro-batch: two terms each."""
        pairs = {frozenset(pair) for pair in combinations(set(keys), 2)}
        if not pairs <= self._beside:
            self._beside |= pairs
            self.is_changed = True

    def are_two(self, first: TermKey, second: TermKey) -> bool:
        """Whether two keys are known to be two terms."""
        return frozenset((first, second)) in self._beside

    def join(self, first: TermKey, second: TermKey) -> None:
        """Let two keys mean one term."""
        self._classes = _joined([*self._classes, {first, second}])
        self.is_changed = True

    def undecided(self, keys: Sequence[TermKey]) -> tuple[TermKey, TermKey] | None:
        """Return two keys of a window that may mean one term or two, or None."""
        for first, second in combinations(keys, 2):
            if not self.are_two(first, second):
                return first, second
        return None

    def state(self) -> tuple[set[Pair], list[set[TermKey]]]:
        """Return what other ranks must know."""
        return self._beside, self._classes

    def merge(self, states: Iterable[tuple[set[Pair], list[set[TermKey]]]]) -> None:
        """Learn what all ranks know."""
        for beside, classes in states:
            self._beside |= beside
            self._classes = _joined([*self._classes, *classes])
        self.is_changed = False


def _joined(classes: Sequence[set[TermKey]]) -> list[set[TermKey]]:
    """Return the classes, with those that share a key as one."""
    result: list[set[TermKey]] = []
    for keys in classes:
        apart = [known for known in result if known.isdisjoint(keys)]
        touching = [known for known in result if not known.isdisjoint(keys)]
        result = [*apart, keys.union(*touching)]
    return result
