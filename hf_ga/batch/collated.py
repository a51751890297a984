"""A collated batch, as a DataLoader returns it, that can be split into its samples again."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hf_ga.errors import DataError
from hf_ga.loading.batches import (
    IGNORED_LABEL,
    is_padding_mask,
    shape_of,
    structure_of,
    take_rows,
)
from hf_ga.loading.entries import concatenated
from hf_ga.loading.fetch import Fetcher, WindowRequest
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
        return batch[self.names[0]].shape[1]

    def lengths(self, batch: Batch) -> np.ndarray:
        """Return the length of each sample of a collated batch without the padding on its right, at
        least 1. Padding on its left counts as part of the sample.

        Args:
            batch: The collated batch, on the CPU.

        Returns:
            int64, shape (samples,).
        """
        markers = [
            batch[name] != (IGNORED_LABEL if name == LABELS else 0) for name in self.marker_names
        ]
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


class CollatedBatch(Fetcher):
    """A batch as a DataLoader returns it, copied to the CPU, with the length of each sample. It is
    the fetcher of a call of `hf_ga.backward`: takes micro-batches out of itself.

    Args:
        batch: The model's arguments by name. Tensors, arrays and lists must have one row for each
            sample; all other values are shared by all samples.

    Attributes:
        batch: The batch as a dict, on the CPU.
        first_offset: Index of its first sample in the global batch.
        num_samples: Number of samples; 0 is possible.
        per_sample_names: Names of the entries with one row for each sample.
        token_entries: Groups of entries from which padding may be removed.
        lengths: Length of each sample without its padding, summed over the groups of token entries;
            ones if there are none. int64, shape (samples,).
        is_padded: Whether some sample has padding that may be removed.

    Raises:
        DataError: If the batch cannot be split into samples.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        """Copy the batch of `hf_ga.backward` to the CPU, check it, and find its token entries
        (those from which padding may be removed) and the lengths of its samples.
        """
        _check_is_flat_dict(batch)
        super().__init__((), dict)  # no dataset, as the samples are collated already
        self.first_offset = 0
        # Targets are counted, and micro-batches are made, on the CPU.
        self.batch: dict[str, Any] = send_to_device(dict(batch), "cpu")
        self.per_sample_names = {name for name, value in self.batch.items() if shape_of(value)}
        self.num_samples = _count_samples(self.batch, self.per_sample_names)
        token_entries: tuple[TokenEntries, ...] = ()
        if self.num_samples:
            token_entries = find_token_entries(self.batch, self.per_sample_names)
        self.set_token_entries(token_entries)

    def set_token_entries(self, token_entries: Sequence[TokenEntries]) -> None:
        """Set the groups of entries of the collated batch from which padding may be removed, and
        compute the samples' lengths and `is_padded` again.
        """
        self.token_entries = tuple(token_entries)
        # For each group, the length of each sample without padding.
        self._lengths_of = {group: group.lengths(self.batch) for group in self.token_entries}
        total = sum(self._lengths_of.values(), np.zeros(self.num_samples, np.int64))
        self.lengths = total.clip(1)
        self.is_padded = any(
            lengths.min() < group.padded_length(self.batch)
            for group, lengths in self._lengths_of.items()
        )

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Padded length of each group of the collated batch's token entries (those from which
        padding may be removed): the size of their tensors in dim 1.
        """
        return tuple(group.padded_length(self.batch) for group in self.token_entries)

    @property
    def structure(self) -> tuple[str, ...]:
        """Names, dtypes and numbers of dims of all entries of the collated batch, as sorted
        strings, so that the ranks that call `hf_ga.backward` can compare theirs.
        """
        descriptions = [str(entry) for entry in structure_of(self.batch)]
        return tuple(sorted(descriptions))

    def __getitem__(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Return the micro-batches that the plan of a call of `hf_ga.backward` assigns to this
        rank, each as a collated dict. They are truncated to their longest sample, unless the plan
        asks for one padded length for the whole batch (`pad_to_window`).
        """
        trim_padding = not request.pad_to_window
        return [
            self._take(offsets - self.first_offset, trim_padding=trim_padding)
            for offsets in request.micro_batches
        ]

    def offsets(self, request: WindowRequest) -> np.ndarray:
        """Return the indices of the samples that this rank holds in the global batch of
        `hf_ga.backward`, which consists of the batches of all ranks.
        """
        return self.first_offset + np.arange(self.num_samples)

    def _take(self, indices: np.ndarray, *, trim_padding: bool) -> dict[str, Any]:
        """Return the samples with these indices as a smaller collated batch, truncated to the
        longest of them or as wide as this one.
        """
        taken = dict(self.batch)
        if trim_padding:
            for group, lengths in self._lengths_of.items():
                longest = int(lengths[indices].max())
                for name in group.names:
                    taken[name] = taken[name][:, :longest]
        return take_rows(taken, indices, self.per_sample_names)


def concatenate_batches(
    batches: Sequence[Mapping[str, Any]],
    per_sample_names: Collection[str],
    padded_names: Collection[str],
) -> dict[str, Any]:
    """Concatenate the collated batches that ranks pass to `hf_ga.backward` along their samples,
    padding entries with a token dim on the right to the longest batch.

    Args:
        batches: The entries of each batch.
        per_sample_names: Names of the entries with one row for each sample. All other entries are
            taken from the first batch.
        padded_names: Names of the entries that may have different padded lengths. Labels are padded
            with -100, others with 0.
    """
    result = dict(batches[0])
    for name in per_sample_names:
        values = [batch[name] for batch in batches]
        if name in padded_names:
            filler = IGNORED_LABEL if name == LABELS else 0
            longest = max(value.shape[1] for value in values)
            values = [_pad(value, longest, filler) for value in values]
        result[name] = concatenated(values)
    return result


def _pad(value: Tensor, num_tokens: int, filler: int) -> Tensor:
    """Pad a tensor of shape (samples, tokens, ...) with `filler` on the right of its tokens."""
    padded = value.new_full((len(value), num_tokens, *value.shape[2:]), filler)
    padded[:, : value.shape[1]] = value
    return padded


def _check_is_flat_dict(batch: Any) -> None:
    """Check that the batch is a dict whose values are not dicts themselves."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the batch must be a dict of the model's arguments by name, got a "
            f"{type(batch).__name__}: pass {{'input_ids': ..., 'labels': ...}}, as for "
            "model(**batch)."
        )
    nested = [name for name, value in batch.items() if isinstance(value, Mapping)]
    if nested:
        raise DataError(
            f"the batch's {nested[0]!r} is a nested dict: put its tensors at the top level."
        )


def _count_samples(entries: dict[str, Any], per_sample_names: set[str]) -> int:
    """Return the number of samples of a collated batch: the number of rows that all its per-sample
    entries must have, one of them a tensor or array.
    """
    has_tensor = any(isinstance(entries[name], Tensor | np.ndarray) for name in per_sample_names)
    if not has_tensor:
        raise DataError(
            f"the batch ({', '.join(entries) or 'empty'}) has no tensor with a sample dimension: "
            "its tensors need one row for each sample."
        )
    num_rows = {name: len(entries[name]) for name in sorted(per_sample_names)}
    distinct = set(num_rows.values())
    if len(distinct) > 1:
        listed = ", ".join(f"{name} {rows}" for name, rows in num_rows.items())
        raise DataError(
            f"the entries of the batch have different numbers of rows ({listed}), so it cannot be "
            "split into samples: give each entry one row for each sample. Tensors that all samples "
            "share belong in the model or in loss_fn. If a sample has several rows (image "
            "patches), use hf_ga.Accelerator or hf_ga.WindowLoader, which know the samples."
        )
    return distinct.pop()
