"""Datasets -> tokenised samples. Everything that is wrong with the data is found here, before a model is built."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, Value
from datasets.fingerprint import Hasher
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from hf_ga import corpus, embedded
from hf_ga.baselines import measure
from hf_ga.chat import chat_columns
from hf_ga.choices import encode_choices
from hf_ga.columns import choose_columns, flag_of
from hf_ga.config import FinetuneConfig
from hf_ga.errors import DataError
from hf_ga.labels import encode_labels
from hf_ga.masking import KeyedMasks
from hf_ga.sources import SPLITS, load_file, load_rows
from hf_ga.spans import encode_answers
from hf_ga.streamed import load_streamed, samples_of
from hf_ga.tasks import TASKS, Task
from hf_ga.tokenization import contents_of, cut_into_blocks, tokenize_completions

# Columns of samples that only metrics and predictions need; see the functions that tokenise.
FOR_METRICS = ("starts", "ends", "no_answer", "context", "answers", "answer_is_lost", "target")
TEXTS = {"text", "text_pair", "question", "context", "target"}


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
    stream: IterableDataset | None = None

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
    task = TASKS[config.task]
    rows, stream = load_streamed(config) if config.streaming else (load_rows(config), None)
    _complete_tokenizer(tokenizer, task)
    prepared = PreparedData(task, {}, tokenizer, {}, config.mlm_probability, _describe(rows, config))
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
    if stream is not None:
        prepared.unigram_entropy = None  # of the first samples only
        tokenize = _tokenizing(prepared.columns, config, prepared)
        prepared.stream = samples_of(stream, prepared.columns, prepared.labels, tokenize)
    return prepared


def prepare_unlabelled(config: FinetuneConfig, data: PreparedData, file: str) -> tuple[Dataset, Dataset, Dataset]:
    """A file of rows to predict.

    Returns:
        (the rows as they are, their columns under the names of the roles, the samples: one a row, empty where the row is). For
        token classification `label` is the number of the word, at its first piece.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    rows = load_file(file)
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
        partial(tokenize, tokenizer=data.tokenizer, max_length=config.max_length),
        batched=True,
        remove_columns=inputs.column_names,
        load_from_cache_file=False,
        desc="tokenising rows to predict",
    )
    return rows, named, samples


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
        DataError: texts are not strings, or words not lists of them.
    """
    rows = rows.select_columns(list(roles.values()))
    rows = rows.rename_columns({column: role for role, column in roles.items() if column != role})
    for split, dataset in rows.items():
        for role in TEXTS & set(dataset.column_names):
            feature = dataset.features[role]
            if not (isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")):
                what = "text" if role == "text_pair" else role
                raise DataError(
                    f"the {what} column of the {split} rows holds {feature}, not strings: choose with --{flag_of(role)}."
                )
        if "tokens" in dataset.column_names and not _are_words(dataset.features["tokens"]):
            raise DataError(
                f"the words of the {split} rows must be lists of strings, but their column holds {dataset.features['tokens']}: "
                "choose with --text_column."
            )
    return rows


def _are_words(feature: Any) -> bool:
    inner = getattr(feature, "feature", None)
    return isinstance(inner, Value) and ("string" in inner.dtype or inner.dtype == "null")


def _tokenised(rows: Dataset, split: str, config: FinetuneConfig, prepared: PreparedData) -> Dataset:
    tokenize = _tokenizing(rows.column_names, config, prepared)
    is_chat, max_length = tokenize.func is tokenize_completions, tokenize.keywords["max_length"]
    # An explicit fingerprint: the pickled state of a tokenizer changes when it is used, and the cache would miss.
    key = [rows._fingerprint, config.task, is_chat, max_length, contents_of(prepared.tokenizer), _FORMAT]
    dataset = rows.map(
        tokenize,
        batched=True,
        remove_columns=rows.column_names,
        new_fingerprint=Hasher.hash(key),
        desc=f"tokenising {split}",
    )
    lengths = np.asarray(dataset["length"])
    targets, cut = np.asarray(dataset["num_targets"]), np.asarray(dataset["was_cut"])
    if empty := int((lengths == 0).sum()):
        dataset = dataset.select(np.flatnonzero(lengths))
    facts = {
        f"cut at {config.max_length} tokens": int(cut.sum()),
        "left out because they are empty": empty,
        "kept although they have no target (they add nothing)": int(((targets == 0) & (lengths > 0)).sum()),
        **_facts_of_answers(dataset),
    }
    shown = "train, read ahead" if config.streaming and split == "train" else split
    prepared.facts += [f"{shown}: {count} of {len(lengths)} rows {what}" for what, count in facts.items() if count]
    if not len(dataset):
        raise DataError(f"all {len(lengths)} {split} rows are empty: there is nothing to use.")
    if config.block_size:
        num_rows, dataset = len(dataset), cut_into_blocks(dataset, config.block_size)
        sizes = f"{len(dataset)} blocks of {config.block_size} tokens (the last has {dataset['length'][-1]})"
        prepared.facts.append(f"{split}: {num_rows} rows, {sum(dataset['length'])} tokens, put together and cut into {sizes}")
    return dataset


def _tokenizing(roles: Iterable[str], config: FinetuneConfig, prepared: PreparedData) -> partial:
    """Rows by role -> columns of samples."""
    tokenize = tokenize_completions if chat_columns(list(roles)) else prepared.task.tokenize
    return partial(tokenize, tokenizer=prepared.tokenizer, max_length=None if config.block_size else config.max_length)


def _facts_of_answers(dataset: Dataset) -> dict[str, int]:
    if "answer_is_lost" not in dataset.column_names:
        return {}
    place = "the <cls> token, which means no answer"
    return {
        f"have no answer: they learn {place}": sum(not texts for texts in dataset["answers"]),
        f"have an answer that the cut took away: they learn {place}": sum(dataset["answer_is_lost"]),
    }


def _complete_tokenizer(tokenizer: PreTrainedTokenizerBase, task: Task) -> None:
    """A padding token where there is none, and for an encoder <cls> and <sep> (for one with a decoder <eos>) where the tokenizer
    has them but adds nothing (that of the embedded corpus; pretrained ones add theirs).
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    special = [
        (str(token), tokenizer.convert_tokens_to_ids(token)) for token in (tokenizer.cls_token, tokenizer.sep_token) if token
    ]
    if task.pipeline == "text-generation" or tokenizer.num_special_tokens_to_add() or len(special) != 2:
        return
    if task.labels == "target":  # as T5's
        end = str(tokenizer.eos_token)
        ids = [(end, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=ids)
    else:
        first, end = special[0][0], special[1][0]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A {end}", pair=f"{first} $A {end} $B:1 {end}:1", special_tokens=special
        )


_FORMAT = 4  # part of the cache key: raise it whenever tokenisation would give other samples
