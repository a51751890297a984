"""Checks of the values in a dataset's rows: one error with the rule, the values and the remedy,
before any work starts.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from hf_ga.errors import DataError

NUM_SHOWN = 3  # maximum number of values that an error lists
MAX_FLOAT32 = float(np.finfo(np.float32).max)
FIX_WEIGHTS = "Choose the column with --weight_column, or fix these rows (0 leaves a row out)."
FIX_LABELS = "Choose the column with --label_column, or fix these rows."


def check_values(
    split: str,
    values: Collection[Any],
    is_valid: Callable[[Any], bool],
    *,
    rule: str,
    remedy: str = FIX_LABELS,
    has_row_numbers: bool = True,
) -> None:
    """Check one value of each row in a split of a dataset, such as its label, weight or text.

    Args:
        split: Name of the split, for the error.
        values: One value per row.
        is_valid: Returns whether a value is valid.
        rule: What values must be, the beginning of the error.
        remedy: What to do, the end of the error.
        has_row_numbers: Whether `values` are those of the whole split, so that their indices are
            row numbers; False for a part of a stream.

    Raises:
        DataError: If any value is invalid. The message has the rule, the number of rows that
            break it, their first values, the first row number (0-based), and the remedy.

    >>> check_values("train", [1, "x"], is_number, rule="labels must be numbers")
    Traceback (most recent call last):
    hf_ga.errors.DataError: labels must be numbers, but 1 of 2 train rows have 'x' (first: row 1, \
counted from 0). Choose the column with --label_column, or fix these rows.
    """
    invalid = {row: value for row, value in enumerate(values) if not is_valid(value)}
    if not invalid:
        return
    examples = ", ".join(f"{value!r:.80}" for value in list(invalid.values())[:NUM_SHOWN])
    where = f" (first: row {min(invalid)}, counted from 0)" if has_row_numbers else ""
    raise DataError(
        f"{rule}, but {len(invalid)} of {len(values)} {split} rows have {examples}{where}. {remedy}"
    )


def is_number(value: Any) -> bool:
    """Return whether a label or weight of a row is an int or float that is finite in float32; a
    bool is not.
    """
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= MAX_FLOAT32


def is_text(value: Any) -> bool:
    """Return whether a value in a dataset's column of texts is a string, or None."""
    return value is None or isinstance(value, str)


def is_list_of_texts(value: Any) -> bool:
    """Return whether a value in a dataset's column is a list of strings, some of which may be
    None.
    """
    return isinstance(value, list) and all(map(is_text, value))


def replace_column(
    dataset: Dataset, name: str, values: Iterable[Any], feature: Any = None
) -> Dataset:
    """Replace the values of a dataset's column; it becomes the last column.

    Args:
        dataset: The rows of a split.
        name: The column.
        values: Its new values.
        feature: Their type. None: inferred.
    """
    return dataset.remove_columns(name).add_column(name, list(values), feature=feature)


def check_weights(split: str, weights: Sequence[Any], *, has_row_numbers: bool = True) -> None:
    """Check that the weights of rows in the loss are numbers that are finite in float32 and at
    least 0.

    Args:
        split: Name of the split, for the error.
        weights: The value of the weight column in each row.
        has_row_numbers: See `check_values`.

    Raises:
        DataError: If one is not.
    """
    rule = "weight_column must have a finite number of at least 0 in every row"
    check_values(
        split,
        weights,
        lambda value: is_number(value) and value >= 0,
        rule=rule,
        remedy=FIX_WEIGHTS,
        has_row_numbers=has_row_numbers,
    )
