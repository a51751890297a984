"""Checks of values in rows: one error with the rule, the values and the remedy, before any work
starts.
"""

from collections.abc import Callable, Collection
from typing import Any

from hf_ga.errors import DataError

NUM_SHOWN = 3
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
