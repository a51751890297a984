"""Loads rows from the embedded corpus, files, folders or the hub. Splits are named train, validation and test."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.utils import logging

from hf_ga.data import corpus
from hf_ga.data.options import DataOptions
from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.order import epoch_order

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".text": "text", ".parquet": "parquet"}


def load_rows(options: DataOptions) -> DatasetDict:
    """The splits of `dataset_name`, `validation_file` and `test_file`, not tokenized.

    With `eval_only`, training rows are optional, and the default corpus is not read if files are given.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows.
    """
    files = {"validation": options.validation_file, "test": options.test_file}
    extra = {split: load_file(file) for split, file in files.items() if file}
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
    name, path = options.dataset_name, Path(options.dataset_name).expanduser()
    check_name(options)
    if name == "stdlib":
        return corpus.load(options.task)
    if is_file(name):
        return DatasetDict(train=load_file(name))
    with reading(name):
        if is_saved(path):
            loaded = load_from_disk(path)
            return loaded if isinstance(loaded, DatasetDict) else DatasetDict(train=loaded)
        return load_dataset(name, options.dataset_config_name)


def is_file(name: str) -> bool:
    """Whether a dataset's name is a file name, existing or not."""
    path = Path(name).expanduser()
    return _file_kind(path) is not None or path.is_file()


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk` of `datasets`."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def check_name(options: DataOptions) -> None:
    """Raise ConfigError for a configuration name without a hub dataset, DataError for a path that does not exist."""
    name = options.dataset_name
    if options.dataset_config_name is not None and (name == "stdlib" or is_file(name)):
        raise ConfigError(
            f"dataset_config_name {options.dataset_config_name} applies to hub datasets only, not to {name}: omit it."
        )
    if name.startswith((".", "/", "~")) and not is_file(name) and not Path(name).expanduser().exists():
        raise DataError(f"dataset_name {name} does not exist: give a file, a folder, a hub id, or `stdlib`.")


def load_file(file: str) -> Dataset:
    """The rows of one file.

    Raises:
        DataError: it is missing, empty, of an unknown type or not readable.
    """
    kind, path = readable_file(file)
    with reading(file):
        return load_dataset(kind, data_files=str(path), split="train")


def readable_file(file: str) -> tuple[str, Path]:
    """Type and path of a file, checked before it is parsed.

    Raises:
        DataError: it is missing, empty or of an unknown type.
    """
    path = Path(file).expanduser()
    kind = _file_kind(path)
    if not path.is_file():
        raise DataError(f"the file {file} {'is a folder' if path.is_dir() else 'does not exist'}.")
    if kind is None:
        raise DataError(f"the file {file} has an unknown extension: use one of {', '.join(FILE_KINDS)} (optionally with .gz).")
    if path.stat().st_size == 0:
        raise DataError(f"the file {file} is empty.")
    if kind == "json":
        with suppress(OSError, EOFError, zlib.error), (gzip.open if path.suffix == ".gz" else open)(path, "rb") as opened:
            if opened.read(64).lstrip().startswith(b"null"):  # pyarrow's reader would crash the process
                raise DataError(f"the file {file} begins with `null` instead of a row: remove that line.")
    return kind, path


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any error of `datasets` while it reads `name` into a one-line DataError, without its log message."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise unreadable(name, error) from error
    finally:
        logging.set_verbosity(verbosity)


def unreadable(name: str, error: BaseException) -> DataError:
    """An error of `datasets` as a one-line DataError."""
    cause = error.__cause__ or error
    if "corresponds to no data" in str(cause):
        return DataError(f"{name} has no rows.")
    return DataError(f"cannot read {name}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}")


def _with_validation(rows: DatasetDict, percentage: float) -> DatasetDict:
    train, seed = rows["train"], 0  # not the run's seed: runs with different seeds stay comparable
    size = max(1, round(len(train) * percentage / 100))
    if size >= len(train):
        raise DataError(f"{len(train)} training rows are too few to take validation rows from: give --validation_file.")
    order = epoch_order(len(train), seed, 0)
    parts = {"train": train.select(np.sort(order[size:])), "validation": train.select(np.sort(order[:size]))}
    return DatasetDict({**rows, **parts})


def _file_kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None
