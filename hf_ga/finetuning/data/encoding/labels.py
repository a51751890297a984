"""Label columns -> targets of a head: class ids with their names, sets of class ids, a tag per
word, or numbers; weights of rows.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, IterableDataset, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.checks import FIX_LABELS, check_values, replace_column
from hf_ga.loading.batches import IGNORED_LABEL

CLASS_RULE = "labels must be names or whole numbers"
MAX_WHOLE_FLOAT = 2**53  # beyond it, not every whole number is a float
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


def encode_labels(
    rows: DatasetDict, label_type: str, model_labels: Sequence[str] | None, notes: list[str]
) -> tuple[DatasetDict, list[str]]:
    """Replace the column `label` of all splits by class ids.

    Sets of classes may be multi-hot: a 0 or 1 for each class. They are if every row of the first
    split is a list of the same length, at least 2, of nothing but 0 and 1 (or false and true).
    Lists of class ids would not look like this: each would name just the classes 0 and 1, or one of
    them twice.

    Args:
        rows: The rows of all splits. Class names are those of the first split.
        label_type: "class" (one per row), "classes" (a set of them) or "tags" (a class for each
            word).
        model_labels: Class names of a model whose head is trained already, in the order of its
            outputs. If they include all names in the data, their order determines the ids. None:
            the head is new.
        notes: Lines for the log are appended to it.

    Returns:
        (rows, class names in the order of their ids)

    Raises:
        DataError: If labels have a wrong type, only some splits have multi-hot labels, labels do
            not occur in the training rows, or there are fewer than two distinct labels.
    """
    first_split = next(iter(rows))
    first_feature = class_label_feature(rows[first_split])
    num_classes = 0
    if label_type == "classes" and first_feature is None:
        num_classes = _num_multi_hot(rows[first_split]["label"][:])
    if num_classes:
        first_feature = ClassLabel(names=[str(i) for i in range(num_classes)])
        notes.append(
            f"labels: a 0 or 1 for each of {num_classes} classes (one-hot); if they are lists of "
            "the classes that apply, write names instead of numbers"
        )
    values = {
        split: _label_lists(dataset, split, label_type, num_classes)
        for split, dataset in rows.items()
    }
    names = _class_names(first_feature, values[first_split], model_labels)
    encoded = DatasetDict()
    for split, dataset in rows.items():
        feature = class_label_feature(dataset) or first_feature
        ids = labels_to_ids(values[split], feature, names, split)
        labels = [row_ids[0] for row_ids in ids] if label_type == "class" else ids
        encoded[split] = replace_column(dataset, "label", labels)
    notes += notes_on_similar_names(names)
    return encoded, names


def notes_on_similar_names(names: Iterable[str]) -> list[str]:
    """Return a line for the log on each group of class names that differ only in spaces or in upper
    and lower case, because they may be meant as one class.

    Example:
        >>> notes_on_similar_names(["neg", "pos", "pos "])
        ["the labels 'pos' and 'pos ' differ in spaces or case only, and are separate classes"]
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        normalized_name = "".join(name.split()).casefold()
        groups.setdefault(normalized_name, []).append(name)
    return [
        f"the labels {' and '.join(map(repr, similar))} differ in spaces or case only, and are "
        "separate classes"
        for similar in groups.values()
        if len(similar) > 1
    ]


def labels_to_ids(
    values: Sequence[Sequence[Any]], feature: ClassLabel | None, names: Sequence[str], split: str
) -> list[list[int]]:
    """Convert the labels of each row to class ids.

    Args:
        values: A list of labels for each row: class names, or whole numbers.
        feature: The type of the label column if `datasets` knows its class names: then integers are
            indices of these names. None: a number is the name of a class.
        names: Class names in the order of their ids.
        split: Name of the split, for the error.

    Raises:
        DataError: If a label is not in `names`.
    """
    id_of_name = {name: index for index, name in enumerate(names)}
    names_by_row = [[_class_name(value, feature) for value in row] for row in values]
    check_values(
        split,
        names_by_row,
        lambda row: set(row) <= id_of_name.keys(),
        rule=f"labels must be among the {len(names)} of the training rows ({', '.join(names[:5])})",
        remedy="Remove rows with other labels, or add training rows with them.",
    )
    return [[id_of_name[name] for name in row] for row in names_by_row]


def _label_lists(
    dataset: Dataset, split: str, label_type: str, num_classes: int
) -> list[list[Any]]:
    """Return the labels of each row of a split as a list (of one label for "class"), after checks
    of their types; `num_classes` is 0 unless they are multi-hot.
    """
    values = dataset["label"][:]
    if label_type == "class":
        check_values(split, values, _is_class, rule=CLASS_RULE)
        return [[value] for value in values]
    if num_classes:
        rule = f"the labels are a 0 or 1 for each of {num_classes} classes"
        check_values(split, values, lambda row: _num_multi_hot([row]) == num_classes, rule=rule)
        return [[i for i, applies in enumerate(row) if applies] for row in values]
    lists = [[] if row is None else row for row in values]
    rule = "labels must be lists of names or whole numbers"
    check_values(
        split, lists, lambda row: isinstance(row, list) and all(map(_is_class, row)), rule=rule
    )
    if label_type == "tags":
        words_and_tags = [
            (words or [], tags) for words, tags in zip(dataset["tokens"][:], lists, strict=True)
        ]
        rule = "every word needs one tag"
        check_values(split, words_and_tags, lambda pair: len(pair[0]) == len(pair[1]), rule=rule)
    elif class_label_feature(dataset) is None:
        rule = "a list must contain each label that applies once, or every list a 0 or 1 per class"
        # Numbers that repeat are not ids of classes.
        check_values(
            split,
            lists,
            lambda row: len(set(row)) == len(row) or isinstance(row[0], str),
            rule=rule,
        )
    return lists


def _is_class(value: Any) -> bool:
    """Return whether a value can be the label of a class: a string that is not blank, an int, or a
    float or Decimal without a fraction.
    """
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, int) or _is_whole_float(value)


def _is_whole_float(value: Any) -> bool:
    """Return whether a label is a float or Decimal without a fraction, such as 1.0, and small
    enough to be exact (below 2**53 in absolute value).
    """
    is_float = isinstance(value, float | Decimal)
    return is_float and abs(value) < MAX_WHOLE_FLOAT and value == int(value)


def _num_multi_hot(values: Sequence[Any]) -> int:
    """Return the number of classes if the labels of all rows are lists with a 0 or 1 for each, at
    least 2; otherwise 0.
    """
    are_lists = all(
        isinstance(row, list) and all(value in (0, 1) for value in row) for row in values
    )
    lengths = set(map(len, values)) if are_lists else set()
    return lengths.pop() if len(lengths) == 1 and min(lengths) >= 2 else 0


def _class_names(
    feature: ClassLabel | None,
    values: Iterable[Sequence[Any]],
    model_labels: Sequence[str] | None,
) -> list[str]:
    """Return the class names of a dataset's labels in the order of their ids."""
    if feature is not None:
        names = list(feature.names)
    else:
        distinct_labels = {value for row in values for value in row}
        in_order = sorted(distinct_labels, key=lambda value: (isinstance(value, str), value))
        names = [_class_name(value, None) for value in in_order]
    if str(IGNORED_LABEL) in names:
        raise DataError(
            f"the label {IGNORED_LABEL} marks targets that the loss ignores: remove it, or rename "
            "it."
        )
    if model_labels is not None and set(names) <= set(model_labels):
        return list(model_labels)
    if len(names) < 2:
        raise DataError(
            f"all training rows have the label {(names or ['none'])[0]!r}: give rows with at "
            "least two labels."
        )
    return names


def class_label_feature(rows: Dataset | IterableDataset) -> ClassLabel | None:
    """Return the ClassLabel type of the column `label`, or of the items of its lists; None if it
    has another type, or if a stream does not know the types of its columns.
    """
    feature = (rows.features or {}).get("label")
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, ClassLabel) else None


def _class_name(value: Any, feature: ClassLabel | None) -> str:
    """Return the name of the class that a label stands for."""
    if _is_whole_float(value):
        value = int(value)
    is_index = feature is not None and isinstance(value, int) and 0 <= value < len(feature.names)
    return feature.names[value] if is_index else str(value)


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
