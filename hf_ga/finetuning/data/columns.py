"""Which column of a dataset has which role in a task, by flag or by the names common on the hub,
and checks of the columns' types.
"""

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.columns import chat_columns, check_learnable
from hf_ga.finetuning.data.checks import FIX_WEIGHTS, check_values, check_weights, is_text
from hf_ga.finetuning.data.encoding.pairs import TEXT_ROLE, pair_columns
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.tasks import Task

# Columns of well-known text pairs (GLUE, SNLI, ...): column of the first text -> of the second.
TEXT_PAIRS = {
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "question": "sentence",
    "text1": "text2",
}
# `Task.labels` -> common names of the label column; the first that a dataset has is used.
LABEL_COLUMNS = {
    "class": ("label", "labels"),
    "number": ("label", "labels", "score"),
    "classes": ("labels", "label"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels", "label"),
    "answers": ("answers",),
    "choice": ("label", "answer", "answerKey", "labels"),
}
# Multiple choice: column of the question -> column of a text that begins each choice (SWAG, RACE).
QUESTION_COLUMNS = {
    "sent1": "sent2",
    "article": "question",
    "ctx": None,
    "question": None,
    "context": None,
    "premise": None,
    "goal": None,
}
# Multiple choice: common names of a column that has the list of choices.
CHOICES_COLUMNS = ("choices", "endings", "options")
# Multiple choice: columns with one choice each, such as ending0, ending1, ...
NUMBERED_CHOICE = re.compile(r"(ending|choice|option|sol|answer)_?\d")
# seq2seq: common names of the source column -> of its target column.
SOURCE_COLUMNS = {
    "source": "target",
    "document": "summary",
    "article": "highlights",
    "dialogue": "summary",
    "text": "summary",
}
TEXT_ROLES = {"text", "text_pair", "question", "context", "target"}  # roles of string columns
# Role -> the flag that names its column.
FLAGS = {
    "text": "text_column",
    "anchor": "text_column",
    "positive": "text_pair_column",
    "tokens": "text_column",
    "question": "text_column",
    "text_pair": "text_pair_column",
    "context": "text_pair_column",
    "label": "label_column",
    "answers": "label_column",
    "choices": "choices_column",
    "target": "target_column",
    "weight": "weight_column",
}


def choose_columns(rows: DatasetDict, options: DataOptions, task: Task) -> dict[str, str]:
    """Choose which column of a dataset has which role in a task: as flags say, or else by the
    names of the columns of the first split.

    The columns that flags name need not exist: `rename_columns` checks them.

    Args:
        rows: The rows of all splits.
        options: The flags that name columns, and `block_size`.
        task: The task.

    Returns:
        Role -> column. Roles are `text`, `text_pair`, `tokens`, `label`, `question`, `context`,
        `answers`, `choices` (or `choice0`, `choice1`, ...), `target`, `weight`, `anchor`,
        `positive`, `negative` (and `negative_1`, ...), or the names of conversation columns.

    Raises:
        DataError: If the rows are conversations and `block_size` is set, or if a language model
            cannot learn from the columns (see `check_learnable`), or if columns of pairs
            contradict each other (see `pair_columns`).
    """
    first_split = next(iter(rows.values()))
    roles = _input_columns(first_split, options, task)
    if task.labels in LABEL_COLUMNS:
        role = "answers" if task.labels == "answers" else "label"
        common_names = LABEL_COLUMNS[task.labels]
        roles[role] = options.label_column or _first_existing_column(first_split, common_names)
    if options.weight_column is not None:
        roles["weight"] = options.weight_column
    return roles


def rename_columns(rows: DatasetDict, roles: dict[str, str]) -> DatasetDict:
    """Select the columns that have a role, rename them to their roles, and check their types.

    Args:
        rows: The rows of all splits.
        roles: Role -> column, see `choose_columns`.

    Raises:
        DataError: If a column is missing in a split, one column has two roles, texts are not
            strings or not valid UTF-8, or weights are not numbers of at least 0.
    """
    for split, dataset in rows.items():
        for role, column in roles.items():
            if column not in dataset.column_names:
                raise _missing_column(dataset, split, role, column)
    if len(set(roles.values())) < len(roles):
        listed = " and ".join(FLAGS.get(role, role) for role in roles)
        raise DataError(
            f"{listed} must be different columns, got {', '.join(map(repr, roles.values()))}: "
            "name one for each."
        )
    rows = rows.select_columns(list(roles.values()))
    rows = rows.rename_columns({column: role for role, column in roles.items() if column != role})
    for split, dataset in rows.items():
        for role, feature in dataset.features.items():
            _check_column(dataset, split, role, feature)
    return rows


def _missing_column(dataset: Dataset, split: str, role: str, column: str) -> DataError:
    """Return the error for a column that a task needs, but a split lacks."""
    existing = ", ".join(dataset.column_names)
    remedy = "Add it, or rename a column."
    if role in FLAGS:
        remedy = f"Name it with --{FLAGS[role]}."
    return DataError(
        f"{FLAGS.get(role, 'column')} {column!r} is not in the {split} rows, which have: "
        f"{existing}. {remedy}"
    )


def _check_column(dataset: Dataset, split: str, role: str, feature: Any) -> None:
    """Check the values of one column, which is named by its role in the task."""
    remedy = "Fix these rows, or rename the column."
    if role in FLAGS:
        remedy = f"Choose another with --{FLAGS[role]}, or fix these rows."
    has_texts = role in TEXT_ROLES or TEXT_ROLE.fullmatch(role)
    if has_texts and not _has_only_strings(feature):
        rule = f"{FLAGS.get(role, role)} must name a column of strings"
        check_values(split, dataset[role][:], is_text, rule=rule, remedy=remedy)
    if role == "weight":
        check_weights(split, dataset[role][:])
        if not any(dataset[role][:]):
            raise DataError(
                f"weight_column is 0 in all {len(dataset)} {split} rows, so there is no mean: "
                f"{FIX_WEIGHTS}"
            )
    if role == "tokens":
        rule = f"{FLAGS[role]} must name a column of lists of strings"
        # A row may be None, but no word.
        words = [value or [] for value in dataset[role][:]]
        check_values(split, words, _is_list_of_words, rule=rule, remedy=remedy)
    # Check the encoding of the whole column here, before rows are read one by one.
    try:
        dataset.data.column(role).validate(full=True)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"the {role} column of the {split} rows is not valid UTF-8: convert the file to UTF-8."
        ) from error


def _is_list_of_words(value: Any) -> bool:
    """Return whether a value in a dataset's column of words is a list of strings."""
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _has_only_strings(feature: Any) -> bool:
    """Return whether the type of a dataset's column has only strings, or only nulls."""
    return isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")


def _input_columns(dataset: Dataset, options: DataOptions, task: Task) -> dict[str, str]:
    """Choose the columns of a task's inputs (and its target texts), without labels and weights."""
    if task.labels == "tags":  # token classification
        text = options.text_column or _first_existing_column(dataset, ("tokens", "words"))
        return {"tokens": text}
    if task.labels == "answers":  # question answering
        return {
            "question": options.text_column or "question",
            "context": options.text_pair_column or "context",
        }
    if task.labels == "choice":  # multiple choice
        return _question_and_choices(dataset, options)
    if task.labels == "target":  # seq2seq
        return _source_and_target(dataset, options)
    if task.labels == "pairs":  # embeddings
        return pair_columns(
            dataset, options.text_column, options.text_pair_column, options.label_column
        )
    if task.labels in ("class", "number", "classes"):  # sequence classification and regression
        return _text_and_pair(dataset, options)
    if task.pipeline == "text-generation" and options.text_column is None:
        conversation_columns = _conversation_columns(dataset, options)
        if conversation_columns:
            return {column: column for column in conversation_columns}
    return {"text": options.text_column or _default_text_column(dataset, options)}


def _conversation_columns(dataset: Dataset, options: DataOptions) -> list[str]:
    """Return the columns from which a causal language model learns conversations, or prompts with
    completions; empty for plain text.
    """
    check_learnable(dataset.column_names)
    columns = chat_columns(dataset.column_names)
    if columns and options.block_size:
        raise DataError(
            f"block_size concatenates plain texts, but the columns {', '.join(columns)} are "
            "prompts with completions: omit "
            "block_size, or name a column of plain text with --text_column."
        )
    return columns


def _text_and_pair(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns `text` and, if there is one, `text_pair` of a sequence classifier."""
    existing = set(dataset.column_names)
    known_pairs = {
        first: second for first, second in TEXT_PAIRS.items() if {first, second} <= existing
    }
    text = options.text_column
    text_pair = options.text_pair_column
    if not text:
        text = next(iter(known_pairs), None) or _default_text_column(dataset, options)
        text_pair = text_pair or known_pairs.get(text)
    return {"text": text, "text_pair": text_pair} if text_pair else {"text": text}


def _question_and_choices(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns of multiple choice: the question (`text`), a text that begins each choice
    (`text_pair`) and the choices.
    """
    existing = dataset.column_names
    text = options.text_column
    text_pair = options.text_pair_column
    if not text:
        with_beginning = [
            question for question, beginning in QUESTION_COLUMNS.items() if beginning in existing
        ]
        text = _first_existing_column(dataset, (*with_beginning, *QUESTION_COLUMNS, "text"))
        beginning = QUESTION_COLUMNS.get(text)
        if not text_pair and beginning in existing:
            text_pair = beginning
    roles = {"text": text}
    if text_pair:
        roles["text_pair"] = text_pair
    numbered_choices = sorted(filter(NUMBERED_CHOICE.fullmatch, existing), key=_digits_of)
    has_list_column = any(name in existing for name in CHOICES_COLUMNS)
    if options.choices_column or not numbered_choices or has_list_column:
        choices = options.choices_column or _first_existing_column(dataset, CHOICES_COLUMNS)
        return {**roles, "choices": choices}
    return {**roles, **{f"choice{i}": name for i, name in enumerate(numbered_choices)}}


def _digits_of(name: str) -> int:
    """Return the number in the name of a column of choices, to sort them: 2 for ending_2."""
    return int(re.sub(r"\D", "", name))


def _source_and_target(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns of a seq2seq task, the source (`text`) and its `target`: as flags say, or
    else a well-known pair of columns, or the first two languages of translations.
    """
    existing = dataset.column_names
    languages = [name for name in existing if name.startswith("translation.")]
    source = options.text_column
    if not source:
        complete_pairs = [
            source for source, target in SOURCE_COLUMNS.items() if {source, target} <= set(existing)
        ]
        common_sources = [name for name in SOURCE_COLUMNS if name in existing]
        source = [*complete_pairs, *languages, *common_sources, "source"][0]
    target = options.target_column
    if not target:
        usual_target = SOURCE_COLUMNS.get(source)
        candidates = (usual_target, *languages, *SOURCE_COLUMNS.values())
        targets = [name for name in candidates if name in existing and name != source]
        target = [*targets, "target"][0]
    return {"text": source, "target": target}


def _default_text_column(dataset: Dataset, options: DataOptions) -> str:
    """Return the text column if no flag names it: `text`, or else the only column of strings that
    has no other role.
    """
    if "text" in dataset.column_names:
        return "text"
    other_roles = {"label", "labels", options.label_column, options.text_pair_column}
    candidates = [
        name
        for name, feature in dataset.features.items()
        if name not in other_roles and _has_only_strings(feature)
    ]
    return candidates[0] if len(candidates) == 1 else "text"


def _first_existing_column(dataset: Dataset, names: Sequence[str]) -> str:
    """Return the first of `names` that is a column of the dataset. If none is one, return
    `names[0]`, and `rename_columns` reports that it is missing.
    """
    return next((name for name in names if name in dataset.column_names), names[0])
