"""Loads rows from the embedded corpus, files, folders or the hub. Splits are named train, validation and test."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from hf_ga.data import corpus
from hf_ga.data.files import is_file, load_files, reading
from hf_ga.data.mixing import by_split, joined, named_datasets
from hf_ga.data.options import DataOptions, as_list
from hf_ga.errors import DataError
from hf_ga.exact.order import epoch_order


def load_rows(options: DataOptions) -> DatasetDict:
    """The splits of `dataset_name`, `validation_file` and `test_file`, not tokenized.

    With `eval_only`, training rows are optional, and the default corpus is not read if files are given.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows.
    """
    files = {"validation": options.validation_file, "test": options.test_file}
    extra = {split: load_files(as_list(file)) for split, file in files.items() if file}
    has_own_rows = bool(extra) or options.predict_file is not None
    if options.eval_only and has_own_rows and options.dataset_name == "stdlib":
        return DatasetDict(extra)
    rows = DatasetDict({**_named_rows(options), **extra})
    rows = DatasetDict({split: rows[split] for split in corpus.SPLITS if split in rows and (len(rows[split]) or split == "train")})
    if not options.eval_only and not len(rows.get("train", ())):
        raise DataError(
            f"dataset_name {options.dataset_name} has no training rows (splits: {dict(rows.num_rows)}): there is nothing to "
            "train on."
        )
    if "train" in rows and "validation" not in rows:
        rows = _with_validation(rows, options.validation_split_percentage)
    limits = {"train": options.max_train_samples, "validation": options.max_eval_samples, "test": options.max_predict_samples}
    rows = DatasetDict({split: first_rows(dataset, limits[split]) for split, dataset in rows.items()})
    if options.task == "seq2seq":  # {"translation": {"en": ..., "de": ...}} -> translation.en, translation.de
        rows = rows.flatten()
    if not rows and options.predict_file is None:
        raise DataError(f"dataset_name {options.dataset_name} has no train, validation or test rows: there is nothing to evaluate.")
    return rows


def first_rows(rows: Dataset, count: int | None) -> Dataset:
    """The first `count` rows; all if None."""
    return rows if count is None else rows.take(min(count, len(rows)))


def _named_rows(options: DataOptions) -> DatasetDict:
    loaded = [(", ".join(names), _load(names, config, options.task)) for names, config in named_datasets(options)]
    weights, parts = options.dataset_weights, by_split(loaded, options.dataset_weights)
    return DatasetDict(
        {split: joined(parts[split], weights if split == "train" else None) for split in corpus.SPLITS if split in parts}
    )


def _load(names: Sequence[str], config: str | None, task: str) -> DatasetDict:
    """One dataset."""
    name, path = names[0], Path(names[0]).expanduser()
    if name == "stdlib":
        return corpus.load(task)
    if is_file(name):
        return DatasetDict(train=load_files(names))
    with reading(name):
        if is_saved(path):
            loaded = load_from_disk(path)
            return loaded if isinstance(loaded, DatasetDict) else DatasetDict(train=loaded)
        return load_dataset(name, config)


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of `datasets`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _with_validation(rows: DatasetDict, percentage: float) -> DatasetDict:
    train, seed = rows["train"], 0  # not the run's seed: runs with different seeds stay comparable
    size = max(1, round(len(train) * percentage / 100))
    if size >= len(train):
        raise DataError(f"{len(train)} training rows are too few to take validation rows from: give --validation_file.")
    order = epoch_order(len(train), seed, 0)
    parts = {"train": train.select(np.sort(order[size:])), "validation": train.select(np.sort(order[:size]))}
    return DatasetDict({**rows, **parts})
