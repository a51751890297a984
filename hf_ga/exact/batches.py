"""Small helpers on samples and on what a collate function returns."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hf_ga.errors import DataError

Batch = Mapping[str, Any]
IGNORED_LABEL = -100  # the label that torch's cross entropy leaves out


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


def entries_of_samples(collate_fn: Callable[[list[Any]], Any], sample: Any) -> frozenset[str]:
    """The entries of a batch that hold one row a sample, found by collating 2 and 3 equal samples.
    The others are shared by all.

    Raises:
        DataError: the batch cannot be cut into samples: no entry has one row a sample, or not on
            its first axis.
    """
    # Copies: a collate function may take entries out of its samples.
    two, three = (
        as_batch(collate_fn([copy.copy(sample) for _ in range(count)])) for count in (2, 3)
    )
    found = set()
    for name in two:
        small, large = (_shape(batch[name]) for batch in (two, three))
        if small != large:
            if small[:1] != (2,) or large[:1] != (3,) or small[1:] != large[1:]:
                raise DataError(
                    f"the collate function's {name!r} has shape {small} for 2 samples and {large} "
                    "for 3: every tensor needs its "
                    "samples on the first axis, one row per sample."
                )
            found.add(name)
    if nested := [name for name, value in two.items() if isinstance(value, Mapping)]:
        raise DataError(
            f"the collate function's {nested[0]!r} is a nested dict: put its tensors at the top "
            "level."
        )
    if not found:
        raise DataError(
            f"nothing that the collate function returns ({', '.join(two)}) has one row per "
            "sample: let it return tensors."
        )
    return frozenset(found)


def take_rows(
    batch: Batch, rows: Sequence[int] | np.ndarray, names: Collection[str]
) -> dict[str, Any]:
    """Some samples of a collated batch: the entries in `names` (see `entries_of_samples`) are
    indexed, the others stay.
    """
    taken, rows = dict(batch), np.array(rows)  # a copy: torch has no negative strides
    for name in names:
        value = batch[name]
        taken[name] = (
            value[rows] if isinstance(value, Tensor | np.ndarray) else [value[row] for row in rows]
        )
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
    if isinstance(value, Tensor | np.ndarray):
        value, other = np.asarray(value), np.asarray(other)
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
    """Real tokens of a batch: the sum of `attention_mask`, else the elements of `input_ids`, else
    the samples.
    """
    mask = batch.get("attention_mask")
    if marks_tokens(mask):
        return int(mask.sum())
    if isinstance(ids := batch.get("input_ids"), Tensor):
        return ids.numel()
    return num_samples


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor or array; the length of a list; nothing else has one."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(value.shape)
    return (len(value),) if isinstance(value, list | tuple) else ()
