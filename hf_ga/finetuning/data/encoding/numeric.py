"""Columns of numbers that a file stores as another type (strings with a decimal comma, Decimals),
converted to floats.
"""

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import check_values, replace_column

_WITH_POINT = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")  # 1 1.5 .5 1e3
_WITH_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?([eE][+-]?\d+)?\s*")  # 1 1,5 1,5e3
_MAY_BE_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")  # 1,234


def convert_to_numbers(
    rows: DatasetDict, columns: Mapping[str, str], notes: list[str]
) -> DatasetDict:
    """Convert the columns that must be numbers to float64 if they are Decimals, or strings with a
    decimal comma. Strings with a decimal point are checked, but stay strings.

    Args:
        rows: The rows of all splits, which may lack the columns.
        columns: Flag -> the column of numbers that it names, such as {"weight_column": "stars"}.
        notes: A line for the log on each column with decimal commas is appended to it.

    Returns:
        The rows; converted columns are last.

    Raises:
        DataError: If a string is not a number, a column has decimal commas and decimal points, or
            all its commas may separate thousands.
    """
    converted = DatasetDict()
    for split, dataset in rows.items():
        for flag, column in columns.items():
            if column in dataset.column_names:
                dataset = _convert_column(dataset, split, flag, column, notes)
        converted[split] = dataset
    return converted


def _convert_column(
    dataset: Dataset, split: str, flag: str, column: str, notes: list[str]
) -> Dataset:
    """Convert a column of a split to float64 if it has Decimals or a decimal comma."""
    dtype = dataset.features.arrow_schema.field(column).type
    if pa.types.is_decimal(dtype):
        return _replace_by_floats(dataset, column, dataset[column][:])
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        return dataset
    texts = dataset[column][:]
    rule = f"{flag} must name a column of numbers"
    cells = ["0" if text is None else text for text in texts]
    with_comma = [text for text in cells if "," in text]
    if with_comma:
        rule += " with a decimal comma"
    check_values(
        split,
        cells,
        (_WITH_COMMA if with_comma else _WITH_POINT).fullmatch,
        rule=rule,
        remedy=f"Choose another column with --{flag}, or fix these rows.",
    )
    if not with_comma:
        return dataset
    if all(map(_MAY_BE_THOUSANDS.fullmatch, with_comma)):
        example = with_comma[0]
        as_decimal = example.replace(",", ".")
        as_thousands = example.replace(",", "")
        raise DataError(
            f"{flag} {column!r} has texts such as {example!r} in the {split} rows, which may "
            f"be {as_decimal} or {as_thousands}: write them with a decimal point, without "
            "separators of thousands."
        )
    note = f"numbers of the column {column!r} have a decimal comma"
    if note not in notes:
        notes.append(note)
    with_point = [None if text is None else text.replace(",", ".") for text in texts]
    return _replace_by_floats(dataset, column, with_point)


def _replace_by_floats(dataset: Dataset, column: str, values: list[Any]) -> Dataset:
    """Replace a column of a dataset by its values as float64; it becomes the last column."""
    numbers = [None if value is None else float(value) for value in values]
    return replace_column(dataset, column, numbers, Value("float64"))
