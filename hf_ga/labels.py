"""Label columns -> what a head learns from: ids of classes with their names, sets of them, numbers, or a tag for each word."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value

from hf_ga.errors import DataError


def encode_labels(rows: DatasetDict, kind: str, known: Sequence[str] | None) -> tuple[DatasetDict, list[str]]:
    """Replace the column `label` of all splits by ids (or numbers).

    Args:
        kind: "class", "classes", "tags" or "number"; see `tasks.Task`.
        known: names that a trained head has, in its order. They are kept if they cover the data's: other numbers for the same names
            would make the head wrong.

    Returns:
        (rows, names of the labels in the order of their ids; for numbers none)

    Raises:
        DataError: labels of a wrong type, labels that training does not know, less than two different ones.
    """
    if kind == "number":
        return _replaced(rows, {split: _numbers(dataset, split) for split, dataset in rows.items()}), []
    check = {"class": _classes, "classes": _lists_of_classes, "tags": _tags}[kind]
    values = {split: check(dataset, split) for split, dataset in rows.items()}
    each: Callable[[Any], Iterable[Any]] = (lambda value: [value]) if kind == "class" else (lambda value: value)
    found = {split: {label for value in column for label in each(value)} for split, column in values.items()}
    feature = _class_label(rows)
    names, ids = _names(feature, found.get("train", next(iter(found.values()))), known)
    if feature is None:  # a number in one file may be a name in another, or in the trained head
        ids |= {label: ids[str(label)] for label in set().union(*found.values()) - set(ids) if str(label) in ids}
    for split in rows:
        _refuse_unknown_labels(split, found[split] - set(ids), names)
    encode = ids.__getitem__ if kind == "class" else lambda value: [ids[label] for label in value]
    return _replaced(rows, {split: [encode(value) for value in column] for split, column in values.items()}), names


def class_weights(text: str, names: Sequence[str], counts: np.ndarray) -> list[float]:
    """Weights of the classes from the flag: `balanced`, or a number for each class in the order of the names.

    balanced: weight of class c = targets / (classes x targets of c), so that every class weighs the same in total.

    Raises:
        DataError: another number of weights than classes, a negative one, a class without targets under `balanced`.
    """
    if text == "balanced":
        if missing := [name for name, count in zip(names, counts, strict=True) if not count]:
            raise DataError(f"class_weights balanced needs every class in training, but there is no {', '.join(missing[:5])}.")
        return (counts.sum() / (len(counts) * counts)).tolist()
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(names) or not all(0 <= w < math.inf for w in weights) or not any(weights):
        raise DataError(
            f"class_weights must be `balanced` or {len(names)} numbers of at least 0, for {', '.join(names)} in turn; got {text}."
        )
    return weights


def _names(feature: ClassLabel | None, seen: set[Any], known: Sequence[str] | None) -> tuple[list[str], dict[Any, int]]:
    """Names in the order of their ids, and the id of every value that stands for one."""
    if feature is not None:
        ordered: list[Any] = list(feature.names)
    else:
        ordered = sorted(seen, key=lambda value: (str(type(value)), value))
    names = [str(value) for value in ordered]
    if known is not None and set(names) <= set(known):
        names = list(known)
    if len(names) < 2:
        raise DataError(f"all training rows have the label {(names or ['none'])[0]!r}: there is nothing to tell apart.")
    ids: dict[Any, int] = {value: names.index(str(value)) for value in ordered}
    if feature is not None:  # a whole number stands for the name that the dataset gives it
        ids |= {number: ids[name] for number, name in enumerate(feature.names)}
    return names, ids | {name: index for index, name in enumerate(names) if name not in ids}


def _refuse_unknown_labels(split: str, unknown: set[Any], names: Sequence[str]) -> None:
    if unknown:
        shown = ", ".join(repr(u) for u in sorted(unknown, key=str)[:5])
        raise DataError(
            f"labels of the {split} rows that training does not know: {shown}; it knows {len(names)}, such as "
            f"{', '.join(names[:5])}. Every label must occur in training: leave other rows out."
        )


def _class_label(rows: DatasetDict) -> ClassLabel | None:
    """The names that the first split's dataset gives its numbers."""
    feature = next(iter(rows.values())).features["label"]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _classes(dataset: Dataset, split: str) -> list[Any]:
    """One name or whole number in each row."""
    feature, values = dataset.features["label"], list(dataset["label"])
    if not isinstance(feature, Value | ClassLabel) or any(v is None or isinstance(v, float) for v in values):
        raise DataError(
            f"the labels must be names or whole numbers, but the label column of the {split} rows holds {feature}, such as "
            f"{values[:3]}: choose with --label_column. Numbers with a fraction are for --task regression, lists for multi-label."
        )
    return [_by_name(feature, v) for v in values]


def _lists_of_classes(dataset: Dataset, split: str) -> list[list[Any]]:
    """A list of names or whole numbers in each row; it may be empty."""
    feature, values = dataset.features["label"], list(dataset["label"])
    inner = getattr(feature, "feature", None)
    if not isinstance(inner, Value | ClassLabel) or any(isinstance(v, float) or v is None for row in values for v in row or []):
        raise DataError(
            f"the labels must be lists of names or whole numbers, but the label column of the {split} rows holds {feature}, such "
            f"as {values[:3]}: choose with --label_column."
        )
    return [[_by_name(inner, v) for v in row or []] for row in values]


def _tags(dataset: Dataset, split: str) -> list[list[Any]]:
    """As many tags as words in each row."""
    tags, words = _lists_of_classes(dataset, split), dataset["tokens"]
    for number, (row, of_row) in enumerate(zip(tags, words, strict=True)):
        if len(row) != len(of_row or []):
            raise DataError(f"row {number} of {split} has {len(of_row or [])} words but {len(row)} tags: every word needs one tag.")
    return tags


def _numbers(dataset: Dataset, split: str) -> list[float]:
    """One finite number in each row."""
    values = list(dataset["label"])
    if wrong := [v for v in values if isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v)]:
        raise DataError(
            f"the labels of a regression must be finite numbers, but the {split} rows hold {wrong[:3]}: choose with --label_column."
        )
    return [float(v) for v in values]


def _by_name(feature: Any, value: Any) -> Any:
    """Numbers of a dataset that names them become the names: another split may number them differently."""
    return feature.names[value] if isinstance(feature, ClassLabel) and 0 <= value < len(feature.names) else value


def _replaced(rows: DatasetDict, columns: dict[str, list]) -> DatasetDict:
    return DatasetDict({s: dataset.remove_columns("label").add_column("label", columns[s]) for s, dataset in rows.items()})
