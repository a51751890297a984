"""Where rows come from: the embedded corpus, files, folders, the hub. Splits are named train, validation and test."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.utils import logging

from hf_ga.data import embedded
from hf_ga.data.file_checks import broken_lines, first_null
from hf_ga.data.row_checks import Origin
from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.order import epoch_order
from hf_ga.run.config import FinetuneConfig

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".txt": "text", ".text": "text", ".parquet": "parquet"}
SPLITS = ("train", "validation", "test")
VALIDATION_ALIASES = ("valid", "val", "dev", "eval")


def load_rows(config: FinetuneConfig) -> tuple[DatasetDict, dict[str, Origin]]:
    """The splits that `dataset_name`, `validation_file` and `test_file` name, not tokenised, and where their rows were before.

    An evaluation alone needs no training rows, and where it is given files it does not read the default corpus.

    Raises:
        DataError: a missing or unreadable file, an unknown dataset, no training rows.
    """
    files = {"validation": config.validation_file, "test": config.test_file}
    extra = {split: load_file(file) for split, file in files.items() if file}
    has_own_rows = bool(extra) or config.predict_file is not None
    if config.eval_only and has_own_rows and config.dataset_name == "stdlib" and config.model_name_or_path is not None:
        return DatasetDict(extra), origins_of(config)
    rows = DatasetDict({**with_usual_names(_named_rows(config)), **extra})
    rows = DatasetDict({split: rows[split] for split in SPLITS if split in rows and (len(rows[split]) or split == "train")})
    if not config.eval_only and not len(rows.get("train", ())):
        raise DataError(
            f"dataset_name {config.dataset_name} has no training rows (splits: {dict(rows.num_rows)}): there is nothing to "
            "train on."
        )
    rows, origins = _with_validation(rows, config)
    if config.task == "seq2seq":  # {"translation": {"en": ..., "de": ...}} -> translation.en, translation.de
        rows = rows.flatten()
    if not rows and config.predict_file is None:
        raise DataError(f"dataset_name {config.dataset_name} has no train, validation or test rows: there is nothing to evaluate.")
    return rows, origins


def with_usual_names(splits: Mapping[str, Any]) -> dict[str, Any]:
    """The splits, with `validation` for what goes by another usual name."""
    aliases = [alias for alias in VALIDATION_ALIASES if alias in splits and "validation" not in splits]
    renamed = dict.fromkeys(aliases[:1], "validation")
    return {renamed.get(split, split): rows for split, rows in splits.items()}


def _named_rows(config: FinetuneConfig) -> DatasetDict:
    name, path = config.dataset_name, Path(config.dataset_name).expanduser()
    check_config_name(config)
    if name == "stdlib":
        return embedded.load(config.task)
    if is_file(name):
        return DatasetDict(train=load_file(name))
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        loaded = load(name, load_from_disk, path)
        return loaded if isinstance(loaded, DatasetDict) else DatasetDict(train=loaded)
    check_exists(name)
    return load(name, load_dataset, name, config.dataset_config_name)


def is_file(name: str) -> bool:
    """Whether a dataset's name is that of a file, one that is missing included."""
    path = Path(name).expanduser()
    return _file_kind(path) is not None or path.is_file()


def check_config_name(config: FinetuneConfig) -> None:
    """Raise ConfigError where a dataset that has no configurations is given one."""
    if config.dataset_config_name is not None and (config.dataset_name == "stdlib" or is_file(config.dataset_name)):
        raise ConfigError(
            f"dataset_config_name {config.dataset_config_name} is for datasets of the hub, not for {config.dataset_name}: leave it "
            "out."
        )


def check_exists(name: str) -> None:
    """Raise DataError for a dataset that looks like a path and is none."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
        raise DataError(f"dataset_name {name} does not exist: give a file, a folder, a hub id, or `stdlib`.")


def load_file(file: str) -> Dataset:
    """The rows of one file.

    Raises:
        DataError: it is missing, empty, of an unknown kind or not readable.
    """
    kind, path = readable_file(file)
    return load(file, load_dataset, kind, data_files=str(path), split="train")


def readable_file(file: str) -> tuple[str, Path]:
    """Kind and path of a file, found before it is parsed.

    Raises:
        DataError: it is missing, empty or of an unknown kind.
    """
    path = Path(file).expanduser()
    kind = _file_kind(path)
    if not path.is_file():
        raise DataError(f"the file {file} {'is a folder' if path.is_dir() else 'does not exist'}.")
    if kind is None:
        raise DataError(f"the file {file} has an unknown ending: it is one of {', '.join(FILE_KINDS)} (or that with .gz).")
    if path.stat().st_size == 0:
        raise DataError(f"the file {file} is empty.")
    if kind == "json" and (line := first_null(file)):
        raise DataError(f"cannot load {file}: line {line} holds null, not an object. Mend such lines, or take them out.")
    return kind, path


def load(name: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """What a function of `datasets` returns; whatever it raises becomes a DataError of one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises
    try:
        return function(*args, **kwargs)
    except (Exception, StopIteration) as error:  # datasets raises many kinds, some without a message
        raise unreadable(name, error) from error
    finally:
        logging.set_verbosity(verbosity)


def unreadable(name: str, error: BaseException) -> DataError:
    """What is wrong with a dataset that `datasets` cannot read: the lines of a file, or else what it said."""
    cause = error.__cause__ or error
    if "corresponds to no data" in str(cause):
        return DataError(f"cannot load {name}: it has no rows.")
    broken = broken_lines(name) if is_file(name) and Path(name).expanduser().is_file() else ""
    if broken:
        return DataError(f"cannot load {name}: {broken}. Mend these lines, or take them out.")
    reason = (str(cause).strip().splitlines() or ["no reason given"])[0]
    return DataError(f"cannot load {name}: {type(cause).__name__}: {reason}")


def origins_of(config: FinetuneConfig) -> dict[str, Origin]:
    """Of splits that are as they were read."""
    files = {"train": config.dataset_name, "validation": config.validation_file, "test": config.test_file}
    return {split: Origin(split, file if file and is_file(file) else None) for split, file in files.items()}


def _with_validation(rows: DatasetDict, config: FinetuneConfig) -> tuple[DatasetDict, dict[str, Origin]]:
    origins = origins_of(config)
    if "validation" in rows or "train" not in rows:
        return rows, origins
    train, seed = rows["train"], 0  # not the run's seed: runs with other seeds must stay comparable
    size = max(1, round(len(train) * config.validation_split_percentage / 100))
    if size >= len(train):
        raise DataError(f"{len(train)} training rows are too few to take validation rows from: give --validation_file.")
    order = epoch_order(len(train), seed, 0)
    numbers = {"train": np.sort(order[size:]), "validation": np.sort(order[:size])}
    parts = {split: train.select(of_split) for split, of_split in numbers.items()}
    origins |= {split: Origin("train", origins["train"].file, of_split) for split, of_split in numbers.items()}
    return DatasetDict({**rows, **parts}), origins


def _file_kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None
