"""Small helpers on samples and on what a collate function returns."""

from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hf_ga.errors import DataError
from hf_ga.exact.precision import at_least_float32

Batch = Mapping[str, Any]
IGNORED_LABEL = -100  # the label that torch's cross entropy leaves out


class Parts(list):
    """An entry of a batch in which samples do not have one row each, as the rows of each sample."""


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward/backward on this process.

    Attributes:
        batch: what the collate function returned (CPU tensors, sample axis first).
        positions: int64, shape (n,): where the samples come in the order of the epoch; they key all
            randomness.
        sample_ids: int64, shape (n,): indices in the dataset.
    """

    batch: dict[str, Any]
    positions: np.ndarray
    sample_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.positions)


def sample_length(sample: Any) -> int:
    """Return the length of the longest list, array or vector in a sample (tokens, usually).

    It is 1 if the sample holds numbers only.
    """
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max((len(value) for value in values if _is_list(value)), default=1)


def _is_list(value: Any) -> bool:
    """Whether a value has a length: not a text, a number, or a tensor without axes."""
    return isinstance(value, Sized) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def as_batch(collated: Any) -> dict[str, Any]:
    """Return what a collate function returned as a dict.

    Raises:
        DataError: If it is not a mapping of names to values.
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
    """Take some samples of a collated batch.

    Args:
        batch: The batch.
        rows: Which samples.
        names: The entries with rows of samples (see `entries.Entries`). The others stay whole.
    """
    taken = dict(batch)
    rows = np.array(rows)  # a copy: torch has no negative strides
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor | np.ndarray):
            taken[name] = value[rows]
        else:
            kind = Parts if isinstance(value, Parts) else list
            taken[name] = kind(value[row] for row in rows)
    return taken


def equal_batches(value: Any, other: Any) -> bool:
    """Whether two batches hold the same values.

    NaN equals NaN. Objects that are no numbers are not compared.
    """
    if isinstance(value, Mapping):
        if not isinstance(other, Mapping) or value.keys() != other.keys():
            return False
        return all(equal_batches(value[name], other[name]) for name in value)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(equal_batches, value, other))
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # numpy has no bfloat16
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


def widest(batch: Batch, num_samples: int) -> int:
    """Return the elements of the largest tensor with one row a sample, padding included."""
    sizes = [num_samples]
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim() and len(value) == num_samples:
            sizes.append(value.numel())
    return max(sizes)


def marks_tokens(mask: Any) -> bool:
    """Whether an attention mask has a 1 for each real token and 0 elsewhere.

    Others are added to the attention scores: 0 and minus infinity, of shape (samples, 1, tokens,
    tokens).
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return bool(((mask == 0) | (mask == 1)).all())


def count_tokens(batch: Batch, num_samples: int) -> int:
    """Count the real tokens of a batch.

    They are the sum of `attention_mask` (of `attention_mask_anchor`, ..., if its samples have
    several texts), else the elements of `input_ids`, else the samples.
    """
    masks = [
        value
        for name, value in batch.items()
        if name.startswith("attention_mask") and marks_tokens(value)
    ]
    if masks:
        return int(sum(mask.sum() for mask in masks))
    ids = batch.get("input_ids")
    if isinstance(ids, Tensor):
        return ids.numel()
    return num_samples


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor or array, (length,) of a list, () of anything else."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    if isinstance(value, list | tuple):
        return (len(value),)
    return ()
