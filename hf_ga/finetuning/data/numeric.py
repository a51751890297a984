"""Columns of numbers that a file stores as another type (strings with a decimal comma, Decimals),
converted to floats.
"""

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import check_values

_EXPONENT = r"([eE][+-]?\d+)?"
_WITH_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?" + _EXPONENT + r"\s*")
_WITH_POINT = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)" + _EXPONENT + r"\s*")
_MAY_BE_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")  # 1,234
_REMEDY = "Choose another column with --{flag}, or fix these rows."


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
    converted = dict(rows)
    for split, dataset in rows.items():
        for flag, column in columns.items():
            if column in dataset.column_names:
                dataset = _convert_column(dataset, split, flag, column, notes)
        converted[split] = dataset
    return DatasetDict(converted)


def _convert_column(
    dataset: Dataset, split: str, flag: str, column: str, notes: list[str]
) -> Dataset:
    """Convert one column of a split to float64 if it has Decimals or strings with a decimal comma.

    Args:
        dataset: The rows of the split.
        split: Name of the split, for errors.
        flag: The command-line flag that names the column, for errors.
        column: The column, which must contain numbers.
        notes: A line for the log on decimal commas is appended to it, once per column.

    Returns:
        The rows; the column is the last one if it was converted.

    Raises:
        DataError: See `convert_to_numbers`.
    """
    dtype = dataset.features.arrow_schema.field(column).type
    if pa.types.is_decimal(dtype):
        return _replace_by_floats(dataset, column, dataset[column][:])
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        return dataset
    texts = dataset[column][:]
    rule = f"{flag} must name a column of numbers"
    remedy = _REMEDY.format(flag=flag)
    check_values(split, texts, _is_number_or_none, rule=rule, remedy=remedy)
    with_comma = [text for text in texts if text is not None and "," in text]
    if not with_comma:
        return dataset
    check_values(split, texts, _has_no_point, rule=f"{rule} with a decimal comma", remedy=remedy)
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


def _is_number_or_none(text: str | None) -> bool:
    """Return whether a cell of a column of numbers, a string, is a number, with a decimal comma or
    a decimal point; None passes.

    >>> [_is_number_or_none(text) for text in ("1,5", "-.5e3", "1,234.5", None)]
    [True, True, False, True]
    """
    return text is None or bool(_WITH_COMMA.fullmatch(text) or _WITH_POINT.fullmatch(text))


def _has_no_point(text: str | None) -> bool:
    """Return whether a cell of a column with decimal commas, a string, has no decimal point; None
    passes.
    """
    return text is None or "." not in text


def _replace_by_floats(dataset: Dataset, column: str, values: list[Any]) -> Dataset:
    """Replace a column of a dataset by its values as float64; it becomes the last column.

    Args:
        dataset: The rows.
        column: The column to replace.
        values: A value per row that `float` accepts (Decimal or string), or None, which stays None.
    """
    numbers = [None if value is None else float(value) for value in values]
    dataset = dataset.remove_columns(column)
    return dataset.add_column(column, numbers, feature=Value("float64"))
