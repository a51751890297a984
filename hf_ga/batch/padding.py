"""Padding in a collated batch: which entries are padded along a token dim, and how many tokens each
sample has before its padding.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from hf_ga.loading.batches import IGNORED_LABEL, is_padding_mask
from hf_ga.model.forward import Batch

LABELS = "labels"


@dataclass(frozen=True)
class TokenEntries:
    """A group of entries of a collated batch that have the same padded length, such as `input_ids`,
    `attention_mask` and `labels`: tensors of shape (samples, padded length, ...).

    Attributes:
        names: Names of the entries.
        marker_names: Those among `names` whose values show which positions hold real tokens: an
            attention mask (1 at tokens), or labels (not -100 at tokens).
    """

    names: tuple[str, ...]
    marker_names: tuple[str, ...]

    def padded_length(self, batch: Batch) -> int:
        """Return the padded length that this group's entries have in a collated batch: their size
        in dim 1.
        """
        first_entry = batch[self.names[0]]
        return first_entry.shape[1]

    def lengths(self, batch: Batch) -> np.ndarray:
        """Return the length of each sample of a collated batch without the padding on its right, at
        least 1. Padding on its left counts as part of the sample.

        Args:
            batch: The collated batch, on the CPU.

        Returns:
            int64, shape (samples,).
        """
        markers = [_marked_positions(name, batch[name]) for name in self.marker_names]
        is_token = torch.stack(markers).any(0)
        positions_from_1 = torch.arange(1, is_token.shape[1] + 1)
        last_token = (is_token * positions_from_1).amax(1)
        return last_token.clamp(min=1).numpy()


def find_token_entries(batch: Batch, names: Collection[str]) -> tuple[TokenEntries, ...]:
    """Find the entries of a collated batch from which padding may be removed when it is split into
    micro-batches, and group them by their padded length.

    A group is returned only if it contains a mask or labels that mark its real tokens. A position
    that is not marked may still be a real token (one that is no target): the trial tests whether
    removing it changes the loss.

    Args:
        batch: The collated batch, on the CPU.
        names: Names of the entries with one row for each sample.

    Returns:
        The groups, sorted by the names of their entries.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> batch = {"input_ids": mask * 5, "attention_mask": mask}
    >>> find_token_entries(batch, batch)[0].lengths(batch)
    array([2, 1])
    """
    names_by_length: dict[int, list[str]] = {}
    for name in sorted(names):
        value = batch[name]
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1]:
            names_by_length.setdefault(value.shape[1], []).append(name)
    groups = []
    for group_names in names_by_length.values():
        marker_names = tuple(name for name in group_names if _is_marker(name, batch[name]))
        groups.append(TokenEntries(tuple(group_names), marker_names))
    return _keep_marked_and_sort(groups)


def groups_in_both(
    groups: Sequence[TokenEntries], other_groups: Sequence[TokenEntries]
) -> tuple[TokenEntries, ...]:
    """Return the groups of entries that have the same padded length in both of two collated batches
    of `hf_ga.backward` (of two calls, or of two ranks).

    Entries of different token sequences (`attention_mask` of the encoder, `labels` of the decoder)
    may have the same padded length in one batch by chance; the other batch separates them. Groups
    without a marker of real tokens are omitted.

    Args:
        groups: The groups of one batch, from `find_token_entries`.
        other_groups: The groups of the other batch.

    >>> mask, labels = "attention_mask", "labels"
    >>> by_chance = [TokenEntries((mask, labels), (mask, labels))]
    >>> separate = [TokenEntries((mask,), (mask,)), TokenEntries((labels,), (labels,))]
    >>> groups_in_both(by_chance, separate) == tuple(separate)
    True
    """
    common_groups = []
    for group, other in product(groups, other_groups):
        names = tuple(name for name in group.names if name in other.names)
        marker_names = tuple(
            name for name in names if name in group.marker_names and name in other.marker_names
        )
        common_groups.append(TokenEntries(names, marker_names))
    return _keep_marked_and_sort(common_groups)


def _keep_marked_and_sort(groups: Sequence[TokenEntries]) -> tuple[TokenEntries, ...]:
    """Remove the groups of a collated batch's entries in which no mask or labels show the real
    tokens, and sort the others by their names, so that all ranks have them in the same order.
    """
    marked_groups = [group for group in groups if group.marker_names]
    return tuple(sorted(marked_groups, key=lambda group: group.names))


def _is_marker(name: str, value: Tensor) -> bool:
    """Whether an entry shows which positions hold real tokens: a mask of zeros and ones with "mask"
    in its name, or integer labels of shape (samples, tokens).
    """
    if "mask" in name:
        return is_padding_mask(value)
    is_integer = not value.is_floating_point() and value.dtype != torch.bool
    return name == LABELS and value.dim() == 2 and is_integer


def _marked_positions(name: str, value: Tensor) -> Tensor:
    """Return a bool tensor, shape (samples, tokens), that is True at real tokens: where labels are
    not -100, or where a mask is not 0.
    """
    return value != (IGNORED_LABEL if name == LABELS else 0)
