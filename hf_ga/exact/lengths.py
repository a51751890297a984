"""Lengths of samples, where finding them costs next to nothing."""

import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_ga.exact.batches import as_batch, count_padded_elements
from hf_ga.exact.fetch import Collate
from hf_ga.exact.generators import preserved_random_states

if TYPE_CHECKING:
    from datasets import Dataset


def find_lengths(dataset: Any, collate_fn: Collate) -> np.ndarray | None:
    """Find the tokens of each sample: a `length` column or the lengths of `input_ids`, of a
    `datasets.Dataset` or of a list of dicts.

    Returns:
        int64, shape (len(dataset),). None where there is no such column, or where `collate_fn` pads
        all samples to one width, so that lengths would not determine the cost of a micro-batch.
    """
    lengths = _of_columns(dataset) if _is_hf_dataset(dataset) else _of_list(dataset)
    if lengths is None or lengths.min() == lengths.max():
        return lengths
    with preserved_random_states():
        ends = [dataset[int(i)] for i in (lengths.argmin(), lengths.argmax())]
        narrow, wide = (
            count_padded_elements(as_batch(collate_fn([copy.copy(sample)])), 1) for sample in ends
        )
    return lengths if narrow < wide else None


def _is_hf_dataset(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`. The package may not be installed, so it is not imported
    here: as long as nobody has imported it, there are none of its datasets.
    """
    module = sys.modules.get("datasets.arrow_dataset")
    return module is not None and isinstance(dataset, module.Dataset)


def _of_list(samples: Any) -> np.ndarray | None:
    is_list_of_dicts = isinstance(samples, list | tuple) and isinstance(samples[0], Mapping)
    if not is_list_of_dicts:
        return None
    try:
        return np.array([len(sample["input_ids"]) for sample in samples], np.int64)
    except (KeyError, TypeError, IndexError):
        return None


def _of_columns(dataset: "Dataset") -> np.ndarray | None:
    import pyarrow as pa
    import pyarrow.compute as pc

    name = next((name for name in ("length", "input_ids") if name in dataset.column_names), None)
    if name is None:
        return None
    column = dataset.select_columns([name]).with_format("arrow")[:][name]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_value_length(column)
    is_known = pa.types.is_integer(column.type) and not column.null_count
    return column.to_numpy().astype(np.int64) if is_known else None
