"""Checks of values in rows: one error with the rule, the values and the remedy, before any work
starts.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hf_ga.errors import DataError

NUM_SHOWN = 3
LARGEST = float(np.finfo(np.float32).max)
WEIGHT_RULE = "weight_column must have a finite number of at least 0 in every row"
FIX_WEIGHTS = "Choose the column with --weight_column, or fix these rows (0 leaves a row out)."
FIX_LABELS = "Choose the column with --label_column, or fix these rows."  # a remedy


def check_values(
    split: str, values: Collection[Any], is_valid: Callable[[Any], bool], rule: str, remedy: str
) -> None:
    """Check one value per row.

    Raises:
        DataError: the rule, the number of rows that break it, their first values, and the remedy.

    >>> is_number = lambda value: value != "x"
    >>> check_values("train", [1, "x"], is_number, "labels must be numbers", "Fix these rows.")
    Traceback (most recent call last):
    hf_ga.errors.DataError: labels must be numbers, but 1 of 2 train rows have 'x'. Fix these rows.
    """
    wrong = [value for value in values if not is_valid(value)]
    if wrong:
        shown = ", ".join(f"{value!r:.80}" for value in wrong[:NUM_SHOWN])
        raise DataError(
            f"{rule}, but {len(wrong)} of {len(values)} {split} rows have {shown}. {remedy}"
        )


def is_given(value: Any) -> bool:
    """Whether a value is not None."""
    return value is not None


def is_number(value: Any) -> bool:
    """Whether a value is a number that is finite in float32, and no truth value."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= LARGEST


def is_weight(value: Any) -> bool:
    """Whether a value is a number of at least 0, finite in float32."""
    return is_number(value) and value >= 0


def check_weights(split: str, weights: Sequence[Any]) -> None:
    """Check the weights of the rows of a split.

    Raises:
        DataError: One is not a number of at least 0, or all are 0.
    """
    first = next((row for row, weight in enumerate(weights) if not is_weight(weight)), None)
    if first is not None:
        remedy = f"The first of them is {split} row {first}, counted from 0. {FIX_WEIGHTS}"
        check_values(split, weights, is_weight, WEIGHT_RULE, remedy)
    if not any(weights):
        raise DataError(
            f"weight_column is 0 in all {len(weights)} {split} rows, so there is no mean: "
            f"{FIX_WEIGHTS}"
        )
