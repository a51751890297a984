"""Samples, collated batches and micro-batches: lengths, rows, comparisons, token counts."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_ga.errors import DataError
from hf_ga.model.forward import Batch
from hf_ga.model.precision import at_least_float32

IGNORED_LABEL = -100  # the label that torch's cross entropy ignores


class RowsPerSample(list):
    """A ragged batch entry, split by sample: one tensor, array or list of rows for each sample.

    An entry is ragged if it does not have one row per sample, like the patches of all images.
    """


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward on this process.

    Attributes:
        batch: The batch that the collate function returned: CPU tensors, samples in the first dim.
        positions: The samples' positions in the order of the epoch, from which their random keys
            are derived: int64, shape (samples,).
        sample_ids: The samples' indices in the dataset: int64, shape (samples,).
    """

    batch: dict[str, Any]
    positions: np.ndarray
    sample_ids: np.ndarray

    def __len__(self) -> int:
        """Return the number of samples of the micro-batch."""
        return len(self.positions)


def sample_length(sample: Any) -> int:
    """Return the length of a sample, by which windows are planned, usually in tokens.

    It is the length of the longest list, array or tensor among its values; 1 if all of them are
    numbers or strings.
    """
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((len(value) for value in values if _has_length(value)), default=1)


def row_lengths(batch: Any, num_samples: int) -> np.ndarray:
    """Return about how many positions of each sample of a batch are no padding.

    They are those of its attention masks or, without any, those that are not in a run of one value
    at the end, or at the beginning, of its row.

    Args:
        batch: The collated batch.
        num_samples: Its number of samples.

    Returns:
        The lengths, shape (samples,). All 0 if no tensor has a row of several positions per sample.
    """
    lengths = np.zeros(num_samples, np.int64)
    if isinstance(batch, Mapping):
        masks = [mask for mask in attention_masks(batch) if len(mask) == num_samples]
        if masks:
            return sum(mask.sum(1).numpy().astype(np.int64) for mask in masks)
    values: Any = batch.values() if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, Iterable) else ():
        if isinstance(value, Tensor) and value.dim() > 1 and len(value) == num_samples:
            value = value.transpose(1, 2) if _has_choices(value) else value
            rows = value.reshape(num_samples, value.shape[1], -1)
            shorter = np.minimum(_without_last_run(rows), _without_last_run(rows.flip(1)))
            lengths = np.maximum(lengths, shorter)
    return lengths


def _has_choices(value: Tensor) -> bool:
    """Whether a tensor holds rows of token ids of several choices, rather than boxes of tokens."""
    if value.dim() != 3 or value.is_floating_point():
        return False
    return value.shape[2] > value.shape[1]


def _without_last_run(rows: Tensor) -> np.ndarray:
    """Return how many positions of each row come before those at its end that have one value. The
    rows have shape (samples, positions, elements).
    """
    differs = (rows != rows[:, -1:]).any(2)
    numbers = torch.arange(1, rows.shape[1] + 1)
    return (differs * numbers).amax(1).numpy()


def _has_length(value: Any) -> bool:
    """Whether a value of a sample counts for the sample's length: a list, or a tensor or array with
    at least one dim, but not a string.
    """
    return isinstance(value, Sized) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def as_batch(collated: Any) -> dict[str, Any]:
    """Check what a collate function returned for a micro-batch, and copy it to a dict.

    Raises:
        DataError: If it is not a mapping.
    """
    if not isinstance(collated, Mapping):
        raise DataError(
            "the collate function must return a dict of the model's arguments by name, got a "
            f'{type(collated).__name__}: let it return {{"input_ids": ..., "labels": ...}}.'
        )
    return dict(collated)


def take_rows(
    batch: Batch, rows: Sequence[int] | np.ndarray, names: Collection[str]
) -> dict[str, Any]:
    """Select some samples of a collated batch, to make micro-batches of a window.

    Args:
        batch: The batch. Its ragged entries (those without one row per sample) are split by sample
            (`RowsPerSample`).
        rows: The indices of the samples.
        names: The entries with rows of samples (see `entries.Entries`). The others, which all
            samples share, are unchanged.
    """
    selected = dict(batch)
    rows = np.array(rows)  # a copy: torch does not support negative strides
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor | np.ndarray):
            selected[name] = value[rows]
        else:
            list_type = RowsPerSample if isinstance(value, RowsPerSample) else list
            selected[name] = list_type(value[row] for row in rows)
    return selected


def equal_batches(value: Any, other: Any) -> bool:
    """Whether two batches, or two of their entries, hold the same values, to check that collating
    the same samples of a window again gives the same batch.

    NaN equals NaN. Values other than tensors, arrays, numbers, strings, lists, tuples and mappings
    count as equal.
    """
    if isinstance(value, Mapping):
        if not isinstance(other, Mapping) or value.keys() != other.keys():
            return False
        return all(equal_batches(value[name], other[name]) for name in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(equal_batches, value, other))
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # Converted, because numpy has no bfloat16.
        value = at_least_float32(value)
        other = at_least_float32(other)
    if isinstance(value, Tensor | np.ndarray):
        value = np.asarray(value)
        other = np.asarray(other)
        if value.shape != other.shape:
            return False
        both_are_nan = (value != value) & (other != other)
        return bool(((value == other) | both_are_nan).all())
    if not isinstance(value, int | float | str):
        return True
    return value == other or value != value


def count_padded_elements(batch: Batch, num_samples: int) -> int:
    """Return the number of elements, including padding, of the largest tensor in a batch that has
    one row per sample; at least the number of samples.

    It is the size by which micro-batches are limited if memory runs out.
    """
    sizes = [num_samples]
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim() and len(value) == num_samples:
            sizes.append(value.numel())
    return max(sizes)


def is_padding_mask(mask: Any) -> bool:
    """Whether an attention mask of a batch has shape (samples, tokens), with 1 at tokens and 0 at
    padding, so that the tokens of a micro-batch can be counted in it.

    A bias of the attention scores (0 and -inf, shape (samples, 1, tokens, tokens)) is not one.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return bool(((mask == 0) | (mask == 1)).all())


def attention_masks(batch: Batch) -> list[Tensor]:
    """Return the attention masks of a batch that show which of its tokens are no padding, each of
    shape (samples, tokens).
    """
    return [
        value
        for name, value in batch.items()
        if str(name).startswith("attention_mask") and is_padding_mask(value)
    ]


def count_tokens(batch: Batch, num_samples: int) -> int:
    """Count the real tokens of a micro-batch.

    They are the ones in the attention masks: `attention_mask`, or `attention_mask_anchor` and so on
    if a sample has several texts. Without a mask, all elements of `input_ids` count; without
    `input_ids`, every sample counts as one token.
    """
    masks = attention_masks(batch)
    if masks:
        return int(sum(mask.sum() for mask in masks))
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        return ids.numel()
    return num_samples


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an entry of a collated batch: (length,) for a list, () for anything other
    than a tensor, array, list or tuple.
    """
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return (len(value),)
    return ()


def structure_of(batch: Batch) -> frozenset:
    """Describe the entries of a batch, to find out whether another one has the same structure.

    Returns:
        A set of (name, dtype, number of dims) for tensors and (name, type name, 0) for other
        values.
    """
    described = []
    for name, value in batch.items():
        if isinstance(value, Tensor):
            described.append((name, value.dtype, value.dim()))
        else:
            described.append((name, type(value).__name__, 0))
    return frozenset(described)
