"""What the dataset `stdlib` is for each task: the embedded corpora, and a line on each."""

import platform
from collections.abc import Callable

from datasets import DatasetDict

from hf_ga.data import corpus, source_lines, stdlib_tasks

_LOADERS: dict[str, Callable[[], DatasetDict]] = {
    "token-classification": source_lines.load_source_lines,
    "question-answering": stdlib_tasks.load_questions,
    "multiple-choice": stdlib_tasks.load_choices,
    "seq2seq": stdlib_tasks.load_sentences,
}
_CONTENTS = {
    "question-answering": "questions on documentation strings",
    "multiple-choice": "functions with 4 texts, one of them the first sentence of its documentation string",
    "seq2seq": "functions, each with the first sentence of its documentation string",
}


def load(task: str) -> DatasetDict:
    """The corpus of a task, in splits; `corpus.load_stdlib`'s where the task has none of its own."""
    return _LOADERS.get(task, corpus.load_stdlib)()


def describe(task: str, rows: DatasetDict) -> str:
    """One line on what `load` returned, for a run's log and its summary."""
    if task == "token-classification":
        return source_lines.describe_source_lines(rows)
    if task not in _CONTENTS:
        return corpus.describe(rows)
    return f"standard library of Python {platform.python_version()}: {sum(rows.num_rows.values())} {_CONTENTS[task]}"
