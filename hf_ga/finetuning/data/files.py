"""Files of rows, given by names and patterns, and errors of `datasets` while it reads."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

from datasets import load_dataset
from datasets.utils import logging

from hf_ga.errors import DataError, HfGaError

FILE_KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
}


def is_file(name: str) -> bool:
    """Whether a dataset's name is a file name, existing or not, or a pattern of them."""
    path = Path(name).expanduser()
    return _file_kind(path) is not None or path.is_file() or is_pattern(name)


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards and is not itself a file or folder."""
    return any(character in name for character in "*?[") and not Path(name).expanduser().exists()


def load_files(files: Sequence[str], *, streaming: bool = False) -> Any:
    """The rows of files in the given order; those of a pattern in the order of their paths.

    Raises:
        DataError: a file is missing, empty, of an unknown type or not readable; a pattern without a
            match; files of different types or columns.
    """
    paths = [path for file in files for path in _matches(file)]
    kinds = {path: _checked_kind(path) for path in paths}
    if len(set(kinds.values())) > 1:
        first = {kind: path for path, kind in reversed(kinds.items())}
        found = ", ".join(f"{Path(path).name} ({kind})" for kind, path in first.items())
        raise DataError(
            f"the files of {', '.join(files)} are of different types: {found}. Give files of one "
            "type."
        )
    if len(paths) > 1:
        check_same_columns([(path, _columns(kind, path)) for path, kind in kinds.items()])
    with reading(", ".join(files)):
        return load_dataset(kinds[paths[0]], data_files=paths, split="train", streaming=streaming)


def _checked_kind(file: str) -> str:
    """Type of a file, checked before it is parsed."""
    path = Path(file)
    kind = _file_kind(path)
    if not path.is_file():
        raise DataError(f"the file {file} {'is a folder' if path.is_dir() else 'does not exist'}.")
    if kind is None:
        raise DataError(
            f"the file {file} has an unknown extension: use one of {', '.join(FILE_KINDS)} "
            "(optionally with .gz)."
        )
    if path.stat().st_size == 0:
        raise DataError(f"the file {file} is empty.")
    if kind == "json":
        with (
            suppress(OSError, EOFError, zlib.error),
            (gzip.open if path.suffix == ".gz" else open)(path, "rb") as opened,
        ):
            if (
                opened.read(64).lstrip().startswith(b"null")
            ):  # pyarrow's reader would crash the process
                raise DataError(
                    f"the file {file} begins with `null` instead of a row: remove that line."
                )
    return kind


def columns_of(rows: Any) -> list[str]:
    """Names of the columns of a dataset or a stream."""
    return rows.column_names or list(next(iter(rows), ()))


def check_same_columns(columns: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Check that datasets or files have the same columns: `datasets` would fill missing ones with
    None.

    Raises:
        DataError: the first two that differ, with their columns.
    """
    first, *others = columns
    for other in others:
        if set(first[1]) != set(other[1]):
            has = [
                f"{name} has {', '.join(sorted(names)) or 'no rows'}"
                for name, names in (first, other)
            ]
            raise DataError(f"different columns: {'; '.join(has)}. Give all the same columns.")


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn any error of `datasets` while it reads `name` into a one-line DataError, without its log
    message; pass our own on.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except HfGaError:
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
    return DataError(
        f"cannot read {name}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
    )


def _matches(file: str) -> list[str]:
    path = Path(file).expanduser()
    if not is_pattern(file):
        return [str(path)]
    paths = sorted(found for found in glob(str(path), recursive=True) if Path(found).is_file())
    if not paths:
        raise DataError(f"no file matches the pattern {file}.")
    return paths


def _columns(kind: str, path: str) -> list[str]:
    """Columns of the first rows of a file."""
    with reading(path):
        return columns_of(load_dataset(kind, data_files=path, split="train", streaming=True))


def _file_kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None
