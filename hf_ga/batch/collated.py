"""A collated batch, cut into its samples again."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor

from hf_ga.batch.padding import LABELS, TokenEntries, find_token_entries
from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL, shape_of, take_rows
from hf_ga.exact.entries import concatenated
from hf_ga.exact.fetch import Fetcher, WindowRequest
from hf_ga.exact.rule import structure_of


class CollatedBatch:
    """A batch as a DataLoader returns it, on the host.

    Args:
        batch: Arguments of the model by name. Tensors, arrays and lists have one row for each
            sample; everything else is shared by all samples.

    Attributes:
        entries: The batch as a dict, on the host.
        num_samples: Number of its samples; 0 is possible.
        of_samples: Names of the entries with one row for each sample.
        token_entries: The entries from which padding may be cut.
        lengths: Number of columns that each sample needs, over all token entries; ones if there are
            none. int64, shape (samples,).
        is_padded: Whether some sample has padding that may be cut.

    Raises:
        DataError: If the batch cannot be cut into samples.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        _check_is_flat(batch)
        # Targets are counted, and micro-batches cut, on the host.
        self.entries: dict[str, Any] = send_to_device(dict(batch), "cpu")
        self.of_samples = {name for name, value in self.entries.items() if shape_of(value)}
        self.num_samples = _num_samples(self.entries, self.of_samples)
        found = find_token_entries(self.entries, self.of_samples) if self.num_samples else ()
        self.cut_padding_of(found)

    def cut_padding_of(self, token_entries: Sequence[TokenEntries]) -> None:
        """Choose the entries from which padding is cut."""
        self.token_entries = tuple(token_entries)
        self._lengths = [group.lengths(self.entries) for group in token_entries]
        total = np.zeros(self.num_samples, np.int64)
        for lengths in self._lengths:
            total = total + lengths
        self.lengths = total.clip(1)
        self.is_padded = any(
            lengths.min() < width for lengths, width in zip(self._lengths, self.widths, strict=True)
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of columns of each group of token entries, padding included."""
        return tuple(group.width(self.entries) for group in self.token_entries)

    @property
    def structure(self) -> tuple[str, ...]:
        """Names, dtypes and numbers of dimensions of its entries, which print the same on all
        ranks.
        """
        described = [str(entry) for entry in structure_of(self.entries)]
        return tuple(sorted(described))

    def rows(self, rows: Sequence[int] | np.ndarray, *, is_cut: bool = True) -> dict[str, Any]:
        """Return some samples as a batch.

        Args:
            rows: Numbers of the samples.
            is_cut: Whether to leave out columns that only other samples need.
        """
        entries = dict(self.entries)
        if is_cut:
            for group, lengths in zip(self.token_entries, self._lengths, strict=True):
                width = int(lengths[rows].max())
                entries |= {name: entries[name][:, :width] for name in group.names}
        return take_rows(entries, rows, self.of_samples)

    def samples(self, most: int) -> list["Row"]:
        """Return at most `most` of its samples, spread over it evenly."""
        number = min(most, self.num_samples)
        spread = np.linspace(0, self.num_samples - 1, number).astype(int)
        return [Row(self, int(index)) for index in spread]


@dataclass(frozen=True)
class Row:
    """One sample of a collated batch."""

    batch: CollatedBatch
    index: int

    def __len__(self) -> int:
        return int(self.batch.lengths[self.index])


def collate_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Join samples of one collated batch, as narrow as a collate function would make them."""
    return rows[0].batch.rows([row.index for row in rows])


class CollatedFetcher(Fetcher):
    """The fetcher of micro-batches that are cut from a collated batch.

    Args:
        batch: The samples of this rank.
        first: Offset of its first sample in the global batch.
        samples_of_proof: A function that returns at most so many samples for a proof, the same on
            all ranks.
    """

    def __init__(
        self, batch: CollatedBatch, first: int, samples_of_proof: Callable[[int], list[Row]]
    ) -> None:
        super().__init__((), collate_rows)
        self.batch = batch
        self.first = first
        self.samples_of_proof = samples_of_proof

    def __getitem__(self, request: WindowRequest) -> list[dict[str, Any]]:
        is_cut = not request.pad_to_window
        rows = [offsets - self.first for offsets in request.micro_batches]
        return [self.batch.rows(part, is_cut=is_cut) for part in rows]

    def offsets(self, request: WindowRequest) -> np.ndarray:
        """Return the offsets of this rank's samples: those of other ranks are not here."""
        return self.first + np.arange(self.batch.num_samples)

    def probe_samples(self, request: WindowRequest, count: int) -> list[Row]:
        """Return at most `count` samples; on several ranks a collective."""
        return self.samples_of_proof(count)


def joined(
    parts: Sequence[Mapping[str, Any]], of_samples: Collection[str], of_tokens: Collection[str]
) -> dict[str, Any]:
    """Join several batches.

    Args:
        parts: The entries of each batch.
        of_samples: Names of the entries with one row for each sample. Other entries are those of
            the first batch.
        of_tokens: Names of the entries that are padded to one width.

    Raises:
        DataError: If tensors have different shapes.
    """
    whole = dict(parts[0])
    for name in of_samples:
        values = [part[name] for part in parts]
        if name in of_tokens:
            filler = IGNORED_LABEL if name == LABELS else 0
            values = _of_one_width(values, filler)
        shapes = {shape_of(value)[1:] for value in values}
        if len(shapes) > 1:
            raise DataError(
                f"the ranks' {name!r} have rows of different shapes ({sorted(shapes)}), so they "
                "are no one batch: pad all batches to the same shape in the collate function."
            )
        whole[name] = concatenated(values)
    return whole


def _of_one_width(values: Sequence[Tensor], filler: int) -> list[Tensor]:
    """Pad tensors of shape (samples, columns, ...) on the right to the same number of columns."""
    width = max(value.shape[1] for value in values)
    padded = []
    for value in values:
        num_samples, num_columns, *others = value.shape
        missing = value.new_full((num_samples, width - num_columns, *others), filler)
        padded.append(torch.cat([value, missing], dim=1))
    return padded


def _check_is_flat(batch: Any) -> None:
    """Raise DataError if the batch is not a dict, or has a dict as an entry."""
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


def _num_samples(entries: dict[str, Any], of_samples: set[str]) -> int:
    """Return the common size of the first axis.

    Raises:
        DataError: If there is none.
    """
    has_tensor = any(isinstance(entries[name], Tensor | np.ndarray) for name in of_samples)
    if not has_tensor:
        raise DataError(
            f"the batch ({', '.join(entries) or 'empty'}) has no tensor with a sample axis: its "
            "tensors need one row for each sample."
        )
    sizes = {name: len(entries[name]) for name in sorted(of_samples)}
    different = set(sizes.values())
    if len(different) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise DataError(
            f"the entries of the batch have first axes of different sizes ({listed}), so it cannot "
            "be cut into samples: give each one row for each sample. Tensors that all samples "
            "share belong into the model or into loss_fn. Where a sample has several rows (image "
            "patches), use hf_ga.Accelerator or hf_ga.WindowLoader, which know the samples."
        )
    return different.pop()
