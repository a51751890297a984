"""Label columns -> targets of a head: class ids with their names, sets of class ids, numbers, or a
tag per word.
"""

from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Dataset, DatasetDict, List

from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL
from hf_ga.finetuning.data.checks import (
    FIX_LABELS,
    NUM_SHOWN,
    check_values,
    is_given,
    is_number,
)

CLASS_RULE = "labels must be names or whole numbers"
LARGEST_WHOLE = 2**53  # beyond it, not every whole number is a float


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


def one_hot_as_ids(rows: DatasetDict) -> tuple[DatasetDict, int]:
    """Replace labels that are a 0 or 1 for each class by the ids of the classes that apply.

    Labels are read so if every row of the first split is a list of the same length, at least 2, of
    nothing but 0 and 1 (or false and true). As ids, such lists would name the same two classes in
    every row, or name a class twice.

    Returns:
        (rows, number of classes; 0 if the labels are of another form)

    Raises:
        DataError: The labels of another split, or of some rows, are of another form.

    Example:
        rows, num_classes = one_hot_as_ids(rows)  # [0, 1], [1, 1] -> [1], [0, 1]; num_classes 2
    """
    first = next(iter(rows.values()))
    num_classes = 0 if _class_label(first) is not None else _num_one_hot_classes(first["label"][:])
    if not num_classes:
        return rows, 0
    rule = f"the labels are a 0 or 1 for each of {num_classes} classes"
    feature = List(ClassLabel(names=[str(i) for i in range(num_classes)]))
    encoded = {}
    for split, dataset in rows.items():
        values = dataset["label"][:]
        check_values(split, values, partial(_is_one_hot, width=num_classes), rule, FIX_LABELS)
        ids = [[i for i, applies in enumerate(row) if applies] for row in values]
        encoded[split] = dataset.remove_columns("label").add_column("label", ids, feature=feature)
    return DatasetDict(encoded), num_classes


def facts_of_whole_numbers(rows: DatasetDict) -> list[str]:
    """Return a line if the classes of the first split are whole numbers of another type, as 1.0."""
    first = next(iter(rows.values()))
    dtype = first.features.arrow_schema.field("label").type
    if pa.types.is_floating(dtype) or pa.types.is_decimal(dtype):
        return [f"labels: whole numbers of type {dtype} are classes, so 1.0 is the class 1"]
    return []


def similar_names(names: Iterable[str]) -> list[str]:
    """Return a line on each group of names that differ only in spaces or upper and lower case.

    Example:
        >>> similar_names(["neg", "pos", "pos "])
        ["the labels 'pos' and 'pos ' differ in spaces only, and are separate classes"]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault("".join(name.split()).casefold(), []).append(name)
    facts = []
    for group in groups.values():
        if len(group) > 1:
            differs_in_case = len({"".join(name.split()) for name in group}) > 1
            what = "in spaces or case" if differs_in_case else "in spaces"
            listed = " and ".join(map(repr, group))
            facts.append(f"the labels {listed} differ {what} only, and are separate classes")
    return facts


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
        check_values(split, values, is_given, CLASS_RULE, FIX_LABELS)
        check_values(split, values, _is_label, CLASS_RULE, FIX_LABELS)
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
        rule = "a list must contain each label that applies once, or every list a 0 or 1 per class"
        check_values(
            split,
            lists,
            lambda row: len(set(row)) == len(row) or isinstance(row[0], str),
            rule,
            FIX_LABELS,
        )
    return lists


def _is_label(value: Any) -> bool:
    return isinstance(value, str | int) or is_whole(value)


def is_whole(value: Any) -> bool:
    """Whether a value is a float or Decimal without a fraction, such as 1.0."""
    is_fractional = isinstance(value, float | Decimal)
    return is_fractional and abs(value) < LARGEST_WHOLE and value == int(value)


def _num_one_hot_classes(values: Sequence[Any]) -> int:
    """Number of classes if each row has a 0 or 1 for each of them; 0 for another form."""
    widths = {len(row) if _is_one_hot(row) else 0 for row in values}
    return widths.pop() if len(widths) == 1 else 0


def _is_one_hot(row: Any, width: int | None = None) -> bool:
    """Whether a row is a list of 0 and 1 for at least 2 classes, or for `width` classes."""
    if not isinstance(row, list) or not all(value in (0, 1) for value in row):
        return False
    return len(row) >= 2 if width is None else len(row) == width


def _label_names(
    feature: ClassLabel | None, values: Iterable[Sequence[Any]], known: Sequence[str] | None
) -> list[str]:
    """Label names in the order of their ids."""
    found = {value for row in values for value in row}
    names = (
        list(feature.names)
        if feature
        else [_name(value, None) for value in sorted(found, key=lambda v: (isinstance(v, str), v))]
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
    if is_whole(value):
        value = int(value)
    is_index = feature is not None and isinstance(value, int) and 0 <= value < len(feature.names)
    return feature.names[value] if is_index else str(value)


def _numbers(dataset: Dataset, split: str) -> list[float]:
    """One number per row, finite in float32 (the dtype of the loss)."""
    values = dataset["label"][:]
    check_values(
        split,
        values,
        is_number,
        "labels of a regression must be finite float32 numbers",
        FIX_LABELS,
    )
    return [float(value) for value in values]


def _replaced(rows: DatasetDict, columns: dict[str, list]) -> DatasetDict:
    return DatasetDict(
        {
            s: dataset.remove_columns("label").add_column("label", columns[s])
            for s, dataset in rows.items()
        }
    )
