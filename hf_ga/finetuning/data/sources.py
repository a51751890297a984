"""The rows of a run by split (train, validation, test), before tokenization: those of
`--dataset_name`, `--validation_file` and `--test_file`, limited, and with a validation split.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.data.formats.documents import flatten_articles
from hf_ga.finetuning.data.formats.files import (
    is_file,
    join,
    load_files,
    load_folder,
    load_splits,
    to_streams,
    wrap_read_errors,
)
from hf_ga.finetuning.data.options import DataOptions, as_list
from hf_ga.order.order import epoch_order

# Rows of a stream that are read at the start: to choose columns, to collect class names, and to
# test the model on.
NUM_READ_AHEAD = 1000
# Seed that chooses validation rows. Not the run's seed, so that runs with different seeds are
# validated on the same rows.
VALIDATION_SEED = 0
# The name of the embedded corpus, the default of `dataset_name`.
EMBEDDED_CORPUS = "stdlib"


def load_rows(
    options: DataOptions, notes: list[str] | None = None
) -> tuple[DatasetDict, IterableDataset | None]:
    """Load the rows of all splits.

    - Rows of `validation_file` and `test_file` replace those splits of `dataset_name`.
    - If there are no validation rows, `validation_split_percentage` of the training rows are taken.
    - Each split is limited by `max_train_samples`, `max_eval_samples` or `max_predict_samples`.
    - With `eval_only`, training rows are optional; the embedded corpus, which is the default of
      `dataset_name`, is not read if there are files to evaluate or predict.

    Args:
        options: The options of the run's data.
        notes: Lines for the log, on how files were read, are appended to it.

    Returns:
        (rows by split, None). With `streaming`, (rows by split, stream of all training rows): the
        split `train` then has only the first `NUM_READ_AHEAD` rows of the stream.

    Raises:
        ConfigError: If options contradict each other, such as `field` without a JSON file.
        DataError: If a file or dataset is missing or unreadable; if there are no training rows, or
            with `eval_only` no rows at all; if a stream has no validation rows.
    """
    from_files = {}
    for split, files in (("validation", options.validation_file), ("test", options.test_file)):
        if files:
            names = as_list(files)
            from_files[split] = load_files(names, split, field=options.field, notes=notes)
    limits = {
        "train": options.max_train_samples,
        "validation": options.max_eval_samples,
        "test": options.max_predict_samples,
    }
    has_files = bool(from_files) or options.predict_file is not None
    loaded: dict[str, Any] = {}
    # An evaluation of files does not read the embedded corpus, which is only the default.
    if not (options.eval_only and has_files and options.dataset_name == EMBEDDED_CORPUS):
        loaded = load_named_datasets(options, notes)
    stream = None
    if options.streaming:
        stream = loaded.get("train")
        # Of training rows the first, of other splits as many as are evaluated.
        limits["train"] = NUM_READ_AHEAD
        others = loaded.keys() - from_files
        loaded = {split: _read_stream(loaded[split], limits[split], options) for split in others}
    loaded |= from_files
    if options.task == "question-answering":
        loaded = {split: flatten_articles(dataset) for split, dataset in loaded.items()}
    rows = DatasetDict({s: loaded[s] for s in corpus.SPLITS if len(loaded.get(s, ()))})
    aim = "train on"
    has_enough = "train" in rows
    if options.eval_only:
        aim = "evaluate"
        has_enough = bool(rows) or options.predict_file is not None
    if not has_enough:
        raise DataError(
            f"dataset_name {options.dataset_name} has no rows to {aim} (splits: "
            f"{dict(rows.num_rows)})."
        )
    if stream is not None and "validation" not in rows:
        raise DataError(
            f"dataset_name {options.dataset_name} has no validation rows, and a stream cannot be "
            "split: give --validation_file, or omit streaming."
        )
    if "train" in rows and "validation" not in rows:
        rows = _with_validation(rows, options.validation_split_percentage)
    rows = DatasetDict({split: first_rows(rows[split], limits[split]) for split in rows})
    if options.task == "seq2seq":
        # {"translation": {"en": ..., "de": ...}} becomes translation.en and translation.de.
        rows = rows.flatten()
    return rows, stream


def first_rows(rows: Dataset, count: int | None) -> Dataset:
    """Return the first `count` rows of a split, or all if there are fewer or `count` is None."""
    return rows.select(range(len(rows))[:count])


def _read_stream(stream: IterableDataset, count: int | None, options: DataOptions) -> Dataset:
    """Read the first `count` rows of a stream into memory, or all if `count` is None."""
    with wrap_read_errors(", ".join(as_list(options.dataset_name))):
        rows = list(islice(stream, count))
        return Dataset.from_list(rows, features=stream.features)


def _with_validation(rows: DatasetDict, percentage: float) -> DatasetDict:
    """Split validation rows off the training rows; both stay in their order."""
    train = rows["train"]
    size = max(1, round(len(train) * percentage / 100))
    if size >= len(train):
        raise DataError(
            f"{len(train)} training rows are too few to take validation rows from: give "
            "--validation_file, or --field if a JSON object holds the rows under a key."
        )
    order = epoch_order(len(train), VALIDATION_SEED, 0)
    parts = {
        "train": train.select(np.sort(order[size:])),
        "validation": train.select(np.sort(order[:size])),
    }
    return DatasetDict({**rows, **parts})


def load_named_datasets(options: DataOptions, notes: list[str] | None) -> dict[str, Any]:
    """Load the splits of all datasets in `dataset_name`.

    The rows of several datasets are concatenated, or mixed by `dataset_weights` (training rows
    only).

    Args:
        options: The options of the run's data.
        notes: Lines for the log, on how files were read, are appended to it.

    Returns:
        Split name -> dataset, or stream with `streaming`.

    Raises:
        ConfigError: If weights or configurations do not match the names.
        DataError: If a dataset cannot be read, or has other columns than the others.
    """
    names = as_list(options.dataset_name)
    _check_options_of_names(names, options)
    groups = [[name] for name in names]
    if options.dataset_weights is None and all(map(is_file, names)):
        groups = [names]
    # One configuration for each hub dataset, or one for all.
    config_names = cycle(as_list(options.dataset_config_name) or [None])
    loaded = []
    for group in groups:
        config_name = next(config_names) if is_hub_id(group[0]) else None
        loaded.append((", ".join(group), _load_splits_of(group, config_name, options, notes)))
    without_train = [name for name, splits in loaded if "train" not in splits]
    if options.dataset_weights is not None and without_train:
        raise DataError(
            f"dataset_name {without_train[0]} has no training rows to mix: omit it and its weight."
        )
    joined = {}
    for split in corpus.SPLITS:
        parts = [(name, splits[split]) for name, splits in loaded if split in splits]
        weights = options.dataset_weights if split == "train" else None
        if parts:
            joined[split] = join(parts, weights)
    return joined


def is_hub_id(name: str) -> bool:
    """Return whether a dataset is loaded by `datasets`: from the hub, or from a folder.

    Args:
        name: A value of `dataset_name`.
    """
    return name != EMBEDDED_CORPUS and not is_file(name)


def _check_options_of_names(names: list[str], options: DataOptions) -> None:
    """Check that the numbers of configurations and weights match those of the datasets, and that
    folders exist.
    """
    hub_ids = list(filter(is_hub_id, names))
    num_configs = len(as_list(options.dataset_config_name))
    if num_configs not in (0, min(1, len(hub_ids)), len(hub_ids)):
        raise ConfigError(
            f"dataset_config_name has {num_configs} values for {len(hub_ids)} hub datasets among "
            f"{', '.join(names)}: give one for each, or one for all, or omit it."
        )
    weights = options.dataset_weights or [1.0] * len(names)
    if len(weights) != len(names) or not all(0 < weight < inf for weight in weights):
        raise ConfigError(
            f"dataset_weights {weights} do not match the {len(names)} of dataset_name "
            f"({', '.join(names)}): give one number above 0 for each."
        )
    for name in hub_ids:
        looks_like_path = name.startswith((".", "/", "~"))
        if looks_like_path and not Path(name).expanduser().exists():
            raise DataError(
                f"dataset_name {name} does not exist: give a file, a folder, a hub id, or "
                f"`{EMBEDDED_CORPUS}`."
            )


def _load_splits_of(
    names: Sequence[str], config_name: str | None, options: DataOptions, notes: list[str] | None
) -> Mapping[str, Any]:
    """Load the splits of one dataset."""
    name = names[0]
    path = Path(name).expanduser()
    if is_file(name):
        return load_splits(names, field=options.field, streaming=options.streaming, notes=notes)
    if options.field is not None:
        raise ConfigError(
            f"field {options.field} names a key of a JSON file, but {name} is not a file: omit it."
        )
    splits: Mapping[str, Any] | None = None
    if name == EMBEDDED_CORPUS:
        splits = corpus.load(options.task)
    elif (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with wrap_read_errors(name):
            loaded = load_from_disk(path)
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
    if splits is not None:
        return to_streams(splits) if options.streaming else splits
    if path.is_dir() and config_name is None:
        splits = load_folder(path, streaming=options.streaming, notes=notes)
        if splits is not None:
            return splits
    with wrap_read_errors(name):
        return load_dataset(name, config_name, streaming=options.streaming)
