"""Which terms of a loss share a gradient buffer.

The window's gradient is the sum over terms of (sum over micro-batches of its undivided gradient) /
(sum of its divisors). Terms whose divisors keep one proportion r in all micro-batches can be added
up at once, each times 1 / r, and divided by the sum of the first one's divisors. Terms in other
proportions need a buffer, and a backward, each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hf_ga.engine.sums.divisors import RELATIVE_ROUNDING
from hf_ga.engine.sums.readings import TermKey


@dataclass
class Group:
    """Terms that share a buffer in one window.

    Attributes:
        keys: The terms; the first one's divisors are those of the group.
        ratios: For each term, its divisor over the first term's, in this window.
        divisors: The first term's divisors in the micro-batches of this rank.
        total: Their sum; at the window's end over all ranks.
        raised: What the first term divides by in those of them in which it is a sum of something.
        num_samples: Number of samples of the micro-batches of this rank that have the first term,
            and of which it is known what it divides by.
        counts_samples: Whether its divisor is of samples, and whether it is not.
        of_penalties: The first term's divisors in the micro-batches of this rank that have
            penalties beside it, as far as was known then: they count by their share of the total.
    """

    keys: list[TermKey]
    ratios: dict[TermKey, float] = field(default_factory=dict)
    divisors: list[float] = field(default_factory=list)
    total: float = 0.0
    raised: list[float] = field(default_factory=list)
    num_samples: int = 0
    counts_samples: tuple[bool, bool] = (False, False)
    of_penalties: list[float] = field(default_factory=list)

    def fits(self, divisors: Mapping[TermKey, float]) -> bool:
        """Whether the divisors of a micro-batch are in the group's proportions."""
        base = divisors.get(self.keys[0], 0.0)
        for key in self.keys[1:]:
            divisor = divisors.get(key, 0.0)
            expected = base * self.ratios[key] if key in self.ratios else divisor
            is_zero_alone = (divisor == 0) != (base == 0)
            if is_zero_alone or abs(divisor - expected) > RELATIVE_ROUNDING * abs(expected):
                return False
        return True

    def learn(self, divisors: Mapping[TermKey, float]) -> None:
        """Remember the proportions of a micro-batch, unless it has no targets."""
        base = divisors.get(self.keys[0], 0.0)
        if base and not self.ratios:
            self.ratios = {key: divisors[key] / base for key in self.keys}


class Grouping:
    """The groups of a run's terms. Terms that once left their proportion stay apart.

    Attributes:
        structure: The keys of each group.
        are_apart: Whether each term has a group of its own, whatever its proportions: for same
            bits, as proportions of some samples may hold by chance.
    """

    def __init__(self) -> None:
        """Start without any term."""
        self.structure: list[list[TermKey]] = []
        self.are_apart = False

    def keep_apart(self, are_apart: bool) -> None:
        """Give each term a group of its own, or let those in one proportion share one."""
        self.are_apart = are_apart
        if are_apart:
            self.structure = [[key] for keys in self.structure for key in keys]

    def rename(self, key_of: Callable[[TermKey], TermKey]) -> None:
        """Give terms other keys. Of keys that became one, the first one's place is kept."""
        seen: set[TermKey] = set()
        structure = []
        for keys in self.structure:
            renamed = [key for key in dict.fromkeys(map(key_of, keys)) if key not in seen]
            seen.update(renamed)
            if renamed:
                structure.append(renamed)
        self.structure = structure

    def add_terms(self, keys: Sequence[TermKey]) -> bool:
        """Register the terms of a loss. New ones join the first group if its first term is among
        them, otherwise they make one: in another backward, or for other samples. For same bits,
        each makes one.

        Returns:
            Whether there were new ones.
        """
        known = {key for keys_of_group in self.structure for key in keys_of_group}
        new = [key for key in keys if key not in known]
        if not new:
            return False
        if self.are_apart:
            self.structure += [[key] for key in new]
            return True
        if self.structure and self.structure[0][0] in keys:
            self.structure[0].extend(new)
        else:
            self.structure.append(new)
        return True

    def split(self, group: Group, divisors: Mapping[TermKey, float]) -> None:
        """Give each term of a group that is out of proportion a group of its own."""
        for key in group.keys[1:]:
            pair = Group([group.keys[0], key], dict(group.ratios))
            if not pair.fits(divisors):
                self.take_out(key)

    def put_first(self, indices: Sequence[int]) -> None:
        """Let some groups come first, in their order."""
        others = [index for index in range(len(self.structure)) if index not in indices]
        self.structure = [self.structure[index] for index in (*indices, *others)]

    def take_out(self, key: TermKey) -> None:
        """Give a term a group of its own."""
        keys = next(keys for keys in self.structure if key in keys)
        keys.remove(key)
        self.structure.append([key])

    def merge(self, others: Sequence[list[list[TermKey]]]) -> None:
        """Adopt one structure on all ranks: terms are together if they are on every rank."""
        order = [key for structure in others for keys in structure for key in keys]
        together: dict[TermKey, tuple[int, ...]] = {}
        for key in dict.fromkeys(order):
            together[key] = tuple(_index_of_group(structure, key) for structure in others)
        groups: dict[tuple[int, ...], list[TermKey]] = {}
        for key, indices in together.items():
            groups.setdefault(indices, []).append(key)
        self.structure = list(groups.values())


def _index_of_group(structure: Sequence[Sequence[TermKey]], key: TermKey) -> int:
    """Return the index of the group that has a term; that of the first group if none has it yet."""
    for index, keys in enumerate(structure):
        if key in keys:
            return index
    return 0
