"""Columns of numbers: labels of a regression, scores of pairs, weights of rows."""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from datasets import Dataset, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import FIX_LABELS, check_values, replace_column

MAX_FLOAT32 = float(np.finfo(np.float32).max)
# What the numbers of a column must be: by `Task.labels`, and of the weights.
RULES = {
    "number": "labels of a regression must be finite float32 numbers",
    "pairs": "the score of a pair must be a finite number, the higher the more alike",
    "weight": "weight_column must have a finite number of at least 0 in every row",
}
FIX_WEIGHTS = "Choose the column with --weight_column, or fix these rows (0 leaves a row out)."
_WITH_POINT = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*")  # 1 1.5 .5 1e3
_WITH_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?([eE][+-]?\d+)?\s*")  # 1 1,5 1,5e3
_MAY_BE_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2},\d{3}\s*")  # 1,234


def encode_numbers(dataset: Dataset, split: str, role: str, kind: str, notes: list[str]) -> Dataset:
    """Check the numbers of a column in the rows of a split, and convert them to float64.

    Args:
        dataset: The rows of the split.
        split: Its name, for errors.
        role: The column, `label` or `weight`, which becomes the last one.
        kind: What the numbers are, a key of `RULES`.
        notes: A line for the log is appended to it if the column has decimal commas.

    Raises:
        DataError: See `read_numbers`; or if all weights of a split are 0.
    """
    values = dataset[role][:]
    numbers = read_numbers(split, values, kind)
    if kind == "weight" and not any(numbers):
        raise DataError(
            f"weight_column is 0 in all {len(dataset)} {split} rows, so there is no mean: "
            f"{FIX_WEIGHTS}"
        )
    note = f"numbers of the {role}s have a decimal comma"
    if _find_commas(values) and note not in notes:
        notes.append(note)
    return replace_column(dataset, role, numbers, Value("float64"))


def read_numbers(split: str, values: Sequence[Any], kind: str) -> list[float]:
    """Convert values to floats: ints, floats, Decimals, or texts with a decimal point or comma.

    Args:
        split: Name of the split, for errors.
        values: One value per row.
        kind: What the numbers are, a key of `RULES`.

    Raises:
        DataError: If a value is not a number, or not finite in float32; if a weight is negative; if
            the texts have decimal commas and decimal points, or all commas may separate thousands.
    """
    rule = RULES[kind]
    with_comma = _find_commas(values)
    if with_comma and all(map(_MAY_BE_THOUSANDS.fullmatch, with_comma)):
        example = with_comma[0]
        raise DataError(
            f"{rule}, but the {split} rows have texts such as {example!r}, which may be "
            f"{example.replace(',', '.')} or {example.replace(',', '')}: write them with a decimal "
            "point, without separators of thousands."
        )
    pattern = _WITH_COMMA if with_comma else _WITH_POINT

    def read(value: Any) -> Any:
        """Return a Decimal or a text of a number as a float, other values as they are."""
        if isinstance(value, str) and pattern.fullmatch(value):
            return float(value.replace(",", "."))
        return float(value) if isinstance(value, Decimal) else value

    minimum = 0 if kind == "weight" else -MAX_FLOAT32
    numbers = list(map(read, values))
    check_values(
        split,
        numbers,
        lambda value: isinstance(value, int | float) and minimum <= value <= MAX_FLOAT32,
        rule=f"{rule} (with a decimal comma)" if with_comma else rule,
        remedy=FIX_WEIGHTS if kind == "weight" else FIX_LABELS,
    )
    return list(map(float, numbers))


def _find_commas(values: Sequence[Any]) -> list[str]:
    """Return the texts among values that have a comma."""
    return [value for value in values if isinstance(value, str) and "," in value]
