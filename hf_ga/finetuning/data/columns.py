"""Which column of a dataset has which role in a task, by flag or by the names common on the hub,
and checks of the columns' types.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.columns import chat_columns, check_learnable
from hf_ga.finetuning.data.checks import (
    check_values,
    is_list_of_texts,
    is_text,
)
from hf_ga.finetuning.data.encoding.pairs import TEXT_ROLE, names_of_texts
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.tasks import Task

# Well-known pairs of text columns (GLUE, SNLI, ...).
TEXT_PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
)
# `Task.labels` -> common names of the label column; the first that a dataset has is used.
LABEL_COLUMNS = {
    "class": ("label", "labels"),
    "number": ("label", "labels", "score"),
    "classes": ("labels", "label"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels", "label"),
    "answers": ("answers",),
    "choice": ("label", "answer", "answerKey", "labels"),
}
# Multiple choice: columns of the question and of a text that begins each choice (SWAG, RACE), and
# of a question alone.
QUESTION_PAIRS = (("sent1", "sent2"), ("article", "question"))
QUESTION_COLUMNS = ("sent1", "article", "ctx", "question", "context", "premise", "goal", "text")
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
# Embeddings: columns of anchors and of their positives. The first pair that exists is taken: of
# `question`, `answer` and `document` the answer, of `query`, `answer` and `document` the document.
ANCHOR_PAIRS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "document"),
    ("query", "passage"),
    ("query", "answer"),
    ("query", "response"),
    ("question", "positive"),
    ("question", "answer"),
    ("question", "document"),
    ("question", "passage"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("text1", "text2"),
)
NEGATIVE = re.compile(r"negative_?\d*")  # negative, negative_1, negative_2, ...
SCORES = ("score", "similarity_score", "similarity", "label", "labels")
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
            contradict each other.
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
            strings.
    """
    for split, dataset in rows.items():
        for role, column in roles.items():
            if column not in dataset.column_names:
                raise DataError(
                    f"{FLAGS.get(role, 'column')} {column!r} is not in the {split} rows, which "
                    f"have: {', '.join(dataset.column_names)}. {_remedy(role)}"
                )
    if len(set(roles.values())) < len(roles):
        listed = " and ".join(FLAGS.get(role, role) for role in roles)
        raise DataError(
            f"{listed} must be different columns, got {', '.join(map(repr, roles.values()))}: "
            "name one for each."
        )
    rows = select_by_role(rows, roles)
    for split, dataset in rows.items():
        for role, feature in dataset.features.items():
            _check_column(dataset, split, role, feature)
    return rows


def select_by_role(rows: Any, roles: Mapping[str, str]) -> Any:
    """Select the columns that have a role, and rename them to their roles.

    Args:
        rows: A dataset, a stream, or the splits of one.
        roles: Role -> column.
    """
    rows = rows.select_columns(list(roles.values()))
    return rows.rename_columns({column: role for role, column in roles.items() if column != role})


def _check_column(dataset: Dataset, split: str, role: str, feature: Any) -> None:
    """Check the values of one column, which is named by its role in the task."""
    is_text_role = role in TEXT_ROLES or TEXT_ROLE.fullmatch(role)
    if role == "tokens":
        is_valid = _is_list_of_words
        kind = "lists of strings"
    elif is_text_role and not _has_only_strings(feature):
        is_valid = is_text
        kind = "strings"
    else:
        return
    rule = f"{FLAGS.get(role, role)} must name a column of {kind}"
    check_values(split, dataset[role][:], is_valid, rule=rule, remedy=_remedy(role))


def _remedy(role: str) -> str:
    """Return what to do about a column that is missing, or has wrong values."""
    if role in FLAGS:
        return f"Choose another with --{FLAGS[role]}, or fix these rows."
    return "Fix these rows, or rename the column."


def _is_list_of_words(value: Any) -> bool:
    """Return whether a value is a list of strings; it may be None, but no word."""
    return value is None or (is_list_of_texts(value) and None not in value)


def _has_only_strings(feature: Any) -> bool:
    """Return whether the type of a dataset's column has only strings, or only nulls."""
    return isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")


def _input_columns(dataset: Dataset, options: DataOptions, task: Task) -> dict[str, str]:
    """Choose the columns of a task's inputs (and its target texts), without labels and weights."""
    if task.labels == "tags":  # token classification
        text = options.text_column or _first_existing_column(dataset, ("tokens", "words"))
        return {"tokens": text}
    first = options.text_column
    second = options.text_pair_column
    if task.labels == "answers":  # question answering
        return {"question": first or "question", "context": second or "context"}
    if task.labels == "choice":  # multiple choice
        return _question_and_choices(dataset, options)
    if task.labels == "target":  # seq2seq
        return _source_and_target(dataset, options)
    if task.labels == "pairs":  # embeddings
        return _anchor_and_others(dataset, options)
    default = _default_text_column(dataset, options)
    if task.labels in ("class", "number", "classes"):  # sequence classification and regression
        return _two_columns(dataset, {"text": first, "text_pair": second}, TEXT_PAIRS, (default,))
    if task.pipeline == "text-generation" and options.text_column is None:
        check_learnable(dataset.column_names)
        columns = chat_columns(dataset.column_names)
        if columns and options.block_size:
            raise DataError(
                f"block_size concatenates plain texts, but the columns {', '.join(columns)} are "
                "prompts with completions: omit block_size, or name a column of plain text with "
                "--text_column."
            )
        if columns:
            return {column: column for column in columns}
    return {"text": first or default}


def _question_and_choices(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns of multiple choice: the question (`text`), a text that begins each choice
    (`text_pair`) and the choices.
    """
    flags = {"text": options.text_column, "text_pair": options.text_pair_column}
    question = _first_existing_column(dataset, QUESTION_COLUMNS)
    roles = _two_columns(dataset, flags, QUESTION_PAIRS, (question,))
    choices = options.choices_column or _first_existing_column(dataset, CHOICES_COLUMNS)
    numbered_choices = _numbered_columns(dataset, NUMBERED_CHOICE)
    has_choices = options.choices_column is not None or choices in dataset.column_names
    if has_choices or not numbered_choices:
        return {**roles, "choices": choices}
    return {**roles, **{f"choice{i}": name for i, name in enumerate(numbered_choices)}}


def _source_and_target(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns of a seq2seq task, the source (`text`) and its `target`: as flags say, or
    else a well-known pair of columns, or the first two languages of translations.
    """
    languages = [name for name in dataset.column_names if name.startswith("translation.")]
    flags = {"text": options.text_column, "target": options.target_column}
    default = (_first_existing_column(dataset, [*languages, *SOURCE_COLUMNS]),)
    roles = _two_columns(dataset, flags, SOURCE_COLUMNS.items(), default)
    targets = (SOURCE_COLUMNS.get(roles["text"]), *languages, *SOURCE_COLUMNS.values())
    others = [name for name in targets if name not in (None, roles["text"])]
    return {"target": _first_existing_column(dataset, others), **roles}


def _anchor_and_others(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Choose the columns of text pairs, to train embeddings: `anchor`, `positive`, and either
    `negative`, `negative_1`, ... or `label`, the score of a pair.
    """
    names = dataset.column_names
    flags = {"anchor": options.text_column, "positive": options.text_pair_column}
    roles = _two_columns(dataset, flags, ANCHOR_PAIRS, ("anchor", "positive"))
    score = options.label_column or next((name for name in SCORES if name in names), None)
    negatives = _numbered_columns(dataset, NEGATIVE)
    if score is None:
        texts = [*roles.values(), *negatives]
        return dict(zip(names_of_texts(len(texts)), texts, strict=True))
    if negatives:
        raise DataError(
            f"the rows have a score ({score!r}) and negatives ({', '.join(negatives)}), but pairs "
            "with a score and pairs with negatives have different losses: remove one of them."
        )
    feature = dataset.features.get(score)
    if isinstance(feature, ClassLabel):
        raise DataError(
            f"the score of a pair must be a number, the higher the more alike, but {score!r} is a "
            f"class ({', '.join(feature.names)}): replace the classes by numbers, or keep the rows "
            "whose texts belong together and remove the column."
        )
    return {**roles, "label": score}


def _numbered_columns(dataset: Dataset, pattern: re.Pattern) -> list[str]:
    """Return the columns whose names match a pattern, by the numbers in their names."""
    names = filter(pattern.fullmatch, dataset.column_names)
    return sorted(names, key=lambda name: int(re.sub(r"\D", "", name) or 0))


def _two_columns(
    dataset: Dataset,
    flags: dict[str, str | None],
    pairs: Iterable[tuple[str, str]],
    default: tuple[str, ...],
) -> dict[str, str]:
    """Choose the columns for two roles, or for the first alone: those that flags name, or else the
    first of `pairs` whose columns both exist, or the defaults.
    """
    given = {role: name for role, name in flags.items() if name}
    known = [pair for pair in pairs if set(pair) <= set(dataset.column_names)]
    is_chosen = next(iter(flags)) in given or not known
    return dict(zip(flags, default if is_chosen else known[0], strict=False)) | given


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
