"""Checks of the values in a dataset's rows: one error with the rule, the values and the remedy,
before any work starts.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from datasets import Dataset

from hf_ga.errors import DataError

NUM_SHOWN = 3  # maximum number of values that an error lists
FIX_LABELS = "Choose the column with --label_column, or fix these rows."


def check_values(
    split: str,
    values: Collection[Any],
    is_valid: Callable[[Any], bool],
    *,
    rule: str,
    remedy: str = FIX_LABELS,
) -> None:
    """Check one value of each row in a split of a dataset, such as its label, weight or text.

    Args:
        split: Name of the split, for the error.
        values: One value per row.
        is_valid: Returns whether a value is valid.
        rule: What values must be, the beginning of the error.
        remedy: What to do, the end of the error.

    Raises:
        DataError: If any value is invalid. The message has the rule, the number of rows that
            break it, their first values, the first row number (0-based), and the remedy.

    >>> check_values("train", ["a", 1], is_text, rule="labels must be texts")
    Traceback (most recent call last):
    hf_ga.errors.DataError: labels must be texts, but 1 of 2 train rows have 1 (first: row 1, \
counted from 0). Choose the column with --label_column, or fix these rows.
    """
    invalid = {row: value for row, value in enumerate(values) if not is_valid(value)}
    if not invalid:
        return
    examples = ", ".join(f"{value!r:.80}" for value in list(invalid.values())[:NUM_SHOWN])
    raise DataError(
        f"{rule}, but {len(invalid)} of {len(values)} {split} rows have {examples} (first: row "
        f"{min(invalid)}, counted from 0). {remedy}"
    )


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
