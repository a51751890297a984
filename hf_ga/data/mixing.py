"""Several datasets by name: their configurations, and one dataset of all their rows."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets, interleave_datasets

from hf_ga.data.files import check_same_columns, columns_of, is_file, reading
from hf_ga.data.options import DataOptions, as_list
from hf_ga.errors import ConfigError, DataError

SEED = 0  # not the run's: runs with different seeds train on the same rows


def named_datasets(options: DataOptions) -> list[tuple[list[str], str | None]]:
    """The datasets of `dataset_name`: name and hub configuration of each. Files without weights are one dataset of many names.

    Raises:
        ConfigError: weights or configurations do not fit the names.
        DataError: a path does not exist.

    >>> named_datasets(DataOptions(dataset_name=["a.csv", "b.csv"]))
    [(['a.csv', 'b.csv'], None)]
    >>> named_datasets(DataOptions(dataset_name=["a.csv", "me/rows", "me/rows"], dataset_config_name=["en", "de"]))
    [(['a.csv'], None), (['me/rows'], 'en'), (['me/rows'], 'de')]
    """
    names, configs, weights = as_list(options.dataset_name), as_list(options.dataset_config_name), options.dataset_weights
    of_hub = [name for name in names if name != "stdlib" and not is_file(name)]
    if configs and not of_hub:
        raise ConfigError(f"dataset_config_name {configs[0]} applies to hub datasets only, not to {', '.join(names)}: omit it.")
    if len(configs) not in (0, 1, len(of_hub)):
        raise ConfigError(
            f"dataset_config_name has {len(configs)} values for {len(of_hub)} hub datasets ({', '.join(of_hub)}): give one for "
            "each, or one for all."
        )
    if weights is not None and (len(weights) != len(names) or not all(0 < weight < inf for weight in weights)):
        raise ConfigError(
            f"dataset_weights {weights} do not match the {len(names)} of dataset_name ({', '.join(names)}): give one number above "
            "0 for each."
        )
    for name in of_hub:
        if name.startswith((".", "/", "~")) and not Path(name).expanduser().exists():
            raise DataError(f"dataset_name {name} does not exist: give a file, a folder, a hub id, or `stdlib`.")
    if weights is None and not of_hub and "stdlib" not in names:
        return [(names, None)]
    of_each = iter(configs if len(configs) > 1 else [*configs, None][:1] * len(of_hub))
    return [([name], next(of_each) if name in of_hub else None) for name in names]


def by_split(loaded: Sequence[tuple[str, Mapping[str, Any]]], weights: Sequence[float] | None) -> dict[str, list[tuple[str, Any]]]:
    """split -> name and rows of each dataset that has it.

    Args:
        loaded: name and splits of each dataset.

    Raises:
        DataError: a dataset with a weight has no training rows.
    """
    lacking = [name for name, splits in loaded if "train" not in splits]
    if weights is not None and lacking:
        raise DataError(f"dataset_name {lacking[0]} has no training rows to mix: omit it and its weight.")
    splits = dict.fromkeys(split for _, of_name in loaded for split in of_name)
    return {split: [(name, rows[split]) for name, rows in loaded if split in rows] for split in splits}


def joined(parts: Sequence[tuple[str, Any]], weights: Sequence[float] | None = None) -> Any:
    """One dataset (or stream) of several: one after the other, or mixed.

    Args:
        parts: name and rows of each. weights: share of each in the mixed rows, which end with the first dataset that ends.

    Raises:
        DataError: different columns or types.
    """
    names, rows = zip(*parts, strict=True)
    if len(rows) == 1:
        return rows[0]
    with reading(", ".join(names)):
        check_same_columns([(name, columns_of(of_name)) for name, of_name in parts])
        if weights is None:
            return concatenate_datasets(list(rows))
        shares = [weight / sum(weights) for weight in weights]
        return interleave_datasets(list(rows), probabilities=shares, seed=SEED, stopping_strategy="first_exhausted")
