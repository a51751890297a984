"""Columns of rows and of samples that a model cannot take, checked as a whole: types, words, bytes that are no text, token ids."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, List, Value

from hf_ga.data.columns import flag_of
from hf_ga.data.row_checks import NUM_SHOWN, RowsError
from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL

TEXTS = {"text", "text_pair", "question", "context", "target"}


def check_columns(rows: DatasetDict) -> None:
    """Check that texts are strings, words lists of strings, and that all of them are valid UTF-8.

    Raises:
        DataError: a column of another type. RowsError: rows of another type, words that are null, bytes that are no text.
    """
    for split, dataset in rows.items():
        for role, feature in dataset.features.items():
            if role in TEXTS and not is_text(feature):
                what = "text" if role == "text_pair" else role
                rule = f"the {what} column of the {split} rows holds {feature}, not strings"
                _refuse_others(dataset, split, role, rule, lambda value: isinstance(value, str))
            if role == "tokens" and not is_text(getattr(feature, "feature", None)):
                rule = f"the words of the {split} rows must be lists of strings, but their column holds {feature}"
                _refuse_others(dataset, split, role, rule, _is_words)
        _check_words(dataset, split)
        _check_encoding(dataset, split)


def is_text(feature: Any) -> bool:
    """Whether a column holds strings, or nothing at all."""
    return isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _refuse_others(dataset: Dataset, split: str, role: str, rule: str, fits: Callable[[Any], bool]) -> None:
    """Where only some rows are of another type, which; otherwise the column is another than what was meant."""
    values = list(dataset[role])
    wrong = [number for number, value in enumerate(values) if value is not None and not fits(value)]
    rule = f"{rule}: choose with --{flag_of(role)}."
    if not wrong or len(wrong) == len(values):
        raise DataError(rule)
    raise RowsError(split, wrong, len(values), [f"holds {values[number]!r:.60}" for number in wrong[:NUM_SHOWN]], rule)


def _check_words(dataset: Dataset, split: str) -> None:
    if not isinstance(dataset.features.get("tokens"), List):
        return
    nulls = _rows_with_null(dataset.with_format("arrow")["tokens"][:]) if len(dataset) else np.zeros(0, int)
    if len(nulls):
        rule = "every word must be a string: leave the row out, or its words that are missing."
        raise RowsError(split, nulls.tolist(), len(dataset), ["has a word that is null"] * len(nulls), rule)


def _rows_with_null(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """The numbers of the lists in which something is null."""
    lists = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lists = pa.concat_arrays(lists.chunks) if isinstance(lists, pa.ChunkedArray) else lists
    parents, is_null = pc.list_parent_indices(lists), pc.is_null(pc.list_flatten(lists))
    return np.unique(parents.filter(is_null).to_numpy(zero_copy_only=False))


def _check_encoding(dataset: Dataset, split: str) -> None:
    """Files may hold any bytes: those that are no UTF-8 would only be found when a row is read."""
    for name in dataset.column_names:
        try:
            dataset.data.column(name).validate(full=True)
        except pa.ArrowInvalid:  # some row of the file, maybe of another split
            wrong = [number for number, value in enumerate(_one_by_one(dataset, name)) if not _is_valid(value)]
            if wrong:
                rule = "texts must be UTF-8: convert the file, or leave these rows out."
                shown = [f"has bytes in {name!r} that are no UTF-8"] * len(wrong)
                raise RowsError(split, wrong, len(dataset), shown, rule) from None


def _one_by_one(dataset: Dataset, name: str) -> Iterator[pa.Array]:
    for batch in dataset.select_columns([name]).with_format("arrow").iter(1000):
        column = batch.column(0)
        yield from (column.slice(i, 1) for i in range(len(column)))


def _is_valid(value: pa.ChunkedArray) -> bool:
    try:
        pa.concat_arrays(value.chunks).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def check_token_ids(splits: Mapping[str, Dataset], vocabulary: int) -> None:
    """Check that all token ids of the samples are within the model's embedding.

    Raises:
        RowsError: samples (by their place among those that were kept) with other ids.
    """
    for split, dataset in splits.items():
        for name in {"input_ids", "labels"} & set(dataset.column_names):
            wrong: list[int] = []
            least = 0 if name == "input_ids" else IGNORED_LABEL
            for start, batch in enumerate(dataset.select_columns([name]).with_format("arrow").iter(1000)):
                wrong += (1000 * start + _rows_beyond(batch.column(0), least, vocabulary)).tolist()
            if wrong:
                shown = [f"has token {_worst(dataset[number][name], least, vocabulary)}" for number in wrong[:NUM_SHOWN]]
                rule = f"the model has only tokens 0 to {vocabulary - 1}: use the tokenizer that belongs to it."
                raise RowsError(split, wrong, len(dataset), shown, rule)


def _rows_beyond(column: pa.ChunkedArray, least: int, vocabulary: int) -> np.ndarray:
    lists = pa.concat_arrays(column.chunks)
    ids = pc.list_flatten(lists)
    found = pc.or_(pc.less(ids, least), pc.greater_equal(ids, vocabulary))
    return np.unique(pc.list_parent_indices(lists).filter(found).to_numpy(zero_copy_only=False))


def _worst(ids: Sequence[int], least: int, vocabulary: int) -> int:
    return next(token for token in ids if not least <= token < vocabulary)
