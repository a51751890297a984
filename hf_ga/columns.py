"""Which column of a dataset has which role: by flag, else by the names that datasets of the hub use."""

from datasets import Dataset, DatasetDict, Value

from hf_ga.chat import chat_columns
from hf_ga.config import FinetuneConfig
from hf_ga.errors import DataError
from hf_ga.tasks import Task

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
}


def choose_columns(rows: DatasetDict, config: FinetuneConfig, task: Task, needs_label: bool = True) -> dict[str, str]:
    """Role -> column. Roles are `text`, `text_pair`, `tokens`, `label`, or the names of the columns of a conversation.

    Raises:
        DataError: a column that is named, or needed, is not in every split; two roles for one column.
    """
    first = next(iter(rows.values()))
    chosen = _inputs(first, config, task, needs_completion=needs_label)
    if needs_label and task.labels != "none":
        chosen["label"] = config.label_column or _default_label(first, config, task)
    for split, dataset in rows.items():
        for role, column in chosen.items():
            if column not in dataset.column_names:
                raise DataError(_missing(role, column, split, dataset, config))
    if len(set(chosen.values())) < len(chosen):
        listed = " and ".join(map(_flag, chosen))
        raise DataError(f"{listed} are not all different ({', '.join(map(repr, chosen.values()))}): name a column for each.")
    return chosen


def _inputs(dataset: Dataset, config: FinetuneConfig, task: Task, needs_completion: bool) -> dict[str, str]:
    if task.labels == "tags":
        return {"tokens": config.text_column or _first(dataset, ("tokens", "words"))}
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


def _flag(role: str) -> str:
    return {"tokens": "text_column"}.get(role, f"{role}_column")


def _missing(role: str, column: str, split: str, dataset: Dataset, config: FinetuneConfig) -> str:
    if role not in ("text", "text_pair", "label", "tokens"):  # of a conversation, for which there are no flags
        has = ", ".join(dataset.column_names)
        return f"the column {column!r} of the other rows is not in the {split} rows, which have: {has}. Give all splits the same."
    is_embedded = config.dataset_name == "stdlib" and "package" in dataset.column_names
    if is_embedded and role == "label" and config.label_column is None:
        return f"the embedded corpus has no labels for {config.task}: name a dataset that has, with --dataset_name."
    flag = _flag(role)
    return f"{flag} {column!r} is not in the {split} rows, which have: {', '.join(dataset.column_names)}. Name it with --{flag}."
