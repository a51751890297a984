"""A collated batch, as a DataLoader returns it, that can be split into its samples again."""

from collections.abc import Hashable, Mapping, Sequence
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

LABELS = "labels"


# Name of an entry with a token dim -> a name of its token axis, and whether the entry is a marker:
# whether it shows which positions hold real tokens.
Axes = Mapping[str, tuple[Hashable, bool]]


def told_apart(axes: Sequence[Axes]) -> dict[str, tuple[str, bool]]:
    """Return the token axes of entries that have one axis in all of several batches, each named
    after its first entry, and which entries are markers in all of them.

    Entries of different token sequences (`attention_mask` of the encoder, `labels` of the decoder)
    may have the same padded length in one batch by chance, and weights of tokens may be zeros and
    ones as a mask; another batch tells them apart.

    Args:
        axes: For each batch, of this or another call or rank, the axes of the same entries.

    >>> by_chance = {"attention_mask": (9, True), "input_ids": (9, False), "labels": (9, True)}
    >>> other = {"attention_mask": (8, True), "input_ids": (8, False), "labels": (5, True)}
    >>> for name, axis in told_apart([by_chance, other]).items():
    ...     print(name, axis)
    attention_mask ('attention_mask', True)
    input_ids ('attention_mask', False)
    labels ('labels', True)
    """
    first_names: dict[Hashable, str] = {}
    result = {}
    for name in axes[0]:
        of_batches, are_markers = zip(*(of_batch[name] for of_batch in axes), strict=True)
        result[name] = (first_names.setdefault(of_batches, name), all(are_markers))
    return result


def _is_marker(name: str, value: Tensor) -> bool:
    """Whether an entry shows which positions hold real tokens: a mask of zeros and ones with "mask"
    in its name, or integer labels of shape (samples, tokens).
    """
    if not value.shape[1]:
        return False
    if "mask" in name:
        return is_padding_mask(value)
    is_integer = not value.is_floating_point() and value.dtype != torch.bool
    return name == LABELS and value.dim() == 2 and is_integer


class CollatedBatch(Fetcher):
    """A batch as a DataLoader returns it, copied to the CPU, with the length of each sample. It is
    the fetcher of a call of `hf_ga.backward`: takes micro-batches out of itself.

    Padding may be removed from entries with a token axis: tensors of shape (samples, padded length,
    ...) among which a mask or labels mark the real tokens. A position that is not marked may still
    be a real token (one that is no target): a rehearsal tests whether removing it changes the loss.

    Args:
        batch: The model's arguments by name. Tensors, arrays and lists must have one row for each
            sample; all other values are shared by all samples.

    Attributes:
        batch: The batch as a dict, on the CPU.
        first_offset: Index of its first sample in the global batch.
        num_samples: Number of samples; 0 is possible.
        per_sample_names: Names of the entries with one row for each sample.
        padded_lengths: Size of dim 1 of each tensor that has one.
        axes: The token axis of each of them: entries of one padded length, as far as is known;
            and whether it is a marker.

    Raises:
        DataError: If the batch cannot be split into samples.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        """Copy the batch of `hf_ga.backward` to the CPU, and check it."""
        _check_is_flat_dict(batch)
        super().__init__((), dict)  # no dataset, as the samples are collated already
        self.first_offset = 0
        # Targets are counted, and micro-batches are made, on the CPU.
        self.batch: dict[str, Any] = send_to_device(dict(batch), "cpu")
        self.per_sample_names = {name for name, value in self.batch.items() if shape_of(value)}
        self.num_samples = _count_samples(self.batch, self.per_sample_names)
        self.padded_lengths: dict[str, int] = {}
        for name in sorted(self.per_sample_names) if self.num_samples else ():
            value = self.batch[name]
            if isinstance(value, Tensor) and value.dim() > 1:
                self.padded_lengths[name] = value.shape[1]
        self.set_axes(
            {
                name: (length, _is_marker(name, self.batch[name]))
                for name, length in self.padded_lengths.items()
            }
        )

    def set_axes(self, axes: Axes) -> None:
        """Set the token axis of each entry that has one, and find the lengths of samples again."""
        self.axes = axes
        self._lengths_by_axis = {}
        for axis in dict.fromkeys(axis for axis, _ in axes.values()):
            names = tuple(name for name in axes if axes[name][0] == axis)
            markers = [
                self.batch[name] != (IGNORED_LABEL if name == LABELS else 0)
                for name in names
                if axes[name][1]
            ]
            if markers:
                is_token = torch.stack(markers).any(0)
                positions_from_1 = torch.arange(1, is_token.shape[1] + 1)
                last_token = (is_token * positions_from_1).amax(1)
                self._lengths_by_axis[names] = last_token.clamp(min=1).numpy()

    @property
    def marked_names(self) -> set[str]:
        """Names of the entries from which padding may be removed."""
        return {name for names in self._lengths_by_axis for name in names}

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sample without the padding on its right, summed over the token axes; ones
        if there are none. int64, shape (samples,).
        """
        total = sum(self._lengths_by_axis.values(), np.zeros(self.num_samples, np.int64))
        return total.clip(1)

    @property
    def is_padded(self) -> bool:
        """Whether some sample has padding that may be removed."""
        return any(
            lengths.min() < self.padded_lengths[names[0]]
            for names, lengths in self._lengths_by_axis.items()
        )

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
        lengths = self._lengths_by_axis if trim_padding else {}
        return [
            self._take(offsets - self.first_offset, lengths) for offsets in request.micro_batches
        ]

    def offsets(self, request: WindowRequest) -> np.ndarray:
        """Return the indices of the samples that this rank holds in the global batch of
        `hf_ga.backward`, which consists of the batches of all ranks.
        """
        return self.first_offset + np.arange(self.num_samples)

    def _take(
        self, indices: np.ndarray, lengths: Mapping[tuple[str, ...], np.ndarray]
    ) -> dict[str, Any]:
        """Return the samples with these indices as a smaller collated batch, in which entries with
        lengths are truncated to the longest of them.
        """
        taken = dict(self.batch)
        for names, of_samples in lengths.items():
            longest = int(of_samples[indices].max())
            for name in names:
                taken[name] = taken[name][:, :longest]
        return take_rows(taken, indices, self.per_sample_names)


def concatenate_batches(batches: Sequence[CollatedBatch]) -> dict[str, Any]:
    """Concatenate the collated batches that ranks pass to `hf_ga.backward` along their samples,
    padding entries with a token axis on the right to the longest batch: labels with -100, others
    with 0. Entries without rows of samples are taken from the first batch.
    """
    first = batches[0]
    result = dict(first.batch)
    for name in first.per_sample_names:
        values = [batch.batch[name] for batch in batches]
        if name in first.marked_names:
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
