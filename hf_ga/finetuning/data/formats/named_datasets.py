"""Loads the datasets that `--dataset_name` names (the embedded corpus, files, folders, hub ids),
and concatenates or mixes them.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from datasets import DatasetDict, load_dataset, load_from_disk

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.data.formats.files import (
    is_file,
    join,
    load_folder,
    load_splits,
    to_streams,
    wrap_read_errors,
)
from hf_ga.finetuning.data.options import DataOptions, as_list

# The name of the embedded corpus, the default of `dataset_name`.
EMBEDDED_CORPUS = "stdlib"


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
    config_names = as_list(options.dataset_config_name)
    if len(config_names) == 1:  # one for all hub datasets
        config_names = config_names * len(names)
    remaining_configs = iter(config_names)
    loaded = []
    for group in groups:
        config_name = next(remaining_configs, None) if _is_hub_id(group[0]) else None
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


def _is_hub_id(name: str) -> bool:
    """Return whether a dataset is loaded by `datasets`: from the hub, or from a folder."""
    return name != EMBEDDED_CORPUS and not is_file(name)


def _check_options_of_names(names: list[str], options: DataOptions) -> None:
    """Check that the numbers of configurations and weights match those of the datasets, and that
    folders exist.
    """
    hub_ids = list(filter(_is_hub_id, names))
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
    if name == EMBEDDED_CORPUS:
        return corpus.load(options.task)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        with wrap_read_errors(name):
            loaded = load_from_disk(path)
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        return to_streams(splits) if options.streaming else splits
    if path.is_dir() and config_name is None:
        splits = load_folder(path, streaming=options.streaming, notes=notes)
        if splits is not None:
            return splits
    with wrap_read_errors(name):
        return load_dataset(name, config_name, streaming=options.streaming)
