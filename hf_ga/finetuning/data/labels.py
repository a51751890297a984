"""Label columns -> targets of a head: class ids with their names, sets of class ids, numbers, or a
tag per word.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict

from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.finetuning.data.checks import FIX_LABELS, NUM_SHOWN, check_values

LARGEST = float(np.finfo(np.float32).max)


def encode_labels(
    rows: DatasetDict, kind: str, known: Sequence[str] | None
) -> tuple[DatasetDict, list[str]]:
    """Replace the column `label` of all splits by ids (or numbers).

    Args:
        kind: "class", "classes", "tags" or "number"; see `tasks.Task`.
        known: label names of a trained head, in its order. They are used if they include the
            data's: the head's outputs are in that order.

    Returns:
        (rows, names of the labels in the order of their ids; empty for numbers)

    Raises:
        DataError: labels of a wrong type, labels that do not occur in the training rows, fewer than
            two distinct labels.
    """
    if kind == "number":
        return _replaced(
            rows, {split: _numbers(dataset, split) for split, dataset in rows.items()}
        ), []
    values = {split: _lists(dataset, split, kind) for split, dataset in rows.items()}
    first = next(iter(rows))
    names = _label_names(_class_label(rows[first]), values[first], known)
    encoded: dict[str, list] = {}
    for split, dataset in rows.items():
        feature = _class_label(dataset) or _class_label(rows[first])
        ids = label_ids(values[split], feature, names, f"the {split} rows")
        encoded[split] = [ids_of_row[0] for ids_of_row in ids] if kind == "class" else ids
    return _replaced(rows, encoded), names


def label_ids(
    values: Sequence[Sequence[Any]], feature: ClassLabel | None, names: Sequence[str], where: str
) -> list[list[int]]:
    """Ids of the labels of each row. Integers of a ClassLabel are indices of its names.

    Raises:
        DataError: a label is not among the names.
    """
    ids = {name: index for index, name in enumerate(names)}
    named = [[_name(value, feature) for value in row] for row in values]
    if unknown := {name for row in named for name in row} - ids.keys():
        listed = ", ".join(map(repr, sorted(unknown)[:NUM_SHOWN]))
        raise DataError(
            f"unknown labels in {where}: {listed}. The training rows have {len(names)} labels, "
            f"such as {', '.join(names[:5])}. "
            "Remove the rows with other labels, or add training rows with them."
        )
    return [[ids[name] for name in row] for row in named]


def _lists(dataset: Dataset, split: str, kind: str) -> list[list[Any]]:
    """The labels of each row as a list, with their types checked."""
    values = dataset["label"][:]
    if kind == "class":
        rule = "labels must be names or whole numbers"
        check_values(
            split, values, lambda value: value is not None, rule, FIX_LABELS
        )  # a null makes a CSV's 0 and 1 floats
        check_values(split, values, _is_label, rule, FIX_LABELS)
        return [[value] for value in values]
    rule = "labels must be lists of names or whole numbers"
    check_values(
        split,
        values,
        lambda row: row is None or (isinstance(row, list) and all(map(_is_label, row))),
        rule,
        FIX_LABELS,
    )
    lists = [row or [] for row in values]
    if kind == "tags":
        pairs = list(zip(dataset["tokens"][:], lists, strict=True))
        check_values(
            split,
            pairs,
            lambda pair: len(pair[0] or []) == len(pair[1]),
            "every word needs one tag",
            FIX_LABELS,
        )
    elif _class_label(dataset) is None:
        rule = "a list must contain each label that applies once (not a 0 or 1 for every label)"
        check_values(
            split,
            lists,
            lambda row: len(set(row)) == len(row) or isinstance(row[0], str),
            rule,
            FIX_LABELS,
        )
    return lists


def _is_label(value: Any) -> bool:
    return isinstance(value, str | int)


def _label_names(
    feature: ClassLabel | None, values: Iterable[Sequence[Any]], known: Sequence[str] | None
) -> list[str]:
    """Label names in the order of their ids."""
    found = {value for row in values for value in row}
    names = (
        list(feature.names)
        if feature
        else [str(value) for value in sorted(found, key=lambda v: (isinstance(v, str), v))]
    )
    if str(IGNORED_LABEL) in names:
        raise DataError(
            f"the label {IGNORED_LABEL} marks targets that the loss ignores: remove it, or rename "
            "it."
        )
    if known is not None and set(names) <= set(known):
        return list(known)
    if len(names) < 2:
        raise DataError(
            f"all training rows have the label {(names or ['none'])[0]!r}: give rows with at "
            "least two labels."
        )
    return names


def _class_label(dataset: Dataset) -> ClassLabel | None:
    """The ClassLabel feature of the label column, if it has one."""
    feature = dataset.features["label"]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _name(value: Any, feature: ClassLabel | None) -> str:
    is_number = feature is not None and isinstance(value, int) and 0 <= value < len(feature.names)
    return feature.names[value] if is_number else str(value)


def _numbers(dataset: Dataset, split: str) -> list[float]:
    """One number per row, finite in float32 (the dtype of the loss)."""
    values = dataset["label"][:]
    check_values(
        split,
        values,
        _is_finite,
        "labels of a regression must be finite float32 numbers",
        FIX_LABELS,
    )
    return [float(value) for value in values]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _replaced(rows: DatasetDict, columns: dict[str, list]) -> DatasetDict:
    return DatasetDict(
        {
            s: dataset.remove_columns("label").add_column("label", columns[s])
            for s, dataset in rows.items()
        }
    )
