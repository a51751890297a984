"""Find the length of every sample of a dataset, if that takes almost no time."""

import copy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_ga.draws.generators import preserved_random_states
from hf_ga.loading.batches import as_batch, count_padded_elements
from hf_ga.loading.fetch import Collate

if TYPE_CHECKING:
    from datasets import Dataset


def find_lengths(dataset: Any, collate_fn: Collate) -> np.ndarray | None:
    """Find the number of tokens of each sample, to plan windows by length, without tokenizing or
    loading all samples.

    For a `datasets.Dataset` they are read from a `length` column, or are the lengths of the lists
    in `input_ids`. For a list or tuple of dicts they are the lengths of `input_ids`.

    Args:
        dataset: Any dataset.
        collate_fn: Called on the shortest and on the longest sample alone, to see whether it pads
            both to the same length.

    Returns:
        Number of tokens per sample: int64, shape (len(dataset),). None if they cannot be read that
        way, or if `collate_fn` pads all samples to a fixed length, so that the number of tokens
        does not determine the cost of a micro-batch.
    """
    if _is_hf_dataset(dataset):
        lengths = _lengths_from_columns(dataset)
    else:
        lengths = _lengths_from_list(dataset)
    if lengths is None or lengths.min() == lengths.max():
        return lengths
    with preserved_random_states():
        shortest = dataset[int(lengths.argmin())]
        longest = dataset[int(lengths.argmax())]
        shortest_padded = count_padded_elements(as_batch(collate_fn([copy.copy(shortest)])), 1)
        longest_padded = count_padded_elements(as_batch(collate_fn([copy.copy(longest)])), 1)
    return lengths if shortest_padded < longest_padded else None


def _is_hf_dataset(dataset: Any) -> bool:
    """Whether an object is a `datasets.Dataset`, without importing the optional package `datasets`:
    if nobody has imported it yet, the object cannot be one.
    """
    module = sys.modules.get("datasets.arrow_dataset")
    return module is not None and isinstance(dataset, module.Dataset)


def _lengths_from_list(samples: Any) -> np.ndarray | None:
    """Return the length of `input_ids` of each sample in a list or tuple of dicts (int64); None if
    `samples` is something else, or a sample has no `input_ids` with a length.
    """
    is_list_of_dicts = isinstance(samples, list | tuple) and isinstance(samples[0], Mapping)
    if not is_list_of_dicts:
        return None
    try:
        return np.array([len(sample["input_ids"]) for sample in samples], np.int64)
    except (KeyError, TypeError, IndexError):
        return None


def _lengths_from_columns(dataset: "Dataset") -> np.ndarray | None:
    """Return the numbers, or the lengths of the lists, in the column `length`, or else `input_ids`,
    of a `datasets.Dataset` (int64). None without such a column, or if values are missing.
    """
    # Lazily, as `datasets`, which brings pyarrow, may not be installed.
    import pyarrow as pa
    import pyarrow.compute as pc

    if "length" in dataset.column_names:
        name = "length"
    elif "input_ids" in dataset.column_names:
        name = "input_ids"
    else:
        return None
    column = dataset.select_columns([name]).with_format("arrow")[:][name]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_value_length(column)
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return column.to_numpy().astype(np.int64)
