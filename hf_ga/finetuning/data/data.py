"""Datasets -> tokenized samples. All errors in the data are found here, before a model is built."""

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from datasets.fingerprint import Hasher
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.chat.columns import chat_columns
from hf_ga.finetuning.data.columns import choose_columns, rename_columns
from hf_ga.finetuning.data.encoding.choices import encode_choices
from hf_ga.finetuning.data.encoding.collation import ENTRIES
from hf_ga.finetuning.data.encoding.labels import RULES, encode_labels, encode_numbers
from hf_ga.finetuning.data.encoding.masking import mask_samples
from hf_ga.finetuning.data.encoding.spans import encode_answers
from hf_ga.finetuning.data.encoding.tokenization import (
    complete_tokenizer,
    encoding_settings,
    split_into_blocks,
)
from hf_ga.finetuning.data.formats.corpus import SPLITS
from hf_ga.finetuning.data.formats.documents import flatten_articles
from hf_ga.finetuning.data.formats.files import load_files, wrap_read_errors
from hf_ga.finetuning.data.options import DataOptions, as_list
from hf_ga.finetuning.data.sources import first_rows, load_rows
from hf_ga.finetuning.data.streamed import StreamedSamples
from hf_ga.finetuning.data.tasks import TASKS, Task

# Roles of columns that only training and evaluation need: rows to predict may lack them.
TRAINING_ROLES = {"label", "answers", "target", "weight"}
# Columns of a sample that the loss depends on; the others are for metrics, predictions and the log.
_LOSS_COLUMNS = ("input_ids", *ENTRIES, "text_ids", "length")
# Columns that the log counts.
_NOTED_COLUMNS = (
    "length",
    "num_targets",
    "was_truncated",
    "window_index",
    "answers",
    "answer_is_lost",
    "notes",
)
# Part of the cache key of tokenized rows: increment when the columns of samples change.
_CACHE_VERSION = 7
# Part of `PreparedData.identity`: increment when the same rows are tokenized differently.
_TOKENIZATION_VERSION = 6
# (rows, tokenized samples); see `prepare_unlabelled`.
Unlabelled = tuple[Dataset, Dataset]


@dataclass
class PreparedData:
    """The tokenized splits of a run, and what is known about them.

    Attributes:
        options: The options that the data were prepared with.
        task: The task.
        splits: Split name (`train`, `validation`, `test`, as far as they exist) -> samples, with
            the columns of the task's tokenization.
        tokenizer: The tokenizer of the model.
        columns: Role -> column of the rows, see `choose_columns`.
        description: One line on the source of the rows, for the log.
        labels: Class names in the order of their ids; empty if the task has no classes.
        notes: Lines for the log, such as how many rows were truncated or skipped.
        content_hash: Hash of the training samples, independent of their source; "" without them.
        identity: Hashes of what the training samples are made of, by name: the rows, the tokenizer,
            and the chat template if the rows are conversations. They do not depend on what the
            template renders, which may be today's date.
        stream: With `streaming`, all training samples, which are read while training; `splits`
            contains only the first ones.
    """

    options: DataOptions
    task: Task
    splits: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase
    columns: dict[str, str]
    description: str
    labels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    content_hash: str = ""
    identity: dict[str, str | None] = field(default_factory=dict)
    stream: StreamedSamples | None = None

    @property
    def collate(self) -> partial:
        """The collate function of the task with all its settings: samples -> keyword arguments of
        the model.
        """
        settings: dict[str, Any] = {"pad_token_id": self.tokenizer.pad_token_id}
        if self.task.labels == "classes":
            settings["num_labels"] = len(self.labels)
        return partial(self.task.collate, **settings)

    def samples(self, split: str) -> Any:
        """Return the samples of a split for a `WindowLoader`: only the columns that the loss
        depends on. Those of a masked LM are masked.

        Raises:
            ConfigError: If the task is masked-lm and the tokenizer has no mask token.
        """
        dataset = _select_loss_columns(self.splits[split])
        if self.task.pipeline != "fill-mask":
            return dataset
        if self.tokenizer.mask_token_id is None:
            raise ConfigError(
                "masked-lm needs a tokenizer with a mask token, but this one has none: use a "
                "BERT-like model."
            )
        masks = DataCollatorForLanguageModeling(
            self.tokenizer, mlm_probability=self.options.mlm_probability
        )
        return dataset.with_transform(partial(mask_samples, masks=masks))


def prepare_data(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    model_labels: Sequence[str] | None = None,
) -> PreparedData:
    """Load the rows of all splits, choose and check their columns, encode labels, and tokenize.

    Rows that are truncated, empty or without target are counted in `PreparedData.notes`.

    Args:
        options: The options of the run's data.
        tokenizer: The tokenizer of the model. It is changed: a missing padding token and special
            tokens are set (see `complete_tokenizer`), and the truncation side.
        model_labels: Class names of a model whose head is trained already, in the order of its
            outputs.

    Raises:
        DataError: If columns are missing, rows have a wrong type, labels are unknown, or nothing is
            left to train on.
        ConfigError: If options or the tokenizer do not fit the data or the task.
    """
    task = TASKS[options.task]
    notes: list[str] = []
    rows, stream = load_rows(options, notes)
    architectures = {"text-generation": "decoder", "text2text-generation": "encoder-decoder"}
    complete_tokenizer(tokenizer, architectures.get(task.pipeline, "encoder"))
    if options.truncation_side is not None:
        tokenizer.truncation_side = options.truncation_side
        tokenizer.init_kwargs["truncation_side"] = options.truncation_side
    if tokenizer.truncation_side == "left" and options.source_prefix:
        raise ConfigError(
            f"truncation from the left would remove source_prefix {options.source_prefix!r} from "
            "long sources: set truncation_side right, or omit source_prefix."
        )
    data = PreparedData(
        options=options,
        task=task,
        splits={},
        tokenizer=tokenizer,
        columns={},
        description=_describe(rows, options),
        notes=notes,
    )
    if task.labels in ("class", "classes", "tags"):
        data.labels = list(model_labels or [])
    if rows:
        data.columns = choose_columns(rows, options, task)
        template = tokenizer.chat_template if chat_columns(data.columns) else None
        names = dict.fromkeys(name for dataset in rows.values() for name in dataset.column_names)
        unused = [name for name in names if name not in data.columns.values()]
        if unused:
            data.notes.append(f"unused columns: {', '.join(unused)}")
        rows = rename_columns(rows, data.columns)
        rows = _encode_targets(rows, data, model_labels)
        if template and "strftime_now" in str(template):
            data.notes.append(
                "the chat template renders the current date: samples depend on when they are "
                "tokenized"
            )
    for split in SPLITS:
        is_used = not (options.eval_only and split == "train")
        if split in rows and is_used:
            data.splits[split] = _tokenize_split(rows[split], split, data)
    if "train" in data.splits:
        data.content_hash = _hash_rows(_select_loss_columns(data.splits["train"]), data)
        data.identity = {
            "data": _hash_rows(rows["train"], data),
            "tokenizer": _short_hash([encoding_settings(tokenizer), _TOKENIZATION_VERSION]),
            "chat_template": None if template is None else _short_hash(template),
        }
        if "validation" in rows:
            data.identity["validation"] = _hash_rows(rows["validation"], data)
    if stream is not None:
        data.stream = StreamedSamples(
            stream, _dataset_names(options), data.columns, data.labels, _tokenize_function(data)
        )
    return data


def prepare_unlabelled(data: PreparedData) -> Unlabelled:
    """Load and tokenize the rows of `predict_file`, which need no labels.

    Args:
        data: The prepared data of the run. Lines for the log are appended to its `notes`, and its
            `columns` are chosen if the run has no other rows.

    Returns:
        (the rows; their samples). There is at least one sample per row, and an empty row has an
        empty sample. For token classification, the `label` of a sample has the index of each word
        at the word's first token.

    Raises:
        DataError: If a file cannot be read, or lacks a column.
    """
    options = data.options
    files = as_list(options.predict_file)
    rows = load_files(files, "predict", field=options.field, notes=data.notes)
    if options.task == "question-answering":
        rows = flatten_articles(rows)
    rows = first_rows(rows, options.max_predict_samples)
    # Nested columns of seq2seq are flattened, as in `load_rows`.
    splits = DatasetDict(predict=rows.flatten() if options.task == "seq2seq" else rows)
    if not data.columns:
        data.columns = choose_columns(splits, options, data.task)
    roles = {role: column for role, column in data.columns.items() if role not in TRAINING_ROLES}
    inputs = rename_columns(splits, roles)["predict"]
    if data.task.labels == "choice":
        inputs = encode_choices(inputs, "predict")
    return rows, _map_tokenization(inputs, "predict", data)


def _dataset_names(options: DataOptions) -> str:
    """Return the names of a run's datasets, separated by commas, for the log and for errors."""
    return ", ".join(as_list(options.dataset_name))


def _describe(rows: DatasetDict, options: DataOptions) -> str:
    """Describe the source of the rows and their number per split in one line, for the log."""
    if not rows:
        return "no rows to evaluate"
    name = _dataset_names(options)
    if name == "stdlib":
        # If only files are evaluated, the embedded corpus, the default name, is not read.
        files = ", ".join(as_list(options.validation_file) + as_list(options.test_file))
        corpus_name = f"standard library of Python {platform.python_version()}"
        name = corpus_name if "train" in rows else files
    counts = {split: f"{count:,} {split}" for split, count in rows.num_rows.items()}
    if options.streaming:
        counts["train"] = f"a stream, {len(rows['train'])} rows of it read ahead"
    return f"{name}: {', '.join(counts.values())} rows"


def _encode_targets(
    rows: DatasetDict, data: PreparedData, model_labels: Sequence[str] | None
) -> DatasetDict:
    """Check the labels, answers, choices or scores of all splits, and convert them to what the
    task's tokenization reads.
    """
    label_type = data.task.labels
    rows = _drop_unlabelled_test_rows(rows, data)
    for split, dataset in rows.items():
        if "weight" in data.columns:
            dataset = encode_numbers(dataset, split, "weight", "weight", data.notes)
        if label_type in RULES and "label" in data.columns:
            dataset = encode_numbers(dataset, split, "label", label_type, data.notes)
        if label_type == "answers":
            dataset = encode_answers(dataset, split)
        if label_type == "choice":
            dataset = encode_choices(dataset, split)
        rows[split] = dataset
    if label_type not in ("class", "classes", "tags"):
        return rows
    rows, data.labels = encode_labels(rows, label_type, model_labels, data.notes)
    return rows


def _drop_unlabelled_test_rows(rows: DatasetDict, data: PreparedData) -> DatasetDict:
    """Drop the split `test` if all its labels are -1, which means unlabelled on the hub, empty or
    None.
    """
    label_type = data.task.labels
    if "test" not in rows or label_type not in ("class", "number", "choice"):
        return rows
    if not all(value in (-1, "", None) for value in rows["test"]["label"]):
        return rows
    rows = DatasetDict({split: rows[split] for split in rows if split != "test"})
    data.notes.append(
        "skipped the test rows: all their labels are -1 or empty, which means unlabelled"
    )
    if not rows:
        raise DataError(
            "all labels of the test rows are -1 or empty, which means unlabelled: there is nothing "
            "to evaluate."
        )
    return rows


def _tokenize_function(data: PreparedData) -> partial:
    """Return the tokenization of the task with all its settings: a function from a batch of rows (a
    list per role) to samples (a list per column).
    """
    options = data.options
    # Only some tasks have these options: other tokenizations have no such argument.
    task_options = {
        "prefix": options.source_prefix,
        "max_target_length": options.max_target_length,
        "doc_stride": options.doc_stride,
    }
    settings = {name: value for name, value in task_options.items() if value is not None}
    return partial(
        data.task.tokenize,
        tokenizer=data.tokenizer,
        # Texts that become blocks are not truncated.
        max_length=None if options.block_size else options.max_length,
        **settings,
    )


def _tokenize_split(rows: Dataset, split: str, data: PreparedData) -> Dataset:
    """Tokenize the rows of one split, and drop samples without tokens. If `block_size` is set, the
    samples are concatenated and split into blocks.
    """
    options = data.options
    samples = _map_tokenization(rows, split, data)
    name = "train, read ahead" if options.streaming and split == "train" else split
    data.notes += _notes_on_samples(samples, name, data)
    if "weight" in samples.column_names:
        weights = np.asarray(samples["weight"][:])
        data.notes.append(
            f"{split}: rows weighted by {options.weight_column} ({weights.min():g} to "
            f"{weights.max():g}; {(weights == 0).sum():,} of {len(weights):,} rows have weight 0)"
        )
    # The whole column at once: numpy would index a column of `datasets` row by row.
    is_empty = np.asarray(samples["length"][:]) == 0
    if is_empty.all():
        raise DataError(f"all {len(samples)} {split} rows are empty or null: give rows with text.")
    if is_empty.any():
        samples = samples.select(np.flatnonzero(~is_empty))
    if not any(samples["num_targets"][:]):
        raise DataError(
            f"none of the {len(samples)} {split} rows has a target: a language model needs at "
            "least 2 tokens in a row, the end-of-text token included, and a completion within "
            "max_length."
        )
    if options.block_size:
        num_rows = len(samples)
        num_tokens = sum(samples["length"][:])
        samples = split_into_blocks(samples, options.block_size)
        blocks = (
            f"{len(samples)} blocks of {options.block_size} tokens (the last has "
            f"{samples['length'][-1]})"
        )
        data.notes.append(
            f"{split}: {num_rows} rows, {num_tokens} tokens, concatenated and split into {blocks}"
        )
    return samples


def _map_tokenization(rows: Dataset, split: str, data: PreparedData) -> Dataset:
    """Tokenize all rows of a split, or load them from the cache of `datasets`."""
    tokenize = _tokenize_function(data)
    # The cache needs an explicit key: that of `datasets` is made of the pickled tokenizer, which
    # changes when the tokenizer is used.
    settings = [value for name, value in tokenize.keywords.items() if name != "tokenizer"]
    cache_key = [
        rows._fingerprint,
        tokenize.func.__name__,
        settings,
        encoding_settings(data.tokenizer),
        data.tokenizer.chat_template,
        _CACHE_VERSION,
    ]
    with wrap_read_errors(f"the {split} rows"):
        return rows.map(
            tokenize,
            batched=True,
            remove_columns=[name for name in rows.column_names if name != "weight"],
            new_fingerprint=Hasher.hash(cache_key),
            desc=f"tokenizing {split}",
        )


def _notes_on_samples(samples: Dataset, name: str, data: PreparedData) -> list[str]:
    """Return lines for the log on how many rows of a split are truncated, skipped, without a
    target, without an answer, or rendered incompletely by a chat template; only counts above 0.
    """
    noted = [name for name in _NOTED_COLUMNS if name in samples.column_names]
    table = samples.select_columns(noted).to_pandas()
    num_rows = len(table)
    max_length = data.options.max_length
    from_left = " from the left" if data.tokenizer.truncation_side == "left" else ""
    is_empty = table["length"] == 0
    counts = {
        f"truncated to {max_length} tokens{from_left}": table["was_truncated"].sum(),
        "skipped because they are empty or null": is_empty.sum(),
        "without a target (they do not contribute to the loss)": (
            (table["num_targets"] == 0) & ~is_empty
        ).sum(),
    }
    if "answers" in table:
        # A row may have several samples: windows of its context.
        answers_of_rows = table["answers"][table["window_index"] == 0]
        num_rows = len(answers_of_rows)
        lost = "trained as unanswerable, as no sample of max_length has their whole answer"
        counts[lost] = table["answer_is_lost"].sum()
        unanswered = "without an answer, so trained as unanswerable"
        counts[unanswered] = (answers_of_rows.map(len) == 0).sum()
    if "notes" in table:  # what the chat template omits from each row
        counts |= Counter(note for notes in table["notes"] for note in notes.splitlines())
    lines = [
        f"{name}: {count:,} of {num_rows:,} rows {what}" for what, count in counts.items() if count
    ]
    if len(samples) > num_rows:
        lines.append(
            f"{name}: {len(samples):,} windows of at most {max_length} tokens for "
            f"{num_rows:,} questions; a window without the answer is trained as unanswerable"
        )
    return lines


def _select_loss_columns(samples: Dataset) -> Dataset:
    """Select the columns of tokenized samples that the loss depends on (`_LOSS_COLUMNS`)."""
    return samples.select_columns([name for name in _LOSS_COLUMNS if name in samples.column_names])


def _hash_rows(dataset: Dataset, data: PreparedData) -> str:
    """Hash the rows of a split, with columns named by role, and the class names, because the rows
    contain only class ids. The hash (16 hex digits) is part of the identity of a run's data.
    """
    digest = hashlib.sha256(json.dumps(data.labels).encode())
    for rows in dataset.iter(batch_size=1000):
        digest.update(json.dumps(rows, default=str).encode())
    return digest.hexdigest()[:16]


def _short_hash(value: Any) -> str:
    """Hash the settings of a tokenizer, or a chat template, for the identity of a run's data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
