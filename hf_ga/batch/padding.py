"""Padding in a collated batch: which entries hold tokens, and how many tokens each sample has."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from hf_ga.exact.batches import IGNORED_LABEL, Batch, is_padding_mask

LABELS = "labels"


@dataclass(frozen=True)
class TokenEntries:
    """Entries of a batch whose second axis is the same axis of tokens.

    Attributes:
        names: Their names.
        marks: Those of them that show which tokens a sample has: a mask, or labels.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]

    def width(self, batch: Batch) -> int:
        """Return the number of columns of these entries, padding included."""
        entry = batch[self.names[0]]
        return entry.shape[1]

    def lengths(self, batch: Batch) -> np.ndarray:
        """Count each sample's columns up to its last token, at least 1. Left padding counts.

        Returns:
            int64, shape (samples,).
        """
        by_mark = [_marked(name, batch[name]) for name in self.marks]
        is_used = torch.stack(by_mark).any(0)
        columns = torch.arange(1, is_used.shape[1] + 1)
        last_used = (is_used * columns).amax(1)
        return last_used.clamp(min=1).numpy()


def find_token_entries(batch: Batch, names: Collection[str]) -> tuple[TokenEntries, ...]:
    """Find the entries from which padding columns may be cut, one group for each width.

    Entries are left as they are if neither a mask nor labels mark their tokens. What has no mark
    may be a real token that is no target: whether it may be cut is for the proof to find.

    Args:
        batch: The batch, on the host.
        names: Names of the entries with one row for each sample.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> batch = {"input_ids": mask * 5, "attention_mask": mask}
    >>> find_token_entries(batch, batch)[0].lengths(batch)
    array([2, 1])
    """
    by_width: dict[int, list[str]] = {}
    for name in sorted(names):
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1]:
            by_width.setdefault(value.shape[1], []).append(name)
    groups = []
    for group in by_width.values():
        marks = tuple(name for name in group if _is_mark(name, batch[name]))
        groups.append(TokenEntries(tuple(group), marks))
    return _sorted_with_marks(groups)


def refined(
    groups: Sequence[TokenEntries], others: Sequence[TokenEntries]
) -> tuple[TokenEntries, ...]:
    """Split the groups of two batches where entries had the same width in one of them by chance.

    >>> mask, labels = "attention_mask", "labels"
    >>> by_chance = [TokenEntries((mask, labels), (mask, labels))]
    >>> apart = [TokenEntries((mask,), (mask,)), TokenEntries((labels,), (labels,))]
    >>> refined(by_chance, apart) == refined(apart, by_chance) == tuple(apart)
    True
    """
    found = []
    for one, other in product(groups, others):
        names = tuple(name for name in one.names if name in other.names)
        marks = tuple(name for name in names if name in one.marks and name in other.marks)
        found.append(TokenEntries(names, marks))
    return _sorted_with_marks(found)


def _sorted_with_marks(groups: Sequence[TokenEntries]) -> tuple[TokenEntries, ...]:
    """Sort the groups whose tokens are marked, in an order that is the same on all ranks."""
    marked = [group for group in groups if group.marks]
    return tuple(sorted(marked, key=str))


def _is_mark(name: str, value: Tensor) -> bool:
    """Whether an entry shows which tokens a sample has: a mask, or labels of tokens."""
    if "mask" in name:
        return is_padding_mask(value)
    is_integer = not value.is_floating_point() and value.dtype != torch.bool
    return name == LABELS and value.dim() == 2 and is_integer


def _marked(name: str, value: Tensor) -> Tensor:
    """Return bool of the entry's shape: True at the tokens that the entry marks."""
    return value != (IGNORED_LABEL if name == LABELS else 0)
