"""Loads rows from the embedded corpus, files, folders or the hub, whole or as streams. Splits:
train, validation and test.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_from_disk,
)

from hf_ga.errors import ConfigError, DataError, HfGaError
from hf_ga.exact.order import epoch_order
from hf_ga.finetuning.data import corpus
from hf_ga.finetuning.data.checks import (
    FIX_LABELS,
    FIX_WEIGHTS,
    WEIGHT_RULE,
    check_values,
    is_given,
    is_weight,
)
from hf_ga.finetuning.data.files import (
    check_same_columns,
    columns_of,
    is_file,
    load_files,
    load_folder,
    load_splits,
    reading,
    unreadable,
)
from hf_ga.finetuning.data.labels import CLASS_RULE, label_ids
from hf_ga.finetuning.data.options import DataOptions, as_list
from hf_ga.finetuning.data.squad import questions_of

NUM_READ_AHEAD = 1000
BATCH_SIZE = 100  # rows of a stream that are tokenized together
# of the mix and of validation rows; not the run's: runs with different seeds have the same rows
SEED = 0


def load_rows(
    options: DataOptions, facts: list[str] | None = None
) -> tuple[DatasetDict, IterableDataset | None]:
    """The splits of `dataset_name`, `validation_file` and `test_file`, not tokenized; with
    `streaming`, also the stream of all training rows, of which `train` has the first ones: for
    columns, labels and the proof.

    With `eval_only`, training rows are optional, and the default corpus is not read if files are
    given. Lines on how files were read are appended to `facts`.

    Raises:
        ConfigError: `field` without a file.
        DataError: a missing or unreadable file, an unknown dataset, no training rows, a stream
            without validation rows.
    """
    files = {"validation": options.validation_file, "test": options.test_file}
    extra = {
        split: load_files(as_list(file), split, field=options.field, facts=facts)
        for split, file in files.items()
        if file
    }
    has_own_rows = bool(extra) or options.predict_file is not None
    files_only = options.eval_only and has_own_rows and options.dataset_name == "stdlib"
    named, stream = ({} if files_only else _named_rows(options, facts)), None
    limits = {
        "train": options.max_train_samples,
        "validation": options.max_eval_samples,
        "test": options.max_predict_samples,
    }
    if options.streaming:
        name, stream, ahead = (
            ", ".join(as_list(options.dataset_name)),
            named.get("train"),
            {**limits, "train": NUM_READ_AHEAD},
        )
        named = {
            split: _read(name, rows, ahead[split])
            for split, rows in named.items()
            if split not in extra
        }
    loaded = {**named, **extra}
    if options.task == "question-answering":
        loaded = questions_of(DatasetDict(loaded))
    rows = DatasetDict(
        {s: loaded[s] for s in corpus.SPLITS if s in loaded and (len(loaded[s]) or s == "train")}
    )
    if not options.eval_only and not len(rows.get("train", ())):
        raise DataError(
            f"dataset_name {options.dataset_name} has no training rows (splits: "
            f"{dict(rows.num_rows)}): there is nothing to "
            "train on."
        )
    if stream is not None and "validation" not in rows:
        raise DataError(
            f"dataset_name {options.dataset_name} has no validation rows, and a stream cannot be "
            "split: give --validation_file, or "
            "omit streaming."
        )
    if "train" in rows and "validation" not in rows:
        rows = _with_validation(rows, options.validation_split_percentage)
    rows = DatasetDict(
        {split: first_rows(dataset, limits[split]) for split, dataset in rows.items()}
    )
    if (
        options.task == "seq2seq"
    ):  # {"translation": {"en": ..., "de": ...}} -> translation.en, translation.de
        rows = rows.flatten()
    if not rows and options.predict_file is None:
        raise DataError(
            f"dataset_name {options.dataset_name} has no train, validation or test rows: there is "
            "nothing to evaluate."
        )
    return rows, stream


def first_rows(rows: Dataset, count: int | None) -> Dataset:
    """The first `count` rows; all if None."""
    return rows if count is None else rows.take(min(count, len(rows)))


class StreamedSamples:
    """The samples of a stream, tokenized while they are read; empty rows are skipped.

    Args:
        stream: the training rows. name: of the dataset, for errors.
        columns: role -> column of the rows. labels: names in the order of their ids; empty if rows
            have none.
        tokenize: rows by role -> columns of samples.
    """

    def __init__(
        self,
        stream: IterableDataset,
        name: str,
        columns: dict[str, str],
        labels: Sequence[str],
        tokenize: partial,
    ) -> None:
        self.name = name
        stream = stream.select_columns(list(columns.values()))
        stream = stream.rename_columns(
            {column: role for role, column in columns.items() if column != role}
        )
        feature = (stream.features or {}).get("label")
        named = feature if isinstance(feature, ClassLabel) else None
        encode = partial(_encode, feature=named, labels=labels, tokenize=tokenize)
        samples = stream.map(
            encode,
            batched=True,
            batch_size=BATCH_SIZE,
            remove_columns=[role for role in columns if role != "weight"],
        )
        self.samples = samples.filter(bool, input_columns="length")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of streams that shuffle by epoch."""
        self.samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """One pass.

        Raises:
            DataError: a row cannot be read, tokenized, or has an unknown label or a weight that is
                none.
        """
        try:
            yield from self.samples
        except HfGaError:
            raise
        except Exception as error:
            raise unreadable(self.name, error) from error


def _named_rows(options: DataOptions, facts: list[str] | None) -> dict[str, Any]:
    """The splits of all datasets of `dataset_name`, or their streams."""
    loaded = [
        (", ".join(names), _load(names, config, options, facts))
        for names, config in _named_datasets(options)
    ]
    lacking = [name for name, splits in loaded if "train" not in splits]
    if options.dataset_weights is not None and lacking:
        raise DataError(
            f"dataset_name {lacking[0]} has no training rows to mix: omit it and its weight."
        )
    parts = {
        split: [(name, splits[split]) for name, splits in loaded if split in splits]
        for split in corpus.SPLITS
    }
    weights = {"train": options.dataset_weights}
    return {
        split: _joined(of_split, weights.get(split))
        for split, of_split in parts.items()
        if of_split
    }


def _named_datasets(options: DataOptions) -> list[tuple[list[str], str | None]]:
    """The datasets of `dataset_name`: name and hub configuration of each. Files without weights are
    one dataset of many names.

    Raises:
        ConfigError: weights or configurations do not fit the names.
        DataError: a path does not exist.

    >>> _named_datasets(DataOptions(dataset_name=["a.csv", "b.csv"]))
    [(['a.csv', 'b.csv'], None)]
    >>> names = ["a.csv", "me/rows", "me/rows"]
    >>> _named_datasets(DataOptions(dataset_name=names, dataset_config_name=["en", "de"]))
    [(['a.csv'], None), (['me/rows'], 'en'), (['me/rows'], 'de')]
    """
    names, configs, weights = (
        as_list(options.dataset_name),
        as_list(options.dataset_config_name),
        options.dataset_weights,
    )
    of_hub = [name for name in names if name != "stdlib" and not is_file(name)]
    if configs and not of_hub:
        raise ConfigError(
            f"dataset_config_name {configs[0]} applies to hub datasets only, not to "
            f"{', '.join(names)}: omit it."
        )
    if len(configs) not in (0, 1, len(of_hub)):
        raise ConfigError(
            f"dataset_config_name has {len(configs)} values for {len(of_hub)} hub datasets "
            f"({', '.join(of_hub)}): give one for "
            "each, or one for all."
        )
    if weights is not None and (
        len(weights) != len(names) or not all(0 < weight < inf for weight in weights)
    ):
        raise ConfigError(
            f"dataset_weights {weights} do not match the {len(names)} of dataset_name "
            f"({', '.join(names)}): give one number above "
            "0 for each."
        )
    for name in of_hub:
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
            raise DataError(
                f"dataset_name {name} does not exist: give a file, a folder, a hub id, or `stdlib`."
            )
    if weights is None and not of_hub and "stdlib" not in names:
        return [(names, None)]
    of_each = iter(configs if len(configs) > 1 else [*configs, None][:1] * len(of_hub))
    return [([name], next(of_each) if name in of_hub else None) for name in names]


def _joined(parts: Sequence[tuple[str, Any]], weights: Sequence[float] | None) -> Any:
    """One dataset (or stream) of several: one after the other, or mixed.

    Args:
        parts: name and rows of each. weights: share of each in the mixed rows, which end with the
            first dataset that ends.

    Raises:
        DataError: different columns or types.
    """
    names, rows = zip(*parts, strict=True)
    if len(rows) == 1:
        return rows[0]
    with reading(", ".join(names)):
        check_same_columns([(name, columns_of(of_name)) for name, of_name in parts])
        rows = [_with_one_text_type(of_name) for of_name in rows]
        if weights is None:
            return concatenate_datasets(rows)
        shares = [weight / sum(weights) for weight in weights]
        return interleave_datasets(
            rows, probabilities=shares, seed=SEED, stopping_strategy="first_exhausted"
        )


def _with_one_text_type(rows: Any) -> Any:
    """`datasets` reads texts of CSV files as `large_string`, and refuses to join them with
    `string`.
    """
    for column in [
        name for name, feature in (rows.features or {}).items() if feature == Value("large_string")
    ]:
        rows = rows.cast_column(column, Value("string"))
    return rows


def _load(
    names: Sequence[str], config: str | None, options: DataOptions, facts: list[str] | None
) -> Mapping[str, Any]:
    """The splits of one dataset, or their streams."""
    name, path = names[0], Path(names[0]).expanduser()
    is_saved = (path / "dataset_dict.json").exists() or (
        path / "state.json"
    ).exists()  # by `save_to_disk` of `datasets`
    if options.field is not None and not is_file(name):
        raise ConfigError(
            f"field {options.field} names a key of a JSON file, but {name} is no file: omit it."
        )
    if name == "stdlib":
        return corpus.load(options.task)
    if is_saved and options.streaming:
        raise DataError(
            f"dataset_name {name} was saved by `save_to_disk` and is memory-mapped anyway: omit "
            "streaming."
        )
    if is_file(name):
        return load_splits(names, field=options.field, streaming=options.streaming, facts=facts)
    if path.is_dir() and not is_saved and config is None:
        splits = load_folder(path, streaming=options.streaming, facts=facts)
        if splits is not None:
            return splits
    with reading(name):
        if is_saved:
            loaded = load_from_disk(path)
            return loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        return load_dataset(name, config, streaming=options.streaming)


def _read(name: str, stream: IterableDataset, count: int | None) -> Dataset:
    with reading(name):
        return Dataset.from_list(list(islice(stream, count)), features=stream.features)


def _with_validation(rows: DatasetDict, percentage: float) -> DatasetDict:
    train = rows["train"]
    size = max(1, round(len(train) * percentage / 100))
    if size >= len(train):
        raise DataError(
            f"{len(train)} training rows are too few to take validation rows from: give "
            f"--validation_file{_remedy_of_nesting(train)}."
        )
    order = epoch_order(len(train), SEED, 0)
    parts = {
        "train": train.select(np.sort(order[size:])),
        "validation": train.select(np.sort(order[:size])),
    }
    return DatasetDict({**rows, **parts})


def _remedy_of_nesting(rows: Dataset) -> str:
    """What to do if a single row holds the rows in one of its columns."""
    nested = [
        name
        for name, kind in rows.features.items()
        if isinstance(kind, List) and isinstance(kind.feature, dict)
    ]
    if len(rows) != 1 or not nested:
        return ""
    return (
        f". If the row is a JSON object that holds the rows ({', '.join(nested)}), name their key "
        "with --field"
    )


def _encode(
    rows: dict[str, list], feature: ClassLabel | None, labels: Sequence[str], tokenize: partial
) -> dict[str, list]:
    if labels:
        check_values("streamed", rows["label"], is_given, CLASS_RULE, FIX_LABELS)
        ids = label_ids([[value] for value in rows["label"]], feature, labels, "the stream")
        rows = {**rows, "label": [of_row[0] for of_row in ids]}
    if "weight" in rows:
        check_values("streamed", rows["weight"], is_weight, WEIGHT_RULE, FIX_WEIGHTS)
    return tokenize(rows)
