"""Which column of a dataset has which role, by flag or by the names common on the hub, and checks
of the columns' types.
"""

import re
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, Value

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.columns import chat_columns, check_learnable
from hf_ga.finetuning.data.checks import check_values, check_weights
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.pairs import ROLE, pair_columns
from hf_ga.finetuning.data.tasks import Task

# Columns of well-known text pairs (GLUE, SNLI, ...): first and second texts.
PAIRS = {
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "question": "sentence",
    "text1": "text2",
}
LABELS = {
    "class": ("label", "labels"),
    "number": ("label", "labels", "score"),
    "classes": ("labels", "label"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels", "label"),
    "answers": ("answers",),
    "choice": ("label", "answer", "answerKey", "labels"),
}
# Multiple choice: columns of questions, and of the texts that begin each choice (SWAG, RACE).
QUESTIONS = {
    "sent1": "sent2",
    "article": "question",
    "ctx": None,
    "question": None,
    "context": None,
    "premise": None,
    "goal": None,
}
CHOICES = ("choices", "endings", "options")
NUMBERED = re.compile(r"(ending|choice|option|sol|answer)_?\d")  # ending0, ending1, ...
SOURCES = {
    "source": "target",
    "document": "summary",
    "article": "highlights",
    "dialogue": "summary",
    "text": "summary",
}
TEXTS = {"text", "text_pair", "question", "context", "target"}
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
    """Role -> column, as the flags say or as the first split suggests; `rename_columns` checks
    them.

    Roles are `text`, `text_pair`, `tokens`, `label`, `question`, `context`, `answers`, `choices`
    (or `choice0`, `choice1`, ...), `target`, `weight`, `anchor`, `positive`, `negative` (and
    `negative_1`, ...), or the names of conversation columns.

    Raises:
        DataError: conversations that would be cut into blocks.
    """
    first = next(iter(rows.values()))
    chosen = _inputs(first, options, task)
    if task.labels in LABELS:
        role = "answers" if task.labels == "answers" else "label"
        chosen[role] = options.label_column or _first(first, LABELS[task.labels])
    if options.weight_column is not None:
        chosen["weight"] = options.weight_column
    return chosen


def rename_columns(rows: DatasetDict, roles: dict[str, str]) -> DatasetDict:
    """Select the chosen columns and rename them to their roles.

    Raises:
        DataError: a column is missing in a split; one column for two roles; texts that are not
            strings, or not valid UTF-8; weights that are none.
    """
    for split, dataset in rows.items():
        for role, column in roles.items():
            if column not in dataset.column_names:
                has = ", ".join(dataset.column_names)
                remedy = (
                    f"Name it with --{FLAGS[role]}."
                    if role in FLAGS
                    else "Add it, or rename a column."
                )
                raise DataError(
                    f"{FLAGS.get(role, 'column')} {column!r} is not in the {split} rows, which "
                    f"have: {has}. {remedy}"
                )
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


def _check_column(dataset: Dataset, split: str, role: str, feature: Any) -> None:
    remedy = "Fix these rows, or rename the column."
    if role in FLAGS:
        remedy = f"Choose another with --{FLAGS[role]}, or fix these rows."
    if (role in TEXTS or ROLE.fullmatch(role)) and not _is_text(feature):
        rule = f"{FLAGS.get(role, role)} must name a column of strings"
        check_values(
            split,
            dataset[role][:],
            lambda value: value is None or isinstance(value, str),
            rule,
            remedy,
        )
    if role == "weight":
        check_weights(split, dataset[role][:])
    if role == "tokens":
        check_values(
            split,
            dataset[role][:],
            _is_words,
            f"{FLAGS[role]} must name a column of lists of strings",
            remedy,
        )
    try:
        dataset.data.column(role).validate(full=True)
    except pa.ArrowInvalid as error:  # checked here, before rows are read one by one
        raise DataError(
            f"the {role} column of the {split} rows is not valid UTF-8: convert the file to UTF-8."
        ) from error


def _is_words(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(word, str) for word in value)
    )


def _is_text(feature: Any) -> bool:
    """Whether a column contains strings or only nulls."""
    return isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")


def _inputs(dataset: Dataset, options: DataOptions, task: Task) -> dict[str, str]:
    if task.labels == "tags":
        return {"tokens": options.text_column or _first(dataset, ("tokens", "words"))}
    if task.labels == "answers":
        return {
            "question": options.text_column or "question",
            "context": options.text_pair_column or "context",
        }
    if task.labels == "choice":
        return _question_and_choices(dataset, options)
    if task.labels == "target":
        return _source_and_target(dataset, options)
    if task.labels == "pairs":
        return pair_columns(
            dataset, options.text_column, options.text_pair_column, options.label_column
        )
    chat = chat_columns(dataset.column_names)
    reads_chat = task.pipeline == "text-generation" and options.text_column is None
    if reads_chat:
        check_learnable(dataset.column_names)
    if reads_chat and chat:
        if options.block_size:
            raise DataError(
                f"block_size concatenates plain texts, but the columns {', '.join(chat)} are "
                "prompts with completions: omit "
                "block_size, or name a column of plain text with --text_column."
            )
        return {column: column for column in chat}
    if task.labels in ("class", "number", "classes"):
        known = {
            first: second
            for first, second in PAIRS.items()
            if {first, second} <= set(dataset.column_names)
        }
        text = options.text_column or next(iter(known), None) or _default_text(dataset, options)
        pair = options.text_pair_column or (
            known.get(text) if options.text_column is None else None
        )
        return {"text": text, "text_pair": pair} if pair else {"text": text}
    return {"text": options.text_column or _default_text(dataset, options)}


def _question_and_choices(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """Columns of the text, of the beginning of each choice, and of the choices: one of lists, or
    one per choice.
    """
    names = dataset.column_names
    usual = (*(name for name, begin in QUESTIONS.items() if begin in names), *QUESTIONS, "text")
    text = options.text_column or _first(dataset, usual)
    begin = options.text_pair_column or (
        QUESTIONS.get(text) if options.text_column is None else None
    )
    roles = {"text": text} | (
        {"text_pair": begin} if begin in names or options.text_pair_column else {}
    )
    numbered = sorted(
        (name for name in names if NUMBERED.fullmatch(name)),
        key=lambda name: int(re.sub(r"\D", "", name)),
    )
    if options.choices_column or not numbered or any(name in names for name in CHOICES):
        return {**roles, "choices": options.choices_column or _first(dataset, CHOICES)}
    return {**roles, **{f"choice{i}": name for i, name in enumerate(numbered)}}


def _source_and_target(dataset: Dataset, options: DataOptions) -> dict[str, str]:
    """The texts of a well-known pair, or the first two languages of (flattened) translations."""
    names = dataset.column_names
    languages = [name for name in names if name.startswith("translation.")]
    pairs = [source for source, target in SOURCES.items() if {source, target} <= set(names)]
    source = (
        options.text_column
        or [*pairs, *languages, *(name for name in SOURCES if name in names), "source"][0]
    )
    partner = [SOURCES[source]] if SOURCES.get(source) in names else []
    others = [name for name in (*languages, *SOURCES.values()) if name in names and name != source]
    return {"text": source, "target": options.target_column or [*partner, *others, "target"][0]}


def _default_text(dataset: Dataset, options: DataOptions) -> str:
    """`text`, or the only column of strings without another role."""
    taken = {"label", "labels", options.label_column, options.text_pair_column}
    free = [
        name
        for name, feature in dataset.features.items()
        if name not in taken and _is_text(feature)
    ]
    return free[0] if len(free) == 1 and "text" not in dataset.column_names else "text"


def _first(dataset: Dataset, names: tuple[str, ...]) -> str:
    return next((name for name in names if name in dataset.column_names), names[0])
