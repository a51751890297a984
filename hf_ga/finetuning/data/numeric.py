"""Columns of numbers that a file holds in another type: texts with a decimal comma, Decimals."""

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
_IN_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")
_REMEDY = "Choose another column with --{flag}, or fix these rows."


def as_numbers(rows: DatasetDict, columns: Mapping[str, str], facts: list[str]) -> DatasetDict:
    """Convert columns to float64 if they are Decimals or texts of which all have a decimal comma.

    Texts with a decimal point are left as they are.

    Args:
        rows: Splits; they may lack the columns.
        columns: Flag that names a column of numbers -> the column.
        facts: A line on each column with decimal commas is appended to it.

    Returns:
        The rows with the converted columns at the end.

    Raises:
        DataError: Texts that are no numbers, some with a comma and some with a point, or that may
            be thousands.
    """
    converted = dict(rows)
    for split, dataset in rows.items():
        for flag, column in columns.items():
            if column in dataset.column_names:
                dataset = _with_numbers(dataset, split, flag, column, facts)
        converted[split] = dataset
    return DatasetDict(converted)


def _with_numbers(
    dataset: Dataset, split: str, flag: str, column: str, facts: list[str]
) -> Dataset:
    dtype = dataset.features.arrow_schema.field(column).type
    if pa.types.is_decimal(dtype):
        return _replaced(dataset, column, dataset[column][:])
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        return dataset
    texts = dataset[column][:]
    rule = f"{flag} must name a column of numbers"
    remedy = _REMEDY.format(flag=flag)
    check_values(split, texts, _is_number_or_none, rule, remedy)
    with_comma = [text for text in texts if text is not None and "," in text]
    if not with_comma:
        return dataset
    check_values(split, texts, _has_no_point, f"{rule} with a decimal comma", remedy)
    if all(map(_IN_THOUSANDS.fullmatch, with_comma)):
        point, joined = with_comma[0].replace(",", "."), with_comma[0].replace(",", "")
        raise DataError(
            f"{flag} {column!r} has texts such as {with_comma[0]!r} in the {split} rows, which may "
            f"be {point} or {joined}: write them with a decimal point, without separators of "
            "thousands."
        )
    fact = f"numbers of the column {column!r} have a decimal comma"
    if fact not in facts:
        facts.append(fact)
    numbers = [None if text is None else text.replace(",", ".") for text in texts]
    return _replaced(dataset, column, numbers)


def _is_number_or_none(text: str | None) -> bool:
    return text is None or bool(_WITH_COMMA.fullmatch(text) or _WITH_POINT.fullmatch(text))


def _has_no_point(text: str | None) -> bool:
    return text is None or "." not in text


def _replaced(dataset: Dataset, column: str, values: list[Any]) -> Dataset:
    numbers = [None if value is None else float(value) for value in values]
    dataset = dataset.remove_columns(column)
    return dataset.add_column(column, numbers, feature=Value("float64"))
