"""Loads rows from files that are named directly or by patterns, and turns errors of `datasets`
while it reads into one-line errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape, glob
from pathlib import Path
from typing import Any

from datasets import (
    ClassLabel,
    Dataset,
    IterableDataset,
    concatenate_datasets,
    interleave_datasets,
    load_dataset,
    load_dataset_builder,
)
from datasets.utils import logging

from hf_ga.errors import DataError, HfGaError
from hf_ga.finetuning.data.formats.delimited import builder_options, check_quotes, convert_columns
from hf_ga.finetuning.data.formats.documents import read_document

# Extension -> type of a file, which is the name of its builder in `datasets`.
FILE_TYPES = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Seed of mixed datasets. Not the run's seed, so that runs with different seeds have the same rows.
MIX_SEED = 0
# Type of a file -> options of its builder in `datasets`; those of CSV files depend on the file.
BUILDER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"encoding": "utf-8-sig"},  # a byte order mark is not part of the first text
    # Otherwise `datasets` would read conversations with certain columns as logs of agents.
    "json": {"parse_agent_traces": False},
}


def is_file(name: str) -> bool:
    """Return whether the name of a dataset is that of a file, or a pattern of files.

    That is so if it has the extension of a known type (the file need not exist), is an existing
    file, or has wildcards.
    """
    path = Path(name).expanduser()
    return _file_type(path) is not None or path.is_file() or is_pattern(name)


def is_pattern(name: str) -> bool:
    """Return whether the name of a dataset is a pattern of files: whether it has wildcards, and
    there is no file or folder of exactly this name.
    """
    has_wildcard = any(character in name for character in "*?[")
    return has_wildcard and not Path(name).expanduser().exists()


def load_splits(
    files: Sequence[str],
    *,
    split: str = "train",
    field: str | None = None,
    streaming: bool = False,
    notes: list[str] | None = None,
) -> dict[str, Any]:
    """Load the rows of files by split.

    Args:
        files: Names and patterns of files. Rows are in the given order, those of a pattern in the
            order of their paths.
        split: The split of the rows of a file that does not name splits, as only the keys of a JSON
            file do.
        field: Key of the rows in JSON files that are one object. None: search for the rows.
        streaming: Read rows lazily.
        notes: Lines for the log, on how the files were read, are appended to it.

    Returns:
        Split name -> dataset, or stream with `streaming`.

    Raises:
        DataError: If a file is missing, empty, of an unknown type or not readable, a pattern has no
            match, or files have different types or columns.
    """
    notes = [] if notes is None else notes
    paths = [path for file in files for path in _matching_paths(file)]
    file_type = _common_file_type(files, paths)
    if field is not None and file_type != "json":
        raise DataError(f"field {field} applies to JSON files, not to {paths[0]}: omit it.")
    parts: dict[str, list[tuple[str, Any]]] = {}
    for path in paths:
        with wrap_read_errors(path):
            rows_by_split, note = _load_file(path, file_type, field, streaming)
        for name, rows in rows_by_split.items():
            parts.setdefault(name or split, []).append((path, rows))
        if note is not None and note not in notes:
            notes.append(note)
    splits = {name: join(of_split) for name, of_split in parts.items()}
    if file_type == "csv":
        return {name: convert_columns(rows) for name, rows in splits.items()}
    return splits


def load_files(files: Sequence[str], split: str, **options: Any) -> Any:
    """Load the rows of files for one split. From a JSON file whose keys name splits, only the rows
    of this split are returned, from other files all.

    Args:
        files: Names and patterns of files, in the order of their rows.
        split: `validation`, `test`, `predict`, or any other name.
        options: `field`, `streaming` and `notes`, see `load_splits`.

    Returns:
        A dataset, or a stream with `streaming`.

    Raises:
        DataError: As `load_splits`, or if there are no rows of this split.
    """
    splits = load_splits(files, split=split, **options)
    if split not in splits:
        raise DataError(
            f"{', '.join(files)} has rows for {', '.join(splits)}, but none for {split}: save "
            "these rows in a file of their own."
        )
    return splits[split]


def load_folder(
    folder: Path, *, streaming: bool = False, notes: list[str] | None = None
) -> dict[str, Any] | None:
    """Load the text, CSV or JSON files in a folder by split. `datasets` assigns files to splits by
    their names; a JSON file may also contain all splits.

    Args:
        folder: Contains files of one type, such as train.csv and test.csv.
        streaming: Read rows lazily.
        notes: Lines for the log, on how the files were read, are appended to it.

    Returns:
        Split name -> dataset, or stream with `streaming`. None if `datasets` must read the folder
        itself: if it has a README.md, which may configure how, or files of another type.

    Raises:
        DataError: As `load_splits`, or if a file is a pointer of git-lfs.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _check_no_lfs_pointer(path)
    if (folder / "README.md").exists():
        return None
    with wrap_read_errors(str(folder)):
        files_by_split = load_dataset_builder(str(folder)).config.data_files or {}
    file_types = {_file_type(Path(path)) for paths in files_by_split.values() for path in paths}
    if not file_types or not file_types <= {"csv", "json", "text"}:
        return None
    splits = {}
    for split, paths in files_by_split.items():  # a JSON file may contain all splits
        splits |= load_splits(paths, split=str(split), streaming=streaming, notes=notes)
    return splits


def _common_file_type(files: Sequence[str], paths: Sequence[str]) -> str:
    """Check the files of a dataset for what can be wrong before they are parsed, and return the
    type that all of them have (a value of `FILE_TYPES`).
    """
    name_of_type: dict[str, str] = {}
    for path in map(Path, paths):
        file_type = _file_type(path)
        if not path.is_file():
            problem = "is a folder" if path.is_dir() else "does not exist"
            raise DataError(f"the file {path} {problem}.")
        if file_type is None:
            raise DataError(
                f"the file {path} has an unknown extension: use one of {', '.join(FILE_TYPES)} "
                "(optionally with .gz)."
            )
        if path.stat().st_size == 0:
            raise DataError(f"the file {path} is empty.")
        _check_no_lfs_pointer(path)
        name_of_type.setdefault(file_type, path.name)
    if len(name_of_type) > 1:
        found = ", ".join(f"{name} ({file_type})" for file_type, name in name_of_type.items())
        raise DataError(
            f"the files of {', '.join(files)} are of different types: {found}. Give files of one "
            "type."
        )
    return next(iter(name_of_type))


def _load_file(
    path: str, file_type: str, field: str | None, streaming: bool
) -> tuple[dict[str | None, Any], str | None]:
    """Load the rows of one file by split (None if it does not name splits), and return a line for
    the log on how it was read, or None.
    """
    document = None
    if file_type == "json":
        document = read_document(path, field, streaming=streaming)
    if document is not None:
        rows_by_split, note = document
        return to_streams(rows_by_split) if streaming else rows_by_split, note
    note = None
    options = BUILDER_OPTIONS.get(file_type, {})
    if file_type == "csv":
        options, note = builder_options(path)
    rows = load_dataset(
        file_type,
        data_files=escape(path),  # `datasets` would read wildcards as a pattern
        split="train",
        streaming=streaming,
        **options,
    )
    if options.get("sep") == "\t" and not streaming:
        check_quotes(path, rows)
    return {None: rows}, note


def to_streams(splits: Mapping[Any, Dataset]) -> dict[Any, IterableDataset]:
    """Return the splits of a dataset as streams."""
    return {split: rows.to_iterable_dataset() for split, rows in splits.items()}


def join(parts: Sequence[tuple[str, Any]], weights: Sequence[float] | None = None) -> Any:
    """Concatenate the rows of files or datasets, or mix them at random by weights, with the columns
    and types of the first.

    Args:
        parts: (name of the file or dataset, its rows or stream) of each.
        weights: Proportions of the parts in the mix, which ends with the last row of any part.

    Raises:
        DataError: If one has other columns than the first, or values or classes that do not fit.
    """
    if len(parts) == 1:
        return parts[0][1]
    features = parts[0][1].features
    all_rows = []
    with wrap_read_errors(", ".join(name for name, _ in parts)):
        check_same_columns(parts)
        for name, rows in parts:
            # Of a stream of a file that is a list, columns have no types.
            if features is not None and rows.features is not None:
                rows = rows.select_columns(list(features))
                if rows.features != features:
                    _check_same_classes(parts[0], (name, rows))
                    rows = rows.cast(features)
            all_rows.append(rows)
        if weights is None:
            return concatenate_datasets(all_rows)
        return interleave_datasets(
            all_rows,
            probabilities=[weight / sum(weights) for weight in weights],
            seed=MIX_SEED,
            stopping_strategy="first_exhausted",
        )


def _check_same_classes(first: tuple[str, Any], other: tuple[str, Any]) -> None:
    """Check that class labels of two files, (name, rows), have the same names in the same order:
    their numbers would mean other classes.
    """
    for column, feature in first[1].features.items():
        of_other = other[1].features[column]
        both_are_classes = isinstance(feature, ClassLabel) and isinstance(of_other, ClassLabel)
        if both_are_classes and feature.names != of_other.names:
            raise DataError(
                f"the column {column} has the classes {', '.join(feature.names)} in {first[0]}, "
                f"but {', '.join(of_other.names)} in {other[0]}: give all files the same classes."
            )


def _check_no_lfs_pointer(path: Path) -> None:
    """Check that a file of a dataset is not a pointer of git-lfs, which stands for data that was
    not fetched.
    """
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise DataError(
                f"the file {path} is a git-lfs pointer, not the data itself: fetch it with "
                "`git lfs pull`."
            )


def check_same_columns(parts: Sequence[tuple[str, Any]]) -> None:
    """Check that datasets or files have the same columns: `datasets` would fill missing ones with
    None.

    Args:
        parts: (name of the dataset or file, its rows) of each.

    Raises:
        DataError: If one of them has other columns than the first.
    """
    # Of a stream without known columns, those of its first row.
    columns = [(name, sorted(rows.column_names or next(iter(rows), ()))) for name, rows in parts]
    others = [(name, names) for name, names in columns if names != columns[0][1]]
    if others:
        listed = "; ".join(
            f"{name} has {', '.join(names) or 'no rows'}" for name, names in (columns[0], *others)
        )
        raise DataError(f"different columns: {listed}. Give all the same columns.")


@contextmanager
def wrap_read_errors(name: str) -> Iterator[None]:
    """Turn any error of `datasets` while it reads a dataset into a one-line DataError, and silence
    its log; errors of hf_ga pass unchanged.

    Args:
        name: The dataset or file, for the error.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except HfGaError:
        raise
    except Exception as error:
        raise read_error(name, error) from error
    finally:
        logging.set_verbosity(verbosity)


def read_error(name: str, error: BaseException) -> DataError:
    """Build the one-line DataError for an error of `datasets` while it read a dataset.

    Args:
        name: The dataset or file.
        error: The error of `datasets`; if it has a cause, the message is that of the cause.
    """
    cause = error.__cause__ or error
    if "corresponds to no data" in str(cause):
        return DataError(f"{name} has no rows.")
    if isinstance(cause, UnicodeDecodeError):
        byte = cause.object[cause.start]
        return DataError(
            f"cannot read {name}: byte {cause.start} (0x{byte:x}) is not UTF-8: save "
            "the file as UTF-8. For one that a spreadsheet of Western Europe exported: "
            "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW_FILE."
        )
    one_line_message = " ".join(str(cause).split())[:300]
    return DataError(f"cannot read {name}: {type(cause).__name__}: {one_line_message}")


def _matching_paths(file: str) -> list[str]:
    """Return the files that a name in an option such as `dataset_name` stands for: the file itself,
    or the sorted matches of a pattern.
    """
    path = Path(file).expanduser()
    if not is_pattern(file):
        return [str(path)]
    paths = sorted(match for match in glob(str(path), recursive=True) if Path(match).is_file())
    if not paths:
        raise DataError(f"no file matches the pattern {file}.")
    return paths


def _file_type(path: Path) -> str | None:
    """Return the type of a dataset's file by its extension, apart from .gz: a value of
    `FILE_TYPES`, or None if the extension is unknown.
    """
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_TYPES.get(suffixes[-1]) if suffixes else None
