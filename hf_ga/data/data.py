"""Datasets -> tokenised samples. Everything that is wrong with the data is found here, before a model is built."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_ga.data import corpus, embedded
from hf_ga.data.baselines import measure
from hf_ga.data.chat import chat_columns
from hf_ga.data.choices import encode_choices
from hf_ga.data.column_checks import check_columns
from hf_ga.data.columns import choose_columns
from hf_ga.data.labels import encode_labels
from hf_ga.data.masking import KeyedMasks
from hf_ga.data.row_checks import Origin, located, numbers_told, with_row_numbers
from hf_ga.data.sources import SPLITS, load_file, load_rows, origins_of
from hf_ga.data.spans import encode_answers
from hf_ga.data.streamed import StreamedSamples, load_streamed, samples_of
from hf_ga.data.tasks import TASKS, Task
from hf_ga.data.tokenization import complete_tokenizer, contents_of, cut_into_blocks, tokenize_completions
from hf_ga.errors import DataError
from hf_ga.run.config import FinetuneConfig

# Columns of samples that only metrics and predictions need; see the functions that tokenise.
FOR_METRICS = ("starts", "ends", "no_answer", "context", "answers", "answer_is_lost", "target")


@dataclass
class PreparedData:
    """Tokenised splits, and what was counted on the way.

    Attributes:
        splits: `train`, `validation` and maybe `test`, with the columns that the task's tokenisation returns.
        columns: which column of the rows has which role.
        labels: names of the labels, in the order of their ids; empty for language models and regression.
        description: one line on where the rows come from. facts: lines on rows that were cut, left out or have no target.
        unigram_entropy: of the training tokens that may be targets, nats per token; None where tokens are not predicted.
        content_hash: of the training samples, wherever they came from.
        stream: all training samples, where they are read while training; then `train` holds the first ones.
        origins: of the samples of each split, the rows that they were read as.
    """

    task: Task
    splits: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str]
    mlm_probability: float
    description: str
    labels: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    unigram_entropy: float | None = None
    content_hash: str = ""
    stream: StreamedSamples | None = None
    origins: dict[str, Origin] = field(default_factory=dict)

    @property
    def collate(self) -> Any:
        """Samples -> arguments of the model."""
        return self.task.collator(self.tokenizer, len(self.labels), self.mlm_probability)

    @property
    def has_conversations(self) -> bool:
        """Whether rows are prompts with completions."""
        return bool(chat_columns(self.columns, needs_completion=False))

    @property
    def is_masked(self) -> bool:
        """Whether targets are drawn anew in every epoch."""
        return self.task.pipeline == "fill-mask"

    def samples(self, split: str) -> Any:
        """What a loader of windows reads: the samples of a split without what only metrics need, for a masked LM with keys for
        their masks.
        """
        dataset = self.splits[split]
        dataset = dataset.remove_columns([name for name in FOR_METRICS if name in dataset.column_names])
        return KeyedMasks(dataset) if self.is_masked else dataset


def prepare_data(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase, known: Sequence[str] | None = None) -> PreparedData:
    """Load, check and tokenise. Rows that are cut, empty or without target are counted and said, never silently dropped.

    Args:
        known: label names that the model has already, in its order.

    Raises:
        DataError: missing columns, rows of a wrong type, unknown labels, nothing left to train on.
    """
    task, stream, origins = TASKS[config.task], None, origins_of(config)
    if config.streaming:
        rows, stream = load_streamed(config)
    else:
        rows, origins = load_rows(config)
    complete_tokenizer(tokenizer, task.labels, is_decoder=task.pipeline == "text-generation")
    prepared = PreparedData(task, {}, tokenizer, {}, config.mlm_probability, _describe(rows, config), origins=origins)
    with located(origins):
        _prepare(prepared, rows, config, known)
    if stream is not None:
        prepared.unigram_entropy = None  # of the first samples only
        tokenize = _tokenizing(prepared.columns, config, prepared)
        prepared.stream = samples_of(stream, prepared.columns, prepared.labels, tokenize, config.dataset_name)
    return prepared


def _prepare(prepared: PreparedData, rows: DatasetDict, config: FinetuneConfig, known: Sequence[str] | None) -> None:
    """Columns, labels and samples of rows, into `prepared`."""
    task = prepared.task
    prepared.labels = list(known or []) if task.labels in ("class", "classes", "tags") else []
    if rows:
        prepared.columns = choose_columns(rows, config, task)
        rows = _labelled(_renamed(rows, prepared.columns), config, prepared, known)
    for split in SPLITS:
        if split in rows and not (config.eval_only and split == "train"):
            prepared.splits[split] = _tokenised(rows[split], split, config, prepared)
    for split, dataset in prepared.splits.items():
        if not sum(dataset["num_targets"]):
            raise DataError(
                f"none of the {len(dataset)} {split} rows has a target: a language model needs at least 2 tokens in a row, the "
                "end-of-text token included, and a completion that max_length does not cut off."
            )
    if "train" in prepared.splits:
        measure(prepared)


def prepare_unlabelled(config: FinetuneConfig, data: PreparedData, file: str) -> tuple[Dataset, Dataset, Dataset]:
    """A file of rows to predict.

    Returns:
        (the rows as they are, their columns under the names of the roles, the samples: one a row, empty where the row is). For
        token classification `label` is the number of the word, at its first piece.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    rows = load_file(file)
    data.origins["predict"] = Origin("predict", file)
    with located(data.origins):
        return (rows, *_prepare_unlabelled(rows, config, data, file))


def _prepare_unlabelled(rows: Dataset, config: FinetuneConfig, data: PreparedData, file: str) -> tuple[Dataset, Dataset]:
    columns = rows.flatten() if config.task == "seq2seq" else rows  # as `load_rows` does
    if not data.columns:  # nothing else was read
        data.columns = choose_columns(DatasetDict(predict=columns), config, data.task, needs_label=False)
    roles = data.columns
    completions = {"completion", "output", "label", "answers", "answer", "answer_start", "target"}  # what is asked for
    roles = {role: column for role, column in roles.items() if role not in completions}
    for role, column in roles.items():
        if column not in columns.column_names:
            raise DataError(f"predict_file {file} lacks the column {column!r} ({role}); it has: {', '.join(columns.column_names)}.")
    named = _renamed(DatasetDict(predict=columns), roles)["predict"]
    inputs = named
    if data.task.labels == "choice":
        inputs = encode_choices(DatasetDict(predict=named))["predict"]
    if data.task.labels == "tags":
        inputs = named.add_column("label", [list(range(len(words or []))) for words in named["tokens"]])
    tokenize = _no_samples if data.task.pipeline == "text-generation" else data.task.tokenize
    samples = inputs.map(
        with_row_numbers(partial(tokenize, tokenizer=data.tokenizer, max_length=config.max_length), "predict"),
        batched=True,
        with_indices=True,
        remove_columns=inputs.column_names,
        load_from_cache_file=False,
        desc="tokenising rows to predict",
    )
    return named, samples


def _no_samples(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> dict[str, list]:
    """Of prompts, which are tokenised when they are continued."""
    return {"length": [0] * len(next(iter(rows.values())))}


def _describe(rows: DatasetDict, config: FinetuneConfig) -> str:
    if config.streaming:
        numbers = f"of which {len(rows['train'])} rows were read ahead; {len(rows['validation'])} validation rows"
        return f"{config.dataset_name}: a stream, {numbers}"
    if config.dataset_name != "stdlib":
        return f"{config.dataset_name}: {dict(rows.num_rows)} rows"
    if "train" in rows:
        return embedded.describe(config.task, rows)
    files = {"validation": config.validation_file, "test": config.test_file}
    return ", ".join(f"{files[split]}: {len(rows[split])} {split} rows" for split in rows) or "no rows to evaluate"


def _labelled(rows: DatasetDict, config: FinetuneConfig, prepared: PreparedData, known: Sequence[str] | None) -> DatasetDict:
    kind = prepared.task.labels
    if kind in ("none", "target"):
        return rows
    if kind == "answers":
        return encode_answers(rows)
    if config.dataset_name == "stdlib" and prepared.columns["label"] == "package" and "train" in rows:
        kept = corpus.package_labels(DatasetDict(train=rows["train"].rename_column("label", "package")))
        before = sum(rows.num_rows.values())
        rows = rows.filter(set(kept).__contains__, input_columns="label")
        left_out = before - sum(rows.num_rows.values())
        prepared.origins.clear()  # no file's rows
        prepared.facts.append(f"left out {left_out} of {before} rows of packages with fewer than 100 training rows")
    unlabelled = (-1, "", None) if kind == "choice" else (-1,)
    if "test" in rows and kind in ("class", "number", "choice") and all(value in unlabelled for value in rows["test"]["label"]):
        rows = DatasetDict({split: rows[split] for split in rows if split != "test"})
        prepared.facts.append("left out the test rows: all their labels are -1, which means unlabelled")
        if not rows:
            raise DataError("all labels of the test rows are -1, which means unlabelled: there is nothing to evaluate.")
    if kind == "choice":
        return encode_choices(rows)
    rows, prepared.labels = encode_labels(rows, kind, known)
    return rows


def _renamed(rows: DatasetDict, roles: dict[str, str]) -> DatasetDict:
    """The chosen columns under the names of their roles; others that have such a name go first.

    Raises:
        DataError: see `check_columns`.
    """
    rows = rows.select_columns(list(roles.values()))
    rows = rows.rename_columns({column: role for role, column in roles.items() if column != role})
    check_columns(rows)
    return rows


def _tokenised(rows: Dataset, split: str, config: FinetuneConfig, prepared: PreparedData) -> Dataset:
    tokenize = _tokenizing(rows.column_names, config, prepared)
    is_chat, max_length = tokenize.func is tokenize_completions, tokenize.keywords["max_length"]
    # An explicit fingerprint: the pickled state of a tokenizer changes when it is used, and the cache would miss.
    key = [rows._fingerprint, config.task, is_chat, max_length, contents_of(prepared.tokenizer), _FORMAT]
    dataset = rows.map(
        with_row_numbers(tokenize, split),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
        new_fingerprint=Hasher.hash(key),
        desc=f"tokenising {split}",
    )
    lengths = np.asarray(dataset["length"][:])  # at once: numpy would ask a column row by row
    targets, cut = np.asarray(dataset["num_targets"][:]), np.asarray(dataset["was_cut"][:])
    origin, kept, empty = prepared.origins.get(split, Origin(split)), np.flatnonzero(lengths), np.flatnonzero(lengths == 0)
    numbers = origin.numbers if origin.numbers is not None else np.arange(len(lengths))
    if len(empty):
        dataset = dataset.select(kept)
    prepared.origins[split] = Origin(origin.split, origin.file, numbers[kept])
    facts = {
        f"cut at {config.max_length} tokens": int(cut.sum()),
        f"left out because they are empty: {numbers_told(numbers[empty])}": len(empty),
        "kept although they have no target (they add nothing)": int(((targets == 0) & (lengths > 0)).sum()),
        **_facts_of_words(rows, numbers, targets, cut),
        **_facts_of_answers(dataset),
    }
    shown = "train, read ahead" if config.streaming and split == "train" else split
    prepared.facts += [f"{shown}: {count} of {len(lengths)} rows {what}" for what, count in facts.items() if count]
    if not len(dataset):
        raise DataError(f"all {len(lengths)} {split} rows are empty: there is nothing to use.")
    if config.block_size:
        num_rows, dataset = len(dataset), cut_into_blocks(dataset, config.block_size)
        prepared.origins[split] = Origin(f"the blocks of {split}")
        sizes = f"{len(dataset)} blocks of {config.block_size} tokens (the last has {dataset['length'][-1]})"
        prepared.facts.append(f"{split}: {num_rows} rows, {sum(dataset['length'])} tokens, put together and cut into {sizes}")
    return dataset


def _tokenizing(roles: Iterable[str], config: FinetuneConfig, prepared: PreparedData) -> partial:
    """Rows by role -> columns of samples."""
    tokenize = tokenize_completions if chat_columns(list(roles)) else prepared.task.tokenize
    return partial(tokenize, tokenizer=prepared.tokenizer, max_length=None if config.block_size else config.max_length)


def _facts_of_words(rows: Dataset, numbers: np.ndarray, targets: np.ndarray, cut: np.ndarray) -> dict[str, int]:
    """Tokenizers leave nothing of some words: of empty ones, of control characters."""
    if "tokens" not in rows.column_names:
        return {}
    words = np.array([len(words or []) for words in rows["tokens"]])
    lost = np.flatnonzero((words > targets) & ~cut.astype(bool))
    return {f"have words of which no token is left, so that nobody learns their tags: {numbers_told(numbers[lost])}": len(lost)}


def _facts_of_answers(dataset: Dataset) -> dict[str, int]:
    if "answer_is_lost" not in dataset.column_names:
        return {}
    place = "the <cls> token, which means no answer"
    return {
        f"have no answer: they learn {place}": sum(not texts for texts in dataset["answers"]),
        f"have an answer that the cut took away: they learn {place}": sum(dataset["answer_is_lost"]),
    }


_FORMAT = 4  # part of the cache key: raise it whenever tokenisation would give other samples
