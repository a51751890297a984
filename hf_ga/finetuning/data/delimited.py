"""CSV and TSV files: the separator of their columns, and which columns are numbers.

All cells are read as texts first. A column becomes numbers only if all its cells are, so the words
NA, null, None and nan stay texts, and a type never depends on the part of a file that was read.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, load_dataset

from hf_ga.errors import DataError

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
NUM_LOOKED_AT = 1000  # first rows, the only ones of a stream that tell the types of its columns
# Codes: 007, and numbers with more digits than an int64 or a float holds.
_CODE = r"^[+-]?(0\d|\d{19})"
_NUMBER = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")
_BOOLS = {"true": True, "false": False}
_NAMES = {"int64": "whole numbers", "float64": "numbers", "bool": "true or false"}


def separator_of(path: str) -> str:
    """Return the separator that divides the header into the most columns.

    Ties go to the usual separator of the extension: a tab for .tsv, a comma for .csv.
    """
    usual = "\t" if ".tsv" in Path(path).suffixes else ","
    num_columns = {separator: len(header(path, separator)) for separator in (usual, *SEPARATORS)}
    return max(num_columns, key=num_columns.__getitem__)


def header(path: str, separator: str) -> list[str]:
    """Return the names of the columns of a file."""
    return list(pd.read_csv(path, sep=separator, nrows=0).columns)


def load_delimited(paths: Sequence[str], *, streaming: bool) -> Dataset | IterableDataset:
    """Load the rows of files with the same columns; their separators may differ.

    Args:
        paths: The files, in the order of their rows.
        streaming: Read rows as they are needed. Columns are numbers if they are in the first
            1,000 rows.

    Raises:
        DataError: A file has no rows, or rows with more fields than its header.
    """
    parts = [_load_texts(path, streaming) for path in paths]
    names = parts[0].column_names
    rows = concatenate_datasets([part.select_columns(names) for part in parts])
    return _with_numbers(rows)


def _load_texts(path: str, streaming: bool) -> Dataset | IterableDataset:
    """The rows of one file with all cells as texts; an empty cell is None."""
    separator = separator_of(path)
    _check_first_row(path, separator)
    features = Features({name: Value("string") for name in header(path, separator)})
    rows = load_dataset(
        "csv",
        data_files=escape(path),  # `datasets` takes a name for a pattern
        split="train",
        streaming=streaming,
        features=features,
        sep=separator,
        keep_default_na=False,
        na_values=[""],
    )
    if separator == "\t" and not streaming:
        _check_quotes(path, rows)
    return rows


def _check_first_row(path: str, separator: str) -> None:
    """Refuse a first row with more fields than the header: pandas would take its first field for
    an index, which shifts all columns by one.
    """
    try:
        head = pd.read_csv(path, sep=separator, header=None, nrows=2, dtype=str)
    except pd.errors.ParserError as error:
        raise DataError(
            f"the rows of {path} have more fields than its header "
            f"({', '.join(header(path, separator))}), separated by {SEPARATORS[separator]}: put "
            "texts that contain the separator in double quotes, or name all columns."
        ) from error
    if len(head) < 2:
        raise DataError(f"{path} has no rows.")


def _check_quotes(path: str, rows: Dataset) -> None:
    """Refuse texts that look like several rows, joined by a quote that was not closed."""
    for name in rows.column_names:
        texts = rows.data.column(name)
        if pc.any(pc.match_substring_regex(texts, r"\t[^\n]*\n|\n[^\n]*\t")).as_py():
            raise DataError(
                f"the column {name!r} of {path} has texts with tabs and line breaks, as a double "
                "quote that is not closed makes of several rows: write quotes within texts twice, "
                "or remove them. If the texts are right, save the rows as JSON lines."
            )


def _with_numbers(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Convert the columns whose cells are all numbers, or all true or false."""
    if isinstance(rows, IterableDataset):
        table = pa.Table.from_pylist(list(islice(rows, NUM_LOOKED_AT)))
    else:
        table = rows.data.table
    types = {name: _type_of(table.column(name)) for name in table.column_names}
    types = {name: dtype for name, dtype in types.items() if dtype is not None}
    if not types:
        return rows
    numbers = {name: Value(dtype) for name, dtype in types.items()}
    features = Features({**rows.features, **numbers})
    return rows.map(partial(_convert, types=types), batched=True, features=features)


def _type_of(cells: pa.ChunkedArray) -> str | None:
    """The type of all cells of a column; None: they are texts."""
    first = cells.slice(0, NUM_LOOKED_AT).drop_null()
    if len(first) and _type_of_each(first) is None:  # spares a copy of long texts
        return None
    return _type_of_each(cells.drop_null())


def _type_of_each(cells: pa.ChunkedArray) -> str | None:
    texts = pc.utf8_trim_whitespace(cells.cast(pa.string()))
    is_code = pc.match_substring_regex(texts, _CODE)
    if not len(texts) or pc.any(is_code).as_py():
        return None
    digits = pc.replace_substring_regex(texts, r"^\+", "")
    for dtype in ("int64", "float64"):
        with suppress(pa.ArrowInvalid):
            numbers = pc.cast(digits, dtype)
            if pc.all(pc.is_finite(numbers)).as_py():  # `nan` is a text
                return dtype
    is_truth = pc.is_in(pc.utf8_lower(texts), pa.array(["true", "false"]))
    return "bool" if pc.all(is_truth).as_py() else None


def _convert(rows: dict[str, list], types: dict[str, str]) -> dict[str, list[Any]]:
    return {
        name: [None if text is None else _read(text, dtype) for text in rows[name]]
        for name, dtype in types.items()
    }


def _read(text: str, dtype: str) -> bool | int | float:
    """Return the value of a cell.

    Raises:
        DataError: If the text is none of this type: a later row of a stream may be of another one.
    """
    cell = text.strip().lower()
    if dtype == "bool" and cell in _BOOLS:
        return _BOOLS[cell]
    # Python also reads 1_0, nan and inf, which are no numbers in the first rows.
    is_number = _NUMBER.fullmatch(cell) and not re.match(_CODE, cell)
    if dtype != "bool" and is_number:
        with suppress(ValueError):
            return {"int64": int, "float64": float}[dtype](cell)
    raise DataError(
        f"the first {NUM_LOOKED_AT:,} rows of a column are {_NAMES[dtype]}, but a later one is "
        f"{text!r}: fix the row, or read the file without streaming, which looks at all rows."
    )
