"""Loads the datasets that `--dataset_name` names (the embedded corpus, files, folders, hub ids),
and concatenates or mixes them.
"""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from datasets import (
    DatasetDict,
    Value,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_from_disk,
)

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data import corpus
from hf_ga.finetuning.data.files import (
    check_same_columns,
    columns_of,
    is_file,
    load_folder,
    load_splits,
    wrap_read_errors,
)
from hf_ga.finetuning.data.options import DataOptions, as_list

# The name of the embedded corpus, the default of `dataset_name`.
EMBEDDED_CORPUS = "stdlib"
# Seed of mixed datasets. Not the run's seed, so that runs with different seeds have the same rows.
MIX_SEED = 0


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
    loaded = [
        (", ".join(names), _load_splits_of(names, config_name, options, notes))
        for names, config_name in _named_datasets(options)
    ]
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
            joined[split] = _concatenate_or_mix(parts, weights)
    return joined


def _named_datasets(options: DataOptions) -> list[tuple[list[str], str | None]]:
    """Pair each dataset of `dataset_name` with its hub configuration (`dataset_config_name`), and
    check that both exist in matching numbers.

    Returns:
        (names, configuration) of each dataset. The names are one name, or, if there are only files
        and no weights, all files, which are then one dataset. The configuration is None for
        datasets that are not on the hub, and for a default configuration.

    Raises:
        ConfigError: If weights or configurations do not match the names.
        DataError: If a path does not exist.

    >>> _named_datasets(DataOptions(dataset_name=["a.csv", "b.csv"]))
    [(['a.csv', 'b.csv'], None)]
    >>> names = ["a.csv", "me/rows", "me/rows"]
    >>> _named_datasets(DataOptions(dataset_name=names, dataset_config_name=["en", "de"]))
    [(['a.csv'], None), (['me/rows'], 'en'), (['me/rows'], 'de')]
    """
    names = as_list(options.dataset_name)
    config_names = as_list(options.dataset_config_name)
    hub_ids = [name for name in names if name != EMBEDDED_CORPUS and not is_file(name)]
    _check_configs(config_names, names, hub_ids)
    _check_weights(options.dataset_weights, names)
    for name in hub_ids:
        looks_like_path = name.startswith((".", "/", "~"))
        if looks_like_path and not Path(name).expanduser().exists():
            raise DataError(
                f"dataset_name {name} does not exist: give a file, a folder, a hub id, or "
                f"`{EMBEDDED_CORPUS}`."
            )
    has_files_only = not hub_ids and EMBEDDED_CORPUS not in names
    if options.dataset_weights is None and has_files_only:
        return [(names, None)]
    if len(config_names) == 1:  # one for all hub datasets
        config_names = config_names * len(hub_ids)
    remaining_configs = iter(config_names)
    datasets: list[tuple[list[str], str | None]] = []
    for name in names:
        config_name = next(remaining_configs, None) if name in hub_ids else None
        datasets.append(([name], config_name))
    return datasets


def _check_configs(
    config_names: Sequence[str], names: Sequence[str], hub_ids: Sequence[str]
) -> None:
    """Check that there is one hub configuration for each hub dataset, one for all, or none.

    Raises:
        ConfigError: If there are more or fewer, or there are configurations but no hub datasets.
    """
    if config_names and not hub_ids:
        raise ConfigError(
            f"dataset_config_name {config_names[0]} applies to hub datasets only, not to "
            f"{', '.join(names)}: omit it."
        )
    if len(config_names) not in (0, 1, len(hub_ids)):
        raise ConfigError(
            f"dataset_config_name has {len(config_names)} values for {len(hub_ids)} hub datasets "
            f"({', '.join(hub_ids)}): give one for each, or one for all."
        )


def _check_weights(weights: Sequence[float] | None, names: Sequence[str]) -> None:
    """Check that there is a positive and finite weight for each dataset of `dataset_name`, by which
    training rows are mixed, or no weight at all.

    Raises:
        ConfigError: If a weight is not positive and finite, or there are more or fewer weights than
            datasets.
    """
    if weights is None:
        return
    are_valid = all(0 < weight < inf for weight in weights)
    if len(weights) != len(names) or not are_valid:
        raise ConfigError(
            f"dataset_weights {weights} do not match the {len(names)} of dataset_name "
            f"({', '.join(names)}): give one number above 0 for each."
        )


def _load_splits_of(
    names: Sequence[str], config_name: str | None, options: DataOptions, notes: list[str] | None
) -> Mapping[str, Any]:
    """Load the splits of one dataset.

    Args:
        names: One name; or several files.
        config_name: The configuration of a hub dataset, else None.
        options: The options of the run's data.
        notes: Lines for the log, on how files were read, are appended to it.

    Returns:
        Split name -> dataset, or stream with `streaming`.

    Raises:
        ConfigError: If `field` is set, but the dataset is not a file.
        DataError: If the dataset cannot be read, or is to be streamed but was saved by
            `save_to_disk`.
    """
    name = names[0]
    path = Path(name).expanduser()
    if options.field is not None and not is_file(name):
        raise ConfigError(
            f"field {options.field} names a key of a JSON file, but {name} is not a file: omit it."
        )
    if name == EMBEDDED_CORPUS:
        return corpus.load(options.task)
    if is_file(name):
        return load_splits(names, field=options.field, streaming=options.streaming, notes=notes)
    if _is_saved_by_datasets(path):
        return _load_saved(name, path, options.streaming)
    if path.is_dir() and config_name is None:
        splits = load_folder(path, streaming=options.streaming, notes=notes)
        if splits is not None:
            return splits
    with wrap_read_errors(name):
        return load_dataset(name, config_name, streaming=options.streaming)


def _is_saved_by_datasets(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote a folder."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _load_saved(name: str, folder: Path, streaming: bool) -> Mapping[str, Any]:
    """Load a folder that `save_to_disk` of `datasets` wrote, by split; a folder without splits is
    loaded as `train`.

    Args:
        name: Name of the dataset, for errors.
        folder: The folder.
        streaming: Whether the option `streaming` is set, which is refused.

    Raises:
        DataError: If `streaming` is set, or the folder cannot be read.
    """
    if streaming:
        raise DataError(
            f"dataset_name {name} was saved by `save_to_disk` and is memory-mapped anyway: omit "
            "streaming."
        )
    with wrap_read_errors(name):
        loaded = load_from_disk(folder)
    return loaded if isinstance(loaded, DatasetDict) else {"train": loaded}


def _concatenate_or_mix(parts: Sequence[tuple[str, Any]], weights: Sequence[float] | None) -> Any:
    """Concatenate the rows of several datasets (or streams), or mix them at random by weights.

    Args:
        parts: (name, rows) of each dataset.
        weights: The proportion of each in the mixed rows, which end as soon as one dataset is
            exhausted. None: concatenate.

    Raises:
        DataError: If columns or their types differ.
    """
    names = [name for name, _ in parts]
    all_rows = [rows for _, rows in parts]
    if len(parts) == 1:
        return all_rows[0]
    with wrap_read_errors(", ".join(names)):
        check_same_columns([(name, columns_of(rows)) for name, rows in parts])
        all_rows = [_cast_large_strings(rows) for rows in all_rows]
        if weights is None:
            return concatenate_datasets(all_rows)
        shares = [weight / sum(weights) for weight in weights]
        return interleave_datasets(
            all_rows,
            probabilities=shares,
            seed=MIX_SEED,
            stopping_strategy="first_exhausted",
        )


def _cast_large_strings(rows: Any) -> Any:
    """Cast `large_string` columns of a dataset or stream to `string`, so that it can be
    concatenated with others: `datasets` reads the texts of CSV files as `large_string`.
    """
    for name, feature in (rows.features or {}).items():
        if feature == Value("large_string"):
            rows = rows.cast_column(name, Value("string"))
    return rows
