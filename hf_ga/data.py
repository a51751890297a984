"""Datasets -> tokenised samples. Everything that is wrong with the data is found here, before a model is built."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset, load_from_disk
from datasets.fingerprint import Hasher
from datasets.utils import logging
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from hf_ga import corpus
from hf_ga.config import FinetuneConfig
from hf_ga.errors import DataError
from hf_ga.order import epoch_order
from hf_ga.tasks import TASKS, Task

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".text": "text", ".parquet": "parquet"}
SPLITS = ("train", "validation", "test")
VALIDATION_ALIASES = ("valid", "val", "dev", "eval")


@dataclass
class PreparedData:
    """Tokenised splits, and what was counted on the way.

    Attributes:
        splits: `train`, `validation` and maybe `test`, with the columns that the task's tokenisation returns.
        labels: names of the labels, in the order of their ids; empty for language models.
        description: one line on where the rows come from. facts: lines on rows that were cut, left out or have no target.
        unigram_entropy: of the training tokens, nats per token. content_hash: of the training samples, wherever they came from.
    """

    task: Task
    splits: dict[str, Dataset]
    tokenizer: PreTrainedTokenizerBase
    labels: list[str]
    description: str
    facts: list[str] = field(default_factory=list)
    unigram_entropy: float = 0.0
    content_hash: str = ""

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """Samples -> arguments of the model."""
        return self.task.collate(samples, self.tokenizer.pad_token_id)


def load_rows(config: FinetuneConfig) -> DatasetDict:
    """The splits that `dataset_name`, `validation_file` and `test_file` name, not tokenised.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows.
    """
    files = {"validation": config.validation_file, "test": config.test_file}
    extra = {split: _load_file(file) for split, file in files.items() if file}
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    if name == "stdlib":
        rows = corpus.load_stdlib()
    elif _file_kind(path) or path.is_file():
        rows = DatasetDict(train=_load_file(name))
    elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        loaded = _load(name, load_from_disk, path)
        rows = loaded if isinstance(loaded, DatasetDict) else DatasetDict(train=loaded)
    elif name.startswith((".", "/", "~")) and not path.exists():
        raise DataError(f"dataset_name {name} does not exist: give a file, a folder, a hub id, or `stdlib`.")
    else:
        rows = _load(name, load_dataset, name, config.dataset_config_name)
    renamed = {alias: "validation" for alias in VALIDATION_ALIASES if alias in rows and "validation" not in rows}
    rows = DatasetDict({**{renamed.get(split, split): dataset for split, dataset in rows.items()}, **extra})
    if "train" not in rows or not len(rows["train"]):
        raise DataError(f"dataset_name {name} has no training rows (splits: {dict(rows.num_rows)}): there is nothing to train on.")
    return _with_validation(DatasetDict({split: rows[split] for split in SPLITS if split in rows}), config)


def prepare_data(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """Load, check and tokenise. Rows that are cut, empty or without target are counted and said, never silently dropped.

    Raises:
        DataError: missing columns, rows of a wrong type, unknown labels, nothing left to train on.
    """
    task, rows = TASKS[config.task], load_rows(config)
    _complete_tokenizer(tokenizer, task)
    prepared = PreparedData(task, {}, tokenizer, [], f"{config.dataset_name}: {dict(rows.num_rows)} rows")
    if config.dataset_name == "stdlib":
        prepared.description = corpus.describe(rows)
    rows = _select_columns(rows, config, prepared)
    for split in SPLITS:
        if split in rows:
            prepared.splits[split] = _tokenised(rows[split], split, config, prepared)
    for split, dataset in prepared.splits.items():
        if not sum(dataset["num_targets"]):
            raise DataError(
                f"none of the {len(dataset)} {split} rows has a target: for causal-lm a row needs at least 2 tokens, the "
                "end-of-text token included."
            )
    _measure(prepared)
    return prepared


def _measure(prepared: PreparedData) -> None:
    """What a model must beat (unigram entropy, majority class), and a hash of what it will be trained on."""
    train = prepared.splits["train"].with_format("numpy")
    ids = np.concatenate(train["input_ids"][:])
    prepared.unigram_entropy = corpus.unigram_entropy(np.bincount(ids, minlength=len(prepared.tokenizer)))
    columns = [ids, train["length"][:]]
    if prepared.labels:
        columns.append(train["label"][:])
        labels, counts = np.unique(prepared.splits["validation"]["label"], return_counts=True)
        name, share = prepared.labels[labels[counts.argmax()]], counts.max() / counts.sum()
        prepared.facts.append(f"majority class of validation: {name}, {share:.1%} of {counts.sum()} rows")
    prepared.content_hash = Hasher.hash([prepared.labels, *(np.asarray(c, np.int64).tobytes() for c in columns)])


def _select_columns(rows: DatasetDict, config: FinetuneConfig, prepared: PreparedData) -> DatasetDict:
    """Keep the text as `text` and, where the task needs it, the label as an integer in `label`."""
    columns = rows["train"].column_names
    text = config.text_column or _default_text_column(rows["train"])
    wanted = {"text": text}
    if prepared.task.needs_labels:
        default = "package" if config.dataset_name == "stdlib" else next((c for c in ("label", "labels") if c in columns), "label")
        wanted["label"] = config.label_column or default
    for split, dataset in rows.items():
        for role, column in wanted.items():
            if column not in dataset.column_names:
                raise DataError(
                    f"{role}_column {column!r} is not in the {split} rows, which have: {', '.join(dataset.column_names)}. Name it "
                    f"with --{role}_column."
                )
    if len(set(wanted.values())) < len(wanted):
        raise DataError(f"text_column and label_column are both {text!r}: name two columns.")
    # Kept under their new names; a column that is called `text` or `label` but is not the chosen one must go first.
    rows = rows.select_columns(list(wanted.values()))
    rows = rows.rename_columns({column: role for role, column in wanted.items() if column != role})
    _check_texts(rows)
    return _with_label_ids(rows, config, prepared) if prepared.task.needs_labels else rows


def _with_label_ids(rows: DatasetDict, config: FinetuneConfig, prepared: PreparedData) -> DatasetDict:
    if config.dataset_name == "stdlib" and config.label_column in (None, "package"):
        kept = corpus.package_labels(DatasetDict(train=rows["train"].rename_column("label", "package")))
        before = sum(rows.num_rows.values())
        rows = rows.filter(set(kept).__contains__, input_columns="label")
        left_out = before - sum(rows.num_rows.values())
        prepared.facts.append(f"left out {left_out} of {before} rows of packages with fewer than 100 training rows")
    if "test" in rows and set(rows["test"]["label"]) == {-1}:
        rows = DatasetDict({split: rows[split] for split in rows if split != "test"})
        prepared.facts.append("left out the test rows: all their labels are -1, which means unlabelled")
    feature = rows["train"].features["label"]
    values = {split: _label_values(dataset, split, feature) for split, dataset in rows.items()}
    if isinstance(feature, ClassLabel):
        prepared.labels = feature.names
        ids = {value: index for index, name in enumerate(feature.names) for value in (name, index)}
    else:
        names = sorted(set(values["train"]), key=lambda value: (str(type(value)), value))
        prepared.labels = [str(name) for name in names]
        ids = {name: index for index, name in enumerate(names)}
    if len(prepared.labels) < 2:
        raise DataError(f"all training rows have the label {prepared.labels[0]!r}: there is nothing to tell apart.")
    for split in rows:
        if unknown := set(values[split]) - set(ids):
            shown = ", ".join(repr(u) for u in sorted(unknown, key=str)[:5])
            raise DataError(
                f"labels of the {split} rows that training does not know: {shown}; it knows {len(prepared.labels)}, such as "
                f"{', '.join(prepared.labels[:5])}. Every label must occur in training: leave other rows out."
            )
    return DatasetDict(
        {
            split: dataset.remove_columns("label").add_column("label", [ids[v] for v in values[split]])
            for split, dataset in rows.items()
        }
    )


def _label_values(dataset: Dataset, split: str, train_feature: Any) -> list[Any]:
    """The label of each row: a name or a whole number."""
    feature, values = dataset.features["label"], list(dataset["label"])
    if not isinstance(feature, Value | ClassLabel) or any(v is None or isinstance(v, float) for v in values):
        raise DataError(
            f"the labels must be names or whole numbers, but the label column of the {split} rows holds {feature}, such as "
            f"{values[:3]}: choose with --label_column."
        )
    if isinstance(feature, ClassLabel) and feature != train_feature:  # other numbers for the names: go by the names
        return [feature.names[v] if 0 <= v < len(feature.names) else v for v in values]
    return values


def _tokenised(rows: Dataset, split: str, config: FinetuneConfig, prepared: PreparedData) -> Dataset:
    tokenizer = prepared.tokenizer
    # An explicit fingerprint: the pickled state of a tokenizer changes when it is used, and the cache would miss.
    key = [rows._fingerprint, config.task, config.max_length, _contents(tokenizer)]
    dataset = rows.map(
        partial(prepared.task.tokenize, tokenizer=tokenizer, max_length=config.max_length),
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
    }
    prepared.facts += [f"{split}: {count} of {len(lengths)} rows {what}" for what, count in facts.items() if count]
    if not len(dataset):
        raise DataError(f"all {len(lengths)} {split} rows are empty: there is nothing to use.")
    return dataset


def _with_validation(rows: DatasetDict, config: FinetuneConfig) -> DatasetDict:
    if "validation" in rows:
        return rows
    train, seed = rows["train"], 0  # not the run's seed: runs with other seeds must stay comparable
    size = max(1, round(len(train) * config.validation_split_percentage / 100))
    if size >= len(train):
        raise DataError(f"{len(train)} training rows are too few to take validation rows from: give --validation_file.")
    order = epoch_order(len(train), seed, 0)
    parts = {"train": train.select(np.sort(order[size:])), "validation": train.select(np.sort(order[:size]))}
    return DatasetDict({**rows, **parts})


def _load_file(file: str) -> Dataset:
    path = Path(file).expanduser()
    kind = _file_kind(path)
    if not path.is_file():
        raise DataError(f"the file {file} {'is a folder' if path.is_dir() else 'does not exist'}.")
    if kind is None:
        raise DataError(f"the file {file} has an unknown ending: it is one of {', '.join(FILE_KINDS)} (or that with .gz).")
    if path.stat().st_size == 0:
        raise DataError(f"the file {file} is empty.")
    return _load(file, load_dataset, kind, data_files=str(path), split="train")


def _load(name: str, load: Callable, *args: Any, **kwargs: Any) -> Any:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises
    try:
        return load(*args, **kwargs)
    except (Exception, StopIteration) as error:  # datasets raises many kinds, some without a message
        cause = error.__cause__ or error
        if "corresponds to no data" in str(cause):
            raise DataError(f"cannot load {name}: it has no rows.") from error
        reason = (str(cause).strip().splitlines() or ["no reason given"])[0]
        raise DataError(f"cannot load {name}: {type(cause).__name__}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)


def _file_kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None


def _default_text_column(dataset: Dataset) -> str:
    strings = [name for name, feature in dataset.features.items() if isinstance(feature, Value) and "string" in feature.dtype]
    if "text" in dataset.column_names or not strings:
        return "text"
    if len(strings) > 1 and not {"label", "labels"} & set(strings):
        return "text"
    return next(name for name in strings if name not in ("label", "labels"))


def _check_texts(rows: DatasetDict) -> None:
    for split, dataset in rows.items():
        feature = dataset.features["text"]
        if not (isinstance(feature, Value) and ("string" in feature.dtype or feature.dtype == "null")):
            raise DataError(f"the text column of the {split} rows holds {feature}, not strings: choose with --text_column.")


def _complete_tokenizer(tokenizer: PreTrainedTokenizerBase, task: Task) -> None:
    """A padding token where there is none, and for a classifier <cls> and <sep> where the tokenizer has them but adds nothing (that
    of the embedded corpus; pretrained ones add theirs).
    """
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    special = [
        (str(token), tokenizer.convert_tokens_to_ids(token)) for token in (tokenizer.cls_token, tokenizer.sep_token) if token
    ]
    if task.needs_labels and tokenizer.num_special_tokens_to_add() == 0 and len(special) == 2:
        template = f"{special[0][0]} $A {special[1][0]}"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)


def _contents(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return str(sorted(tokenizer.get_vocab().items())) + str(tokenizer.special_tokens_map)
    content = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # left by its last use
    return json.dumps(content) + str(tokenizer.special_tokens_map)
