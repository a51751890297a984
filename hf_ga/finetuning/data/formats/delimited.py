"""Loads CSV and TSV files: detects the separator, and which columns are numbers or booleans.

All cells are read as strings first. A column is converted to numbers only if all its cells are
numbers, so the words NA, null, None and nan stay strings, and the type does not depend on which
part of the file was read (except of a stream).
"""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value

from hf_ga.errors import DataError

# Separator -> its name in the log.
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# The types of a stream's columns are inferred from this many rows.
NUM_INFERENCE_ROWS = 1000
# Codes, which are no numbers: 007, or more digits than an int64 or a float holds.
_WHOLE = r"-?(0|[1-9]\d{0,17})"
_FLOAT = rf"({_WHOLE}(\.\d*)?|-?\.\d+)([eE][+-]?[012]?\d?\d)?"
# Type -> the name and the pattern of its cells.
_TYPES = {
    "int64": ("whole numbers", f"^{_WHOLE}$"),
    "float64": ("numbers", f"^{_FLOAT}$"),
    "bool": ("true or false", "(?i)^(true|false)$"),
}


def detect_separator(path: str) -> str:
    """Detect the separator of a CSV or TSV file: the one that splits the header into the most
    columns.

    Ties go to the usual separator of the file's extension: a tab for .tsv, a comma for others.
    """
    usual_separator = "\t" if ".tsv" in Path(path).suffixes else ","
    # The first one of equals wins.
    candidates = (usual_separator, *SEPARATORS)
    num_columns = {separator: len(column_names(path, separator)) for separator in candidates}
    return max(num_columns, key=num_columns.__getitem__)


def column_names(path: str, separator: str) -> list[str]:
    """Return the column names in the header of a CSV or TSV file."""
    return list(pd.read_csv(path, sep=separator, nrows=0).columns)


def builder_options(path: str) -> tuple[dict[str, Any], str | None]:
    """Return the options with which `datasets` reads a CSV or TSV file with all cells as strings
    (see `convert_columns`); an empty cell is None.

    Args:
        path: The file.

    Returns:
        (options, a line for the log on the separator if it is not a comma)

    Raises:
        DataError: If the file has no rows, or rows with more fields than its header.
    """
    separator = detect_separator(path)
    _check_first_row(path, separator)
    features = Features({name: Value("string") for name in column_names(path, separator)})
    options = {
        "features": features,
        "sep": separator,
        "keep_default_na": False,
        "na_values": [""],
    }
    if separator == ",":
        return options, None
    return options, f"{Path(path).name}: columns separated by {SEPARATORS[separator]}"


def _check_first_row(path: str, separator: str) -> None:
    """Check that the first row of a CSV or TSV file has no more fields than the header."""
    try:
        pd.read_csv(path, sep=separator, header=None, nrows=2, dtype=str)
    except pd.errors.ParserError as error:
        raise DataError(
            f"the rows of {path} have more fields than its header "
            f"({', '.join(column_names(path, separator))}), separated by {SEPARATORS[separator]}: "
            "put texts that contain the separator in double quotes, or name all columns."
        ) from error


def check_quotes(path: str, rows: Dataset) -> None:
    """Check that no cell of a TSV file looks like several rows joined by an unclosed quote: a text
    with a tab and a line break.

    Raises:
        DataError: If one does.
    """
    for name in rows.column_names:
        texts = rows.data.column(name)
        if pc.any(pc.match_substring_regex(texts, r"\t[^\n]*\n|\n[^\n]*\t")).as_py():
            raise DataError(
                f"the column {name!r} of {path} has texts with tabs and line breaks, as a double "
                "quote that is not closed makes of several rows: write quotes within texts twice, "
                "or remove them. If the texts are right, save the rows as JSON lines."
            )


def convert_columns(rows: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """Convert the string columns of CSV files whose cells are all numbers, or all "true" or
    "false".

    Args:
        rows: The rows of all files. The columns of a stream are inferred from its first 1,000 rows.
    """
    if isinstance(rows, IterableDataset):
        table = pa.Table.from_pylist(list(rows.take(NUM_INFERENCE_ROWS)))
    else:
        table = rows.data.table
    dtypes = {}
    for name in table.column_names:
        cells = table.column(name)
        # Most columns of texts are recognized by their first rows, without a copy of all texts.
        dtype = _infer_type(cells.slice(0, NUM_INFERENCE_ROWS))
        dtype = dtype and _infer_type(cells)
        if dtype is not None:
            dtypes[name] = dtype
    if not dtypes:
        return rows
    converted = {name: Value(dtype) for name, dtype in dtypes.items()}
    features = Features({**rows.features, **converted})
    return rows.map(partial(_cast_columns, dtypes=dtypes), batched=True, features=features)


def _cast_columns(rows: dict[str, list], dtypes: dict[str, str]) -> dict[str, list]:
    """Convert the cells of the CSV columns that are numbers or booleans; None stays None."""
    converted = {}
    for name, dtype in dtypes.items():
        cells = _strip(pa.array(rows[name], pa.string()))
        type_name, pattern = _TYPES[dtype]
        # A later row of a stream may have another type, and a cast would make 7 of 007.
        others = cells.filter(pc.invert(pc.match_substring_regex(cells, pattern)))
        if len(others):
            raise DataError(
                f"the first {NUM_INFERENCE_ROWS:,} rows of a column are {type_name}, but a later "
                f"one is {others[0].as_py()!r}: fix the row, or read the file without streaming, "
                "which inspects all rows."
            )
        converted[name] = pc.cast(cells, dtype).to_pylist()
    return converted


def _strip(cells: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Remove white space and a plus sign, which casts do not accept."""
    return pc.replace_substring_regex(pc.utf8_trim_whitespace(cells), r"^\+", "")


def _infer_type(cells: pa.Array | pa.ChunkedArray) -> str | None:
    """Return int64, float64 or bool if all cells that are not empty are such; otherwise None."""
    texts = _strip(cells.drop_null().cast(pa.string()))
    for dtype, (_, pattern) in _TYPES.items():
        if len(texts) and pc.all(pc.match_substring_regex(texts, pattern)).as_py():
            return dtype
    return None
