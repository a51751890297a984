"""Datasets -> tokenized samples. Everything that is wrong with the data is found here, before a model is built."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_ga.data.chat import chat_columns
from hf_ga.data.choices import encode_choices
from hf_ga.data.columns import check_columns, choose_columns, rename_columns
from hf_ga.data.corpus import SPLITS
from hf_ga.data.labels import encode_labels
from hf_ga.data.masking import KeyedMasks
from hf_ga.data.options import DataOptions
from hf_ga.data.sources import load_file, load_rows, reading
from hf_ga.data.spans import encode_answers
from hf_ga.data.streamed import StreamedSamples, load_streamed
from hf_ga.data.tasks import TASKS, Task
from hf_ga.data.tokenization import complete_tokenizer, contents_of, cut_into_blocks, tokenize_completions
from hf_ga.errors import DataError

# Columns of samples that only metrics and predictions need; see the functions that tokenize.
FOR_METRICS = ("starts", "ends", "no_answer", "context", "answers", "answer_is_lost", "target")
# Roles of columns that a row to predict lacks.
LEARNED = {"label", "answers", "target"}
# Columns of a sample that are numbers, or lists of them, and determine what a model learns.
_LEARNED_FROM = ("input_ids", "length", "token_type_ids", "label", "labels", "start_positions", "end_positions")
_FORMAT = 5  # part of the cache key: raise it whenever tokenization would give other samples


@dataclass
class PreparedData:
    """Tokenized splits, and what was counted on the way.

    Attributes:
        splits: `train`, `validation` and maybe `test`, with the columns that the task's tokenization returns.
        columns: which column of the rows has which role.
        labels: names of the labels, in the order of their ids; empty for language models and regression.
        description: one line on where the rows come from. facts: lines on rows that were truncated, left out or have no target.
        content_hash: of the training samples, wherever they came from.
        stream: all training samples, where they are read while training; then `train` holds the first ones.
    """

    task: Task
    splits: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str]
    mlm_probability: float
    description: str
    labels: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    content_hash: str = ""
    stream: StreamedSamples | None = None

    @property
    def collate(self) -> Any:
        """Samples -> arguments of the model."""
        return self.task.collator(self.tokenizer, len(self.labels), self.mlm_probability)

    def samples(self, split: str) -> Any:
        """The dataset of a window loader: the samples of a split without what only metrics need, for a masked LM with keys for
        their masks.
        """
        dataset = self.splits[split]
        dataset = dataset.remove_columns([name for name in FOR_METRICS if name in dataset.column_names])
        return KeyedMasks(dataset) if self.task.pipeline == "fill-mask" else dataset


def prepare_data(options: DataOptions, tokenizer: PreTrainedTokenizerBase, known: Sequence[str] | None = None) -> PreparedData:
    """Load, check and tokenize. Rows that are truncated, empty or without target are counted and logged, never silently dropped.

    Args:
        known: label names that the model has already, in its order.

    Raises:
        DataError: missing columns, rows of a wrong type, unknown labels, nothing left to train on.
    """
    task, stream = TASKS[options.task], None
    if options.streaming:
        rows, stream = load_streamed(options)
    else:
        rows = load_rows(options)
    complete_tokenizer(tokenizer, task.labels, is_decoder=task.pipeline == "text-generation")
    data = PreparedData(task, {}, tokenizer, {}, options.mlm_probability, _describe(rows, options))
    data.labels = list(known or []) if task.labels in ("class", "classes", "tags") else []
    if rows:
        data.columns = choose_columns(rows, options, task)
        rows = _labelled(rename_columns(rows, data.columns), data, known)
    for split in SPLITS:
        if split in rows and not (options.eval_only and split == "train"):
            data.splits[split] = _tokenized(rows[split], split, options, data)
    if "train" in data.splits:
        data.content_hash = _content_hash(data.splits["train"], data.labels)
    if stream is not None:
        tokenize = _tokenizing(data.columns, options, data)
        data.stream = StreamedSamples(stream, options.dataset_name, data.columns, data.labels, tokenize)
    return data


def prepare_unlabelled(options: DataOptions, data: PreparedData, file: str) -> tuple[Dataset, Dataset, Dataset]:
    """A file of rows to predict.

    Returns:
        (the rows as they are, their columns under the names of the roles, the samples: one a row, empty where the row is). For
        token classification `label` is the number of the word, at its first token.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    rows = load_file(file)
    columns = DatasetDict(predict=rows.flatten() if options.task == "seq2seq" else rows)  # as `load_rows` does
    if not data.columns:  # nothing else was read
        data.columns = choose_columns(columns, options, data.task, needs_label=False)
    roles = {role: column for role, column in data.columns.items() if role not in LEARNED}
    check_columns(columns, roles)
    named = rename_columns(columns, roles)["predict"]
    inputs = named
    if data.task.labels == "choice":
        inputs = encode_choices(DatasetDict(predict=named))["predict"]
    if data.task.labels == "tags":
        inputs = named.add_column("label", [list(range(len(words or []))) for words in named["tokens"]])
    tokenize = partial(data.task.tokenize, tokenizer=data.tokenizer, max_length=options.max_length)
    with reading(file):
        samples = inputs.map(tokenize, batched=True, remove_columns=inputs.column_names, load_from_cache_file=False)
    return rows, named, samples


def _describe(rows: DatasetDict, options: DataOptions) -> str:
    name = options.dataset_name
    if options.streaming:
        numbers = f"of which {len(rows['train'])} rows were read ahead; {len(rows['validation'])} validation rows"
        return f"{name}: a stream, {numbers}"
    if not rows:
        return "no rows to evaluate"
    if name == "stdlib":
        files = [file for file in (options.validation_file, options.test_file) if file]
        name = f"standard library of Python {platform.python_version()}" if "train" in rows else ", ".join(files)
    return f"{name}: {', '.join(f'{count:,} {split}' for split, count in rows.num_rows.items())} rows"


def _labelled(rows: DatasetDict, data: PreparedData, known: Sequence[str] | None) -> DatasetDict:
    kind = data.task.labels
    if kind in ("none", "target"):
        return rows
    if kind == "answers":
        return encode_answers(rows)
    unlabelled = (-1, "", None) if kind == "choice" else (-1,)
    if "test" in rows and kind in ("class", "number", "choice") and all(value in unlabelled for value in rows["test"]["label"]):
        rows = DatasetDict({split: rows[split] for split in rows if split != "test"})
        data.facts.append("left out the test rows: all their labels are -1, which means unlabelled")
        if not rows:
            raise DataError("all labels of the test rows are -1, which means unlabelled: there is nothing to evaluate.")
    if kind == "choice":
        return encode_choices(rows)
    rows, data.labels = encode_labels(rows, kind, known)
    return rows


def _tokenizing(roles: Iterable[str], options: DataOptions, data: PreparedData) -> partial:
    """Rows by role -> columns of samples."""
    tokenize = tokenize_completions if chat_columns(list(roles)) else data.task.tokenize
    return partial(tokenize, tokenizer=data.tokenizer, max_length=None if options.block_size else options.max_length)


def _tokenized(rows: Dataset, split: str, options: DataOptions, data: PreparedData) -> Dataset:
    tokenize = _tokenizing(rows.column_names, options, data)
    # An explicit fingerprint: the pickled state of a tokenizer changes when it is used, and the cache would miss.
    key = [rows._fingerprint, tokenize.func.__name__, tokenize.keywords["max_length"], contents_of(data.tokenizer), _FORMAT]
    with reading(f"the {split} rows"):
        dataset = rows.map(
            tokenize,
            batched=True,
            remove_columns=rows.column_names,
            new_fingerprint=Hasher.hash(key),
            desc=f"tokenizing {split}",
        )
    is_empty = np.asarray(dataset["length"][:]) == 0  # at once: numpy would ask a column row by row
    data.facts += _facts(dataset, "train, read ahead" if options.streaming and split == "train" else split, options.max_length)
    if is_empty.all():
        raise DataError(f"all {len(dataset)} {split} rows are empty: there is nothing to use.")
    if is_empty.any():
        dataset = dataset.select(np.flatnonzero(~is_empty))
    if not any(dataset["num_targets"][:]):
        raise DataError(
            f"none of the {len(dataset)} {split} rows has a target: a language model needs at least 2 tokens in a row, the "
            "end-of-text token included, and a completion that max_length does not cut off."
        )
    if options.block_size:
        num_rows, num_tokens, dataset = len(dataset), sum(dataset["length"][:]), cut_into_blocks(dataset, options.block_size)
        sizes = f"{len(dataset)} blocks of {options.block_size} tokens (the last has {dataset['length'][-1]})"
        data.facts.append(f"{split}: {num_rows} rows, {num_tokens} tokens, concatenated and cut into {sizes}")
    return dataset


def _facts(dataset: Dataset, split: str, max_length: int) -> list[str]:
    """How many rows are not used as they are."""
    lengths, targets = np.asarray(dataset["length"][:]), np.asarray(dataset["num_targets"][:])
    counts = {
        f"truncated to {max_length} tokens": sum(dataset["was_cut"][:]),
        "left out because they are empty": (lengths == 0).sum(),
        "kept although they have no target (they add nothing)": ((targets == 0) & (lengths > 0)).sum(),
    }
    if "answer_is_lost" in dataset.column_names:
        counts["trained as unanswerable, as max_length truncates their answer"] = sum(dataset["answer_is_lost"][:])
    return [f"{split}: {count:,} of {len(dataset):,} rows {what}" for what, count in counts.items() if count]


def _content_hash(train: Dataset, labels: Sequence[str]) -> str:
    """Of all numbers of the training samples and the names of the labels, wherever the rows came from."""
    train = train.with_format("numpy")
    parts: list[Any] = [list(labels)]
    for name in (name for name in _LEARNED_FROM if name in train.column_names):
        rows = [_flat(row) for row in train[name][:]]
        parts += [name, np.concatenate(rows).tobytes(), np.array([len(row) for row in rows], np.int64).tobytes()]
    return Hasher.hash(parts)


def _flat(row: Any) -> np.ndarray:
    """A number, a list of numbers or a list of such lists as one vector."""
    array = np.asarray(row)
    return np.concatenate([*map(_flat, array), []]) if array.dtype == object else np.ravel(array).astype(np.float64)
