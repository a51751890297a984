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
    """The longest list, array or vector in a sample (tokens, usually); 1 if it holds numbers
    only.
    """
    values = sample.values() if isinstance(sample, Mapping) else [sample]
    return max(
        (
            len(v)
            for v in values
            if isinstance(v, Sized) and not isinstance(v, str) and getattr(v, "ndim", 1)
        ),
        default=1,
    )


def as_batch(collated: Any) -> dict[str, Any]:
    """What a collate function returned, as a dict.

    Raises:
        DataError: it is not a mapping of names to values.
    """
    if not isinstance(collated, Mapping):
        raise DataError(
            "the collate function must return a dict of the model's arguments by name, got a "
            f"{type(collated).__name__}: let it "
            'return {"input_ids": ..., "labels": ...}.'
        )
    return dict(collated)


def take_rows(
    batch: Batch, rows: Sequence[int] | np.ndarray, names: Collection[str]
) -> dict[str, Any]:
    """Some samples of a collated batch: the entries in `names` (see `entries.Entries`) are indexed,
    the others stay.
    """
    # a copy: torch has no negative strides
    taken = dict(batch)
    rows = np.array(rows)
    for name in names:
        value = batch[name]
        if isinstance(value, Tensor | np.ndarray):
            taken[name] = value[rows]
        else:
            kind = Parts if isinstance(value, Parts) else list
            taken[name] = kind(value[row] for row in rows)
    return taken


def equal_batches(value: Any, other: Any) -> bool:
    """Whether two batches hold the same values; NaN equals NaN, and objects that are no numbers are
    not looked into.
    """
    if isinstance(value, Mapping):
        return (
            isinstance(other, Mapping)
            and value.keys() == other.keys()
            and all(equal_batches(value[k], other[k]) for k in value)
        )
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(equal_batches, value, other))
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        # numpy has no bfloat16
        value = at_least_float32(value)
        other = at_least_float32(other)
    if isinstance(value, Tensor | np.ndarray):
        value = np.asarray(value)
        other = np.asarray(other)
        return value.shape == other.shape and bool(
            ((value == other) | ((value != value) & (other != other))).all()
        )
    return not isinstance(value, int | float | str) or value == other or value != value


def widest(batch: Batch, num_samples: int) -> int:
    """Elements of the largest tensor with one row a sample, padding included."""
    tensors = (
        v for v in batch.values() if isinstance(v, Tensor) and v.dim() and len(v) == num_samples
    )
    return max((tensor.numel() for tensor in tensors), default=num_samples)


def marks_tokens(mask: Any) -> bool:
    """Whether an attention mask has a 1 for each real token and 0 elsewhere.

    Others are added to the attention scores: 0 and minus infinity, of shape (samples, 1, tokens,
    tokens).
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return bool(((mask == 0) | (mask == 1)).all())


def count_tokens(batch: Batch, num_samples: int) -> int:
    """Real tokens of a batch: the sum of `attention_mask` (of `attention_mask_anchor`, ..., if its
    samples have several texts), else the elements of `input_ids`, else the samples.
    """
    masks = [
        value
        for name, value in batch.items()
        if name.startswith("attention_mask") and marks_tokens(value)
    ]
    if masks:
        return int(sum(mask.sum() for mask in masks))
    if isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    return num_samples


def shape_of(value: Any) -> tuple[int, ...]:
    """Of a tensor or array; the length of a list; nothing else has one."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else ()
