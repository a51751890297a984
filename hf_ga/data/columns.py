"""Which column of a dataset has which role: by flag, else by the names that datasets of the hub use."""

import re

from datasets import Dataset, DatasetDict, Value

from hf_ga.data.chat import chat_columns
from hf_ga.data.tasks import Task
from hf_ga.errors import DataError
from hf_ga.run.config import FinetuneConfig

# First texts of well-known pairs (GLUE, SNLI, ...) and the second ones.
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
    "answers": ("answers", "answer"),
    "choice": ("label", "answer", "answerKey", "labels"),
}
# Texts that are asked about, and what begins each choice (SWAG, RACE).
ASKING = {"sent1": "sent2", "article": "question", "ctx": None, "question": None, "context": None, "premise": None, "goal": None}
CHOICES = ("choices", "endings", "options")
NUMBERED = re.compile(r"(ending|choice|option|sol|answer)_?\d")  # ending0, ending1, ...
SOURCES = {
    "source": "target",
    "document": "summary",
    "article": "highlights",
    "dialogue": "summary",
    "text": "summary",
    "code": "sentence",
}
_OF_CHAT = ("messages", "prompt", "completion", "instruction", "input", "output")


def choose_columns(rows: DatasetDict, config: FinetuneConfig, task: Task, needs_label: bool = True) -> dict[str, str]:
    """Role -> column. Roles are `text`, `text_pair`, `tokens`, `label`, `question`, `context`, `answers` (or `answer` and
    `answer_start`), `choices` (or `choice0`, `choice1`, ...), `target`, or the names of the columns of a conversation.

    Raises:
        DataError: a column that is named, or needed, is not in every split; two roles for one column.
    """
    first = next(iter(rows.values()))
    chosen = _inputs(first, config, task, needs_completion=needs_label)
    if needs_label and task.labels != "none":
        chosen |= _learned(first, config, task, chosen)
    for split, dataset in rows.items():
        for role, column in chosen.items():
            if column not in dataset.column_names:
                raise DataError(_missing(role, column, split, dataset, config))
    if len(set(chosen.values())) < len(chosen):
        listed = " and ".join(map(flag_of, chosen))
        raise DataError(f"{listed} are not all different ({', '.join(map(repr, chosen.values()))}): name a column for each.")
    return chosen


def _inputs(dataset: Dataset, config: FinetuneConfig, task: Task, needs_completion: bool) -> dict[str, str]:
    if task.labels == "tags":
        return {"tokens": config.text_column or _first(dataset, ("tokens", "words"))}
    if task.labels == "answers":
        return {"question": config.text_column or "question", "context": config.text_pair_column or "context"}
    if task.labels == "choice":
        return _asked(dataset, config)
    if task.labels == "target":
        return {"text": config.text_column or _source(dataset)}
    chat = chat_columns(dataset.column_names, needs_completion=needs_completion)
    if task.pipeline == "text-generation" and config.text_column is None and chat:
        if config.block_size:
            raise DataError(
                f"block_size puts plain texts together, but the columns {', '.join(chat)} are prompts with completions: leave "
                "block_size out, or name a plain text with --text_column."
            )
        return {column: column for column in chat}
    if task.labels in ("class", "number", "classes"):
        known = {first: second for first, second in PAIRS.items() if {first, second} <= set(dataset.column_names)}
        text = config.text_column or next(iter(known), None) or _default_text(dataset, config)
        pair = config.text_pair_column or (known.get(text) if config.text_column is None else None)
        return {"text": text, "text_pair": pair} if pair else {"text": text}
    return {"text": config.text_column or _default_text(dataset, config)}


def _learned(dataset: Dataset, config: FinetuneConfig, task: Task, inputs: dict[str, str]) -> dict[str, str]:
    if task.labels == "target":
        return {"target": config.target_column or _target(dataset, inputs["text"])}
    if task.labels == "answers":
        column = config.label_column or _first(dataset, LABELS["answers"])
        feature = dataset.features.get(column)
        is_flat = isinstance(feature, Value) or ("answer_start" in dataset.column_names and not isinstance(feature, dict))
        return {"answer": column, "answer_start": "answer_start"} if is_flat else {"answers": column}
    return {"label": config.label_column or _default_label(dataset, config, task)}


def _asked(dataset: Dataset, config: FinetuneConfig) -> dict[str, str]:
    """The text, what begins each choice, and the choices: a column of lists, or one column for each."""
    names = dataset.column_names
    text = config.text_column or _first(dataset, (*(name for name, begin in ASKING.items() if begin in names), *ASKING, "text"))
    begin = config.text_pair_column or (ASKING.get(text) if config.text_column is None else None)
    roles = {"text": text} | ({"text_pair": begin} if begin in names or config.text_pair_column else {})
    column = config.choices_column or next((name for name in CHOICES if name in names), None)
    numbered = [name for name in names if NUMBERED.fullmatch(name)]
    if column or not numbered:
        return {**roles, "choices": column or CHOICES[0]}
    return {**roles, **{f"choice{i}": name for i, name in enumerate(sorted(numbered, key=_number))}}


def _number(name: str) -> int:
    return int(re.sub(r"\D", "", name))


def _source(dataset: Dataset) -> str:
    """The first text of a well-known pair; of translations, which are flattened, the first language."""
    names = dataset.column_names
    languages = [name for name in names if name.startswith("translation.")]
    known = [source for source, target in SOURCES.items() if {source, target} <= set(names)]
    return [*known, *languages, *(source for source in SOURCES if source in names), "source"][0]


def _target(dataset: Dataset, source: str) -> str:
    languages = [name for name in dataset.column_names if name.startswith("translation.") and name != source]
    known = [SOURCES[source]] if SOURCES.get(source) in dataset.column_names else []
    others = [target for target in SOURCES.values() if target in dataset.column_names]
    return [*known, *languages, *others, "target"][0]


def _default_text(dataset: Dataset, config: FinetuneConfig) -> str:
    """`text`, or else the only column of strings that has no other role."""
    taken = {"label", "labels", config.label_column, config.text_pair_column}
    strings = [name for name, feature in dataset.features.items() if isinstance(feature, Value) and "string" in feature.dtype]
    free = [name for name in strings if name not in taken]
    return free[0] if len(free) == 1 and "text" not in dataset.column_names else "text"


def _default_label(dataset: Dataset, config: FinetuneConfig, task: Task) -> str:
    if config.dataset_name == "stdlib" and task.labels == "class" and "package" in dataset.column_names:
        return "package"
    return _first(dataset, LABELS[task.labels])


def _first(dataset: Dataset, names: tuple[str, ...]) -> str:
    return next((name for name in names if name in dataset.column_names), names[0])


def flag_of(role: str) -> str:
    """The flag that names a role's column."""
    flags = {"tokens": "text_column", "question": "text_column", "context": "text_pair_column"}
    flags |= {"answers": "label_column", "answer": "label_column", "answer_start": "label_column"}
    return flags.get(role) or ("choices_column" if role.startswith("choice") else f"{role}_column")


def _missing(role: str, column: str, split: str, dataset: Dataset, config: FinetuneConfig) -> str:
    has = ", ".join(dataset.column_names)
    if role in _OF_CHAT:  # there are no flags for them
        return f"the column {column!r} of the other rows is not in the {split} rows, which have: {has}. Give all splits the same."
    if role == "answer_start":
        return (
            f"the {split} rows have no column 'answer_start' that tells at which character of the context an answer begins; they "
            f"have: {has}."
        )
    is_embedded = config.dataset_name == "stdlib" and "package" in dataset.column_names
    if is_embedded and role == "label" and config.label_column is None:
        return f"the embedded corpus has no labels for {config.task}: name a dataset that has, with --dataset_name."
    flag = flag_of(role)
    return f"{flag} {column!r} is not in the {split} rows, which have: {has}. Name it with --{flag}."
