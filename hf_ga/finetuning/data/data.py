"""Datasets -> tokenized samples. All errors in the data are found here, before a model is built."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.chat.columns import chat_columns
from hf_ga.finetuning.data.choices import encode_choices
from hf_ga.finetuning.data.columns import FLAGS, choose_columns, rename_columns
from hf_ga.finetuning.data.corpus import SPLITS
from hf_ga.finetuning.data.files import load_files, reading
from hf_ga.finetuning.data.labels import (
    encode_labels,
    facts_of_whole_numbers,
    one_hot_as_ids,
    similar_names,
)
from hf_ga.finetuning.data.masking import KeyedMasks
from hf_ga.finetuning.data.numeric import as_numbers
from hf_ga.finetuning.data.options import DataOptions, Several, as_list
from hf_ga.finetuning.data.pairs import check_scores
from hf_ga.finetuning.data.sources import first_rows, load_rows
from hf_ga.finetuning.data.spans import encode_answers
from hf_ga.finetuning.data.squad import questions_of
from hf_ga.finetuning.data.streamed import StreamedSamples
from hf_ga.finetuning.data.tasks import TASKS, Task
from hf_ga.finetuning.data.tokenization import (
    complete_tokenizer,
    contents_of,
    cut_into_blocks,
    encoding_of,
    tokenize_completions,
)

# Roles of columns that rows to predict do not need.
LEARNED = {"label", "answers", "target", "weight"}
# Numeric columns of a sample that determine what a model learns; the others are for metrics,
# predictions and the log.
_LEARNED_FROM = (
    "input_ids",
    "length",
    "token_type_ids",
    "text_ids",
    "label",
    "labels",
    "start_positions",
    "end_positions",
    "weight",
)
_FORMAT = 6  # part of the cache key: increment when tokenization changes
# Rows to predict: original, with columns named by role, tokenized; see `prepare_unlabelled`.
Unlabelled = tuple[Dataset, Dataset, Dataset]


@dataclass
class PreparedData:
    """Tokenized splits, and facts about them.

    Attributes:
        splits: `train`, `validation` and optionally `test`, with the columns of the task's
            tokenization.
        columns: role -> column of the rows.
        labels: names of the labels, in the order of their ids; empty for language models and
            regression.
        description: one line on the source of the rows. facts: lines on rows that were truncated,
            skipped or have no target.
        content_hash: of the training samples, independent of their source.
        identity: hashes of what the training samples are made of, by name: the rows, the tokenizer,
            and the chat template where the rows are conversations. They do not depend on what the
            template renders, which may be today's date.
        stream: all training samples if they are read while training; then `train` contains the
            first ones.
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
    identity: dict[str, str | None] = field(default_factory=dict)
    stream: StreamedSamples | None = None

    @property
    def collate(self) -> partial:
        """Samples -> keyword arguments of the model.

        Raises:
            ConfigError: a masked LM whose tokenizer has no mask token.
        """
        settings: dict[str, Any] = {"pad_token_id": self.tokenizer.pad_token_id}
        if self.task.labels == "classes":
            settings["num_labels"] = len(self.labels)
        if self.task.pipeline == "fill-mask":
            if self.tokenizer.mask_token_id is None:
                raise ConfigError(
                    "masked-lm needs a tokenizer with a mask token, but this one has none: use a "
                    "BERT-like model."
                )
            settings |= {
                "special_ids": tuple(self.tokenizer.all_special_ids),
                "mask_token_id": self.tokenizer.mask_token_id,
            }
            settings |= {"vocab_size": len(self.tokenizer), "probability": self.mlm_probability}
        return partial(self.task.collate, **settings)

    def samples(self, split: str) -> Any:
        """A split as a dataset for a window loader: only what a model learns from, and for a masked
        LM with mask keys.
        """
        dataset = _learned_from(self.splits[split])
        return KeyedMasks(dataset) if self.task.pipeline == "fill-mask" else dataset


def prepare_data(
    options: DataOptions, tokenizer: PreTrainedTokenizerBase, known: Sequence[str] | None = None
) -> PreparedData:
    """Load, check and tokenize. Rows that are truncated, empty or without target are counted and
    logged.

    Args:
        known: label names of the model's trained head, in its order.

    Raises:
        DataError: missing columns, rows of a wrong type, unknown labels, nothing left to train on.
        ConfigError: options or a tokenizer that do not fit the data or the task.
    """
    task = TASKS[options.task]
    facts: list[str] = []
    rows, stream = load_rows(options, facts)
    complete_tokenizer(tokenizer, task.labels, is_decoder=task.pipeline == "text-generation")
    _set_truncation(tokenizer, options)
    data = PreparedData(task, {}, tokenizer, {}, options.mlm_probability, _describe(rows, options))
    data.facts += facts
    data.labels = list(known or []) if task.labels in ("class", "classes", "tags") else []
    if rows:
        data.columns = choose_columns(rows, options, task)
        data.facts += _unused_columns(rows, data.columns)
        if stream is None:  # the rows of a stream are not converted
            rows = as_numbers(rows, _columns_of_numbers(data), data.facts)
        rows = _labelled(rename_columns(rows, data.columns), data, known)
        data.facts += _facts_of_template(data)
    for split in SPLITS:
        if split in rows and not (options.eval_only and split == "train"):
            data.splits[split] = _tokenized(rows[split], split, options, data)
    if "train" in data.splits:
        data.content_hash = _content_hash(data.splits["train"], data.labels)
        data.identity = _identity_of(rows["train"], data)
        if "validation" in rows:
            data.identity["validation"] = _hash_of_rows(rows["validation"], data)
    if stream is not None:
        tokenize = _tokenizing(data.columns, options, data)
        data.stream = StreamedSamples(
            stream, _name_of(options), data.columns, data.labels, tokenize
        )
    return data


def _set_truncation(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
    """Let the tokenizer truncate the side that is asked for; it is saved with the model."""
    if options.truncation_side is not None:
        tokenizer.truncation_side = options.truncation_side
        tokenizer.init_kwargs["truncation_side"] = options.truncation_side
    if tokenizer.truncation_side == "left" and options.source_prefix:
        raise ConfigError(
            f"truncation from the left would remove source_prefix {options.source_prefix!r} from "
            "long sources: set truncation_side right, or omit source_prefix."
        )


def prepare_unlabelled(options: DataOptions, data: PreparedData, files: Several) -> Unlabelled:
    """Rows of files to predict, and their samples: one per row, empty for an empty row. For token
    classification a sample's `label` is the index of the word, at its first token.

    Raises:
        DataError: a file cannot be read, or lacks a column.
    """
    rows = load_files(as_list(files), "predict", field=options.field, facts=data.facts)
    if options.task == "question-answering":
        rows = questions_of(DatasetDict(predict=rows))["predict"]
    rows = first_rows(rows, options.max_predict_samples)
    splits = DatasetDict(
        predict=rows.flatten() if options.task == "seq2seq" else rows
    )  # same as in `load_rows`
    if not data.columns:  # no other rows were read
        data.columns = choose_columns(splits, options, data.task)
    roles = {role: column for role, column in data.columns.items() if role not in LEARNED}
    splits = rename_columns(splits, roles)
    named = inputs = splits["predict"]
    if data.task.labels == "choice":
        inputs = encode_choices(splits)["predict"]
    if data.task.labels == "tags":
        inputs = named.add_column(
            "label", [list(range(len(words or []))) for words in named["tokens"]]
        )
    tokenize = _tokenizing(named.column_names, options, data)
    with reading(", ".join(as_list(files))):
        samples = inputs.map(
            tokenize, batched=True, remove_columns=inputs.column_names, load_from_cache_file=False
        )
    return rows, named, samples


def _name_of(options: DataOptions) -> str:
    return ", ".join(as_list(options.dataset_name))


def _describe(rows: DatasetDict, options: DataOptions) -> str:
    name = _name_of(options)
    if options.streaming:
        numbers = (
            f"{len(rows['train'])} rows of it read ahead; {len(rows['validation'])} validation rows"
        )
        return f"{name}: a stream, {numbers}"
    if not rows:
        return "no rows to evaluate"
    if name == "stdlib":
        files = as_list(options.validation_file) + as_list(options.test_file)
        name = (
            f"standard library of Python {platform.python_version()}"
            if "train" in rows
            else ", ".join(files)
        )
    return (
        f"{name}: {', '.join(f'{count:,} {split}' for split, count in rows.num_rows.items())} rows"
    )


def _unused_columns(rows: DatasetDict, roles: dict[str, str]) -> list[str]:
    """A line that names the columns without a role, if there are any."""
    names = dict.fromkeys(name for dataset in rows.values() for name in dataset.column_names)
    unused = [name for name in names if name not in roles.values()]
    return [f"unused columns: {', '.join(unused)}"] if unused else []


def _labelled(rows: DatasetDict, data: PreparedData, known: Sequence[str] | None) -> DatasetDict:
    kind = data.task.labels
    if kind == "pairs":
        check_scores(rows)
    if kind in ("none", "target", "pairs"):
        return rows
    if kind == "answers":
        return DatasetDict(
            {split: encode_answers(dataset, split) for split, dataset in rows.items()}
        )
    unlabelled = (-1, "", None) if kind == "choice" else (-1,)
    if (
        "test" in rows
        and kind in ("class", "number", "choice")
        and all(value in unlabelled for value in rows["test"]["label"])
    ):
        rows = DatasetDict({split: rows[split] for split in rows if split != "test"})
        data.facts.append("skipped the test rows: all their labels are -1, which means unlabelled")
        if not rows:
            raise DataError(
                "all labels of the test rows are -1, which means unlabelled: there is nothing to "
                "evaluate."
            )
    if kind == "choice":
        return encode_choices(rows)
    if kind == "classes":
        rows, num_classes = one_hot_as_ids(rows)
        if num_classes:
            data.facts.append(
                f"labels: a 0 or 1 for each of {num_classes} classes (one-hot); if they are lists "
                "of the classes that apply, write names instead of numbers"
            )
    if kind == "class":
        data.facts += facts_of_whole_numbers(rows)
    rows, data.labels = encode_labels(rows, kind, known)
    data.facts += similar_names(data.labels)
    return rows


def _facts_of_template(data: PreparedData) -> list[str]:
    if not chat_columns(data.columns) or "strftime_now" not in str(data.tokenizer.chat_template):
        return []
    return ["the chat template renders the current date: samples depend on when they are tokenized"]


def _columns_of_numbers(data: PreparedData) -> dict[str, str]:
    """Flags that name a column of numbers -> the column."""
    roles = ("label", "weight") if data.task.labels in ("number", "pairs") else ("weight",)
    return {FLAGS[role]: data.columns[role] for role in roles if role in data.columns}


def _tokenizing(roles: Iterable[str], options: DataOptions, data: PreparedData) -> partial:
    """The function from rows by role to columns of samples."""
    tokenize = tokenize_completions if chat_columns(list(roles)) else data.task.tokenize
    of_tasks = {
        "prefix": options.source_prefix,
        "max_target_length": options.max_target_length,
        "doc_stride": options.doc_stride,
    }
    given = {name: value for name, value in of_tasks.items() if value is not None}
    return partial(
        tokenize,
        tokenizer=data.tokenizer,
        max_length=None if options.block_size else options.max_length,
        **given,
    )


def _tokenized(rows: Dataset, split: str, options: DataOptions, data: PreparedData) -> Dataset:
    tokenize = _tokenizing(rows.column_names, options, data)
    # An explicit fingerprint: the pickled state of a tokenizer changes when it is used, and the
    # cache would miss.
    settings = [value for name, value in tokenize.keywords.items() if name != "tokenizer"]
    key = [
        rows._fingerprint,
        tokenize.func.__name__,
        settings,
        contents_of(data.tokenizer),
        _FORMAT,
    ]
    with reading(f"the {split} rows"):
        dataset = rows.map(
            tokenize,
            batched=True,
            remove_columns=[name for name in rows.column_names if name != "weight"],
            new_fingerprint=Hasher.hash(key),
            desc=f"tokenizing {split}",
        )
    is_empty = (
        np.asarray(dataset["length"][:]) == 0
    )  # at once: numpy would index a column row by row
    data.facts += _facts(
        dataset,
        "train, read ahead" if options.streaming and split == "train" else split,
        options,
        data.tokenizer.truncation_side,
    )
    if "weight" in dataset.column_names:
        data.facts.append(f"{split}: {_fact_of_weights(dataset, options)}")
    if is_empty.all():
        raise DataError(f"all {len(dataset)} {split} rows are empty or null: give rows with text.")
    if is_empty.any():
        dataset = dataset.select(np.flatnonzero(~is_empty))
    if not any(dataset["num_targets"][:]):
        raise DataError(
            f"none of the {len(dataset)} {split} rows has a target: a language model needs at "
            "least 2 tokens in a row, the "
            "end-of-text token included, and a completion within max_length."
        )
    if options.block_size:
        num_rows = len(dataset)
        num_tokens = sum(dataset["length"][:])
        dataset = cut_into_blocks(dataset, options.block_size)
        sizes = (
            f"{len(dataset)} blocks of {options.block_size} tokens (the last has "
            f"{dataset['length'][-1]})"
        )
        data.facts.append(
            f"{split}: {num_rows} rows, {num_tokens} tokens, concatenated and cut into {sizes}"
        )
    return dataset


def _facts(dataset: Dataset, split: str, options: DataOptions, side: str) -> list[str]:
    """How many rows are changed or skipped."""
    lengths = np.asarray(dataset["length"][:])
    targets = np.asarray(dataset["num_targets"][:])
    num_rows = len(dataset)
    if "window" in dataset.column_names:
        num_rows = sum(number == 0 for number in dataset["window"][:])
    from_left = " from the left" if side == "left" else ""
    counts = {
        f"truncated to {options.max_length} tokens{from_left}": sum(dataset["was_cut"][:]),
        "skipped because they are empty or null": (lengths == 0).sum(),
        "without a target (they do not contribute to the loss)": (
            (targets == 0) & (lengths > 0)
        ).sum(),
    }
    if "answer_is_lost" in dataset.column_names:
        reason = "max_length truncates their answer"
        if options.doc_stride is not None:
            reason = "no window contains their whole answer"
        counts[f"trained as unanswerable, as {reason}"] = sum(dataset["answer_is_lost"][:])
    if {"answers", "window"} <= set(dataset.column_names):
        first_windows = np.asarray(dataset["window"][:]) == 0
        has_answer = np.array([bool(texts) for texts in dataset["answers"][:]], bool)
        without = (first_windows & ~has_answer).sum()
        counts["without an answer, so trained as unanswerable"] = without
    if "notes" in dataset.column_names:
        counts |= Counter(note for notes in dataset["notes"][:] for note in notes.splitlines())
    facts = [
        f"{split}: {count:,} of {num_rows:,} rows {what}" for what, count in counts.items() if count
    ]
    if len(dataset) > num_rows:
        facts.append(
            f"{split}: {len(dataset):,} windows of at most {options.max_length} tokens for "
            f"{num_rows:,} questions; a window without the answer is trained as unanswerable"
        )
    return facts


def _fact_of_weights(dataset: Dataset, options: DataOptions) -> str:
    weights = np.asarray(dataset["weight"][:])
    return (
        f"rows weighted by {options.weight_column} ({weights.min():g} to {weights.max():g}; "
        f"{(weights == 0).sum():,} of {len(weights):,} rows have weight 0)"
    )


def _learned_from(samples: Dataset) -> Dataset:
    return samples.select_columns([name for name in _LEARNED_FROM if name in samples.column_names])


def _content_hash(train: Dataset, labels: Sequence[str]) -> str:
    """Hash of what a model learns from: numeric columns of the training samples and label names,
    independent of the source.
    """
    digest = hashlib.sha256(json.dumps(labels).encode())
    for rows in _learned_from(train).iter(batch_size=1000):
        digest.update(json.dumps(rows).encode())
    return digest.hexdigest()[:16]


def _identity_of(train: Dataset, data: PreparedData) -> dict[str, str | None]:
    """Hashes of what the training samples are made of, see `PreparedData`.

    Args:
        train: The rows by role, with labels as ids. Of a stream, those that were read ahead.
        data: With the tokenizer and the names of the labels.
    """
    is_templated = bool(chat_columns(train.column_names))
    template = data.tokenizer.chat_template if is_templated else None
    return {
        "data": _hash_of_rows(train, data),
        "tokenizer": _short_hash([encoding_of(data.tokenizer), _FORMAT]),
        "chat_template": None if template is None else _short_hash(template),
    }


def _hash_of_rows(dataset: Dataset, data: PreparedData) -> str:
    """Hash rows by role, and the names of the labels that their ids stand for."""
    digest = hashlib.sha256(json.dumps(data.labels).encode())
    for rows in dataset.iter(batch_size=1000):
        digest.update(json.dumps(rows, default=str).encode())
    return digest.hexdigest()[:16]


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
