"""Files of rows, given by names and patterns, and errors of `datasets` while it reads."""

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from datasets import load_dataset, load_dataset_builder
from datasets.packaged_modules.json.json import JsonConfig
from datasets.utils import logging

from hf_ga.errors import DataError, HfGaError
from hf_ga.finetuning.data.dates import with_dates_as_texts
from hf_ga.finetuning.data.delimited import SEPARATORS, header, load_delimited, separator_of
from hf_ga.finetuning.data.documents import json_lines_of

FILE_KINDS = {
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
LARGEST_POINTER = 1024  # bytes, by the specification of git-lfs
# Options of `datasets` for a type of file.
READ_WITH: dict[str, dict[str, Any]] = {
    "text": {"encoding": "utf-8-sig"},  # a byte order mark is no part of the first text
    "json": {},
}
if hasattr(JsonConfig, "parse_agent_traces"):  # conversations with some columns are not logs
    READ_WITH["json"]["parse_agent_traces"] = False


@dataclass(frozen=True)
class _Part:
    """Rows of one split in a file.

    Attributes:
        name: The file's name, for errors.
        path: The file to read. Of a JSON object it is a file in the cache.
        split: None if the file does not name splits.
    """

    name: str
    path: str
    split: str | None = None


def is_file(name: str) -> bool:
    """Whether a dataset's name is a file name, existing or not, or a pattern of them."""
    path = Path(name).expanduser()
    return _file_kind(path) is not None or path.is_file() or is_pattern(name)


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards and is not itself a file or folder."""
    return any(character in name for character in "*?[") and not Path(name).expanduser().exists()


def load_splits(
    files: Sequence[str],
    *,
    field: str | None = None,
    streaming: bool = False,
    facts: list[str] | None = None,
) -> dict[str, Any]:
    """Load the rows of files by split: `train`, unless the keys of a JSON file are splits.

    Args:
        files: Names and patterns of files. Rows are in the given order, those of a pattern in the
            order of their paths.
        field: Key of the rows in JSON files that are one object. None: find it.
        streaming: Read rows as they are needed.
        facts: Lines on how the files were read are appended to it.

    Returns:
        {split: dataset, or stream}

    Raises:
        DataError: a file is missing, empty, of an unknown type or not readable; a pattern without a
            match; files of different types or columns.
    """
    kind, parts = _parts_of(files, field, facts if facts is not None else [])
    by_split: dict[str, list[_Part]] = {}
    for part in parts:
        by_split.setdefault(part.split or "train", []).append(part)
    return {split: _load(kind, of_split, streaming) for split, of_split in by_split.items()}


def load_files(
    files: Sequence[str],
    split: str,
    *,
    field: str | None = None,
    streaming: bool = False,
    facts: list[str] | None = None,
) -> Any:
    """Load the rows of files for one split; of a JSON file whose keys are splits, only its rows.

    Args:
        files: As for `load_splits`.
        split: `validation`, `test`, `predict`, or any other name.
        field: As for `load_splits`.
        streaming: As for `load_splits`.
        facts: As for `load_splits`.

    Raises:
        DataError: as `load_splits`; or no rows of this split.
    """
    kind, parts = _parts_of(files, field, facts if facts is not None else [])
    chosen = [part for part in parts if part.split in (None, split)]
    if not chosen:
        raise DataError(
            f"{', '.join(files)} has rows for {', '.join(str(part.split) for part in parts)}, but "
            f"none for {split}: save these rows in a file of their own."
        )
    return _load(kind, chosen, streaming)


def load_folder(
    folder: Path, *, streaming: bool = False, facts: list[str] | None = None
) -> dict[str, Any] | None:
    """Load the rows of the files in a folder by split, to which `datasets` assigns them by name.

    Args:
        folder: With files of one type, such as train.csv and test.csv.
        streaming: As for `load_splits`.
        facts: As for `load_splits`.

    Returns:
        {split: dataset, or stream}. None if `datasets` must read the folder itself: one with a
        README.md, which may say how, or with files of another type than text, CSV and JSON.

    Raises:
        DataError: as `load_splits`; or a file is a pointer of git-lfs.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _check_no_pointer(path)
    if (folder / "README.md").exists():
        return None
    with reading(str(folder)):
        found = load_dataset_builder(str(folder)).config.data_files or {}
    kinds = {_file_kind(Path(path)) for paths in found.values() for path in paths}
    if not kinds or not kinds <= {"csv", "json", "text"}:
        return None
    if set(map(str, found)) == {"train"}:  # a JSON file may have all splits
        (paths,) = found.values()
        return load_splits(paths, streaming=streaming, facts=facts)
    return {
        str(split): load_files(paths, str(split), streaming=streaming, facts=facts)
        for split, paths in found.items()
    }


def _parts_of(files: Sequence[str], field: str | None, facts: list[str]) -> tuple[str, list[_Part]]:
    """The type of files, and what is read of them."""
    paths = [path for file in files for path in _matches(file)]
    kinds = {path: _checked_kind(path) for path in paths}
    if len(set(kinds.values())) > 1:
        first = {kind: path for path, kind in reversed(kinds.items())}
        found = ", ".join(f"{Path(path).name} ({kind})" for kind, path in first.items())
        raise DataError(
            f"the files of {', '.join(files)} are of different types: {found}. Give files of one "
            "type."
        )
    kind = kinds[paths[0]]
    if field is not None and kind != "json":
        raise DataError(f"field {field} applies to JSON files, not to {paths[0]}: omit it.")
    parts = []
    for path in paths:
        with reading(path):
            fact = _fact_of_separator(path) if kind == "csv" else None
            lines: dict[str | None, str] = {None: path}
            if kind == "json":
                lines, fact = json_lines_of(path, field)
        parts += [_Part(path, of_split, split) for split, of_split in lines.items()]
        if fact is not None and fact not in facts:
            facts.append(fact)
    return kind, parts


def _fact_of_separator(path: str) -> str | None:
    """A line on the separator of a CSV or TSV file; None if it is a comma."""
    separator = separator_of(path)
    if separator == ",":
        return None
    return f"{Path(path).name}: columns separated by {SEPARATORS[separator]}"


def _load(kind: str, parts: Sequence[_Part], streaming: bool) -> Any:
    if len(parts) > 1:
        check_same_columns([(part.name, _columns(kind, part)) for part in parts])
    paths = [part.path for part in parts]
    literal = [escape(path) for path in paths]  # `datasets` takes names for patterns
    with reading(", ".join(dict.fromkeys(part.name for part in parts))):
        if kind == "csv":
            return load_delimited(paths, streaming=streaming)
        options = READ_WITH.get(kind, {})
        rows = load_dataset(kind, data_files=literal, split="train", streaming=streaming, **options)
        return with_dates_as_texts(rows, paths) if kind == "json" else rows


def _check_no_pointer(path: Path) -> None:
    if path.stat().st_size > LARGEST_POINTER:
        return
    content = path.read_bytes()
    if content.startswith(LFS_POINTER):
        size = content.decode(errors="replace").partition("size ")[2].split()[:1]
        raise DataError(
            f"the file {path} is a git-lfs pointer to data of {''.join(size) or 'unknown'} bytes, "
            "not the data itself: fetch it with `git lfs pull`."
        )


def _check_not_utf16(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise DataError(f"the file {path} is UTF-16: convert it to UTF-8.")


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
    _check_no_pointer(path)
    _check_not_utf16(path)
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


def _columns(kind: str, part: _Part) -> list[str]:
    """Columns of the first rows of a file."""
    with reading(part.name):
        if kind == "csv":
            return header(part.path, separator_of(part.path))
        options = READ_WITH.get(kind, {})
        literal = escape(part.path)
        rows = load_dataset(kind, data_files=literal, split="train", streaming=True, **options)
        return columns_of(rows)


def _file_kind(path: Path) -> str | None:
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    return FILE_KINDS.get(suffixes[-1]) if suffixes else None
