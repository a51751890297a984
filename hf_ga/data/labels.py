"""Label columns -> what a head learns from: ids of classes with their names, sets of them, numbers, or a tag for each word."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value

from hf_ga.data.row_checks import Complaints
from hf_ga.errors import DataError
from hf_ga.exact.batches import IGNORED_LABEL

LARGEST = float(np.finfo(np.float32).max)


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
    check = {"class": _classes, "classes": _sets_of_classes, "tags": _tags}[kind]
    values = {split: check(dataset, split) for split, dataset in rows.items()}
    each: Callable[[Any], Iterable[Any]] = (lambda value: [value]) if kind == "class" else (lambda value: value)
    found = {split: {label for value in column for label in each(value)} for split, column in values.items()}
    feature = _class_label(rows)
    names, ids = _names(feature, found.get("train", next(iter(found.values()))), known)
    if feature is None:  # a number in one file may be a name in another, or in the trained head
        ids |= {label: ids[str(label)] for label in set().union(*found.values()) - set(ids) if str(label) in ids}
    for split in rows:
        _refuse_unknown_labels(split, [list(each(value)) for value in values[split]], found[split] - set(ids), names)
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


def _refuse_unknown_labels(split: str, values: Sequence[list[Any]], unknown: set[Any], names: Sequence[str]) -> None:
    if not unknown:
        return
    complaints, listed = Complaints(split), ", ".join(repr(u) for u in sorted(unknown, key=str)[:5])
    rule = (
        f"labels of the {split} rows that training does not know: {listed}; it knows {len(names)}, such as "
        f"{', '.join(names[:5])}. Every label must occur in training: leave other rows out."
    )
    for number, value in enumerate(values):
        if of_row := [label for label in value if label in unknown]:
            complaints.add(number, f"has the label {of_row[0]!r}", rule)
    complaints.refuse(len(values))


def _class_label(rows: DatasetDict) -> ClassLabel | None:
    """The names that the first split's dataset gives its numbers."""
    feature = next(iter(rows.values())).features["label"]
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _classes(dataset: Dataset, split: str) -> list[Any]:
    """One name or whole number in each row."""
    feature, values = dataset.features["label"], list(dataset["label"])
    rule = (
        f"the labels must be names or whole numbers, but the label column of the {split} rows holds {feature}, such as "
        f"{values[:3]!r:.120}: choose with --label_column. Numbers with a fraction are for --task regression, lists for "
        "multi-label."
    )
    _refuse_values(split, values, _no_classes(values), rule)
    _refuse_values(split, values, _ignored(values), _IGNORED)
    if not isinstance(feature, Value | ClassLabel):
        raise DataError(rule)
    return [_by_name(feature, v) for v in values]


def _lists_of_classes(dataset: Dataset, split: str, may_be_null: bool = False) -> list[list[Any]]:
    """A list of names or whole numbers in each row; it may be empty."""
    feature, values = dataset.features["label"], list(dataset["label"])
    inner = getattr(feature, "feature", None)
    rule = (
        f"the labels must be lists of names or whole numbers, but the label column of the {split} rows holds {feature}, such "
        f"as {values[:3]!r:.120}: choose with --label_column."
    )
    no_lists = [n for n, row in enumerate(values) if not (isinstance(row, list) or (row is None and may_be_null))]
    if len(no_lists) == len(values):
        raise DataError(rule)
    _refuse_values(split, values, no_lists, rule)
    flat = [v for row in values for v in row or []]
    places = np.repeat(np.arange(len(values)), [len(row or []) for row in values])
    for wrong, what in ((_no_classes(flat), rule), (_ignored(flat), _IGNORED)):
        _refuse_values(split, values, np.unique(places[wrong]).tolist(), what)
    if not isinstance(inner, Value | ClassLabel):
        raise DataError(rule)
    return [[_by_name(inner, v) for v in row or []] for row in values]


def _sets_of_classes(dataset: Dataset, split: str) -> list[list[Any]]:
    """A list of labels in each row; null is none of them. Where numbers without names come twice, they are something else."""
    values, feature = _lists_of_classes(dataset, split, may_be_null=True), dataset.features["label"].feature
    named = isinstance(feature, ClassLabel) or "string" in feature.dtype
    repeated = [n for n, row in enumerate(values) if len(set(row)) < len(row)] if not named else []
    rule = "a list holds the numbers of the labels that apply, each once, not a 0 or a 1 for every label."
    _refuse_values(split, list(dataset["label"]), repeated, rule)
    return values


def _tags(dataset: Dataset, split: str) -> list[list[Any]]:
    """As many tags as words in each row."""
    tags, words = _lists_of_classes(dataset, split, may_be_null=True), dataset["tokens"]
    complaints = Complaints(split)
    for number, (row, of_row) in enumerate(zip(tags, words, strict=True)):
        if len(row) != len(of_row or []):
            complaints.add(number, f"has {len(of_row or [])} words but {len(row)} tags", "every word needs one tag.")
    complaints.refuse(len(tags))
    return tags


def _numbers(dataset: Dataset, split: str) -> list[float]:
    """One number in each row that is finite in float32, in which losses are computed."""
    values = list(dataset["label"])
    rule = (
        f"the labels of a regression must be finite numbers, but the {split} rows hold others (or too large ones for float32): "
        "choose with --label_column."
    )
    _refuse_values(split, values, [n for n, v in enumerate(values) if not _is_finite(v)], rule)
    return [float(v) for v in values]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _ignored(values: Sequence[Any]) -> list[int]:
    """Numbers of those that would become a class by a mistake."""
    return [n for n, v in enumerate(values) if v == IGNORED_LABEL]


_IGNORED = f"{IGNORED_LABEL} stands for what is ignored, which is no label: leave it out, or give it a label of its own."


def _no_classes(values: Sequence[Any]) -> list[int]:
    """Numbers of those that are no names or whole numbers. One that is null makes floats of all whole numbers of a file, and one of
    another type hides what the others are, so those that differ from the others come alone.
    """
    missing = [n for n, v in enumerate(values) if v is None or (isinstance(v, float) and not v.is_integer())]
    wrong = missing or [n for n, v in enumerate(values) if isinstance(v, float) or not isinstance(v, str | int)]
    (usual, _), *others = Counter(map(type, values)).most_common() or [(None, 0)]
    return wrong or [n for n, v in enumerate(values) if others and type(v) is not usual]


def _refuse_values(split: str, values: Sequence[Any], wrong: Sequence[int], rule: str) -> None:
    complaints = Complaints(split)
    for number in wrong:
        complaints.add(number, f"has the label {values[number]!r:.60}", rule)
    complaints.refuse(len(values))


def _by_name(feature: Any, value: Any) -> Any:
    """Numbers of a dataset that names them become the names: another split may number them differently."""
    return feature.names[value] if isinstance(feature, ClassLabel) and 0 <= value < len(feature.names) else value


def _replaced(rows: DatasetDict, columns: dict[str, list]) -> DatasetDict:
    return DatasetDict({s: dataset.remove_columns("label").add_column("label", columns[s]) for s, dataset in rows.items()})
