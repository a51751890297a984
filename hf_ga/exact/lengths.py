"""Lengths of samples, where finding them costs next to nothing."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_ga.exact.batches import as_batch, widest
from hf_ga.exact.fetch import Collate
from hf_ga.exact.generators import preserved_random_states


def find_lengths(dataset: Any, collate_fn: Collate) -> np.ndarray | None:
    """Tokens of each sample: a `length` column or the lengths of `input_ids`, of a `datasets.Dataset` or of a list of dicts.

    Returns:
        int64, shape (len(dataset),). None where there is no such column, or where `collate_fn` pads all samples to one width, so
        that lengths would not tell what a micro-batch costs.
    """
    lengths = _of_list(dataset) if isinstance(dataset, list | tuple) else _of_columns(dataset)
    if lengths is None or lengths.min() == lengths.max():
        return lengths
    with preserved_random_states():
        narrow, wide = (_width(dataset, int(i), collate_fn) for i in (lengths.argmin(), lengths.argmax()))
    return lengths if narrow < wide else None


def _of_list(samples: list[Any]) -> np.ndarray | None:
    try:
        return np.array([len(sample["input_ids"]) for sample in samples], np.int64)
    except (KeyError, TypeError, IndexError):
        return None


def _of_columns(dataset: Any) -> np.ndarray | None:
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "with_format"):
        return None
    if name := next((name for name in ("length", "input_ids") if name in names), None):
        column = dataset.select_columns([name]).with_format("arrow")[:][name]
        if name == "input_ids":
            column = pc.list_value_length(column) if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) else None
        if column is not None and pa.types.is_integer(column.type) and not column.null_count:
            return column.to_numpy().astype(np.int64)
    return None


def _width(dataset: Any, index: int, collate_fn: Collate) -> int:
    """Elements of the largest tensor of a batch of one sample."""
    sample: Mapping[str, Any] = copy.copy(dataset[index])
    return widest(as_batch(collate_fn([sample])), 1)
