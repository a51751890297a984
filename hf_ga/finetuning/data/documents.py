"""JSON files that are one object instead of one row per line: rows under a key, splits as keys, and
the forms that pandas' `to_json` writes.

`datasets` would read such a file as a single row. Its rows are written again as JSON lines, into
the cache of `datasets`, which then reads them as it reads any other file.
"""

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import datasets

from hf_ga.errors import DataError

Row = dict[str, Any]
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
_OF_MESSAGES = ({"role", "content"}, {"from", "value"})  # keys of the messages of a conversation


@dataclass(frozen=True)
class Found:
    """The rows of a JSON object.

    Attributes:
        splits: Rows by split; None: the object names no splits.
        form: How they were found, for the log.
    """

    splits: dict[str | None, list[Row]]
    form: str


def json_lines_of(path: str, field: str | None) -> tuple[dict[str | None, str], str | None]:
    """Return a file of JSON lines for each split of a JSON file.

    Args:
        path: The file, optionally compressed (.gz).
        field: Key of the rows, with dots for keys in keys. None: find them.

    Returns:
        (files by split; the split None stands for a file without splits; line for the log). A file
        that is a list or has one row per line is returned as it is, without a line for the log.

    Raises:
        DataError: There are no rows under `field`, or under more than one key.

    Example:
        files, fact = json_lines_of("rows.json", None)  # {"data": [{"text": "a"}, ...]}
        print(files[None], fact)  # a file of the cache; rows.json: rows under the key `data`
    """
    file = Path(path)
    line_is_row = field is None and ".json" not in file.suffixes  # .jsonl, .ndjson
    document = _read_object(file, line_is_row)
    if document is None and field is not None:
        raise DataError(
            f"field {field} names a key of a JSON file that is one object, but {path} has one row "
            "per line or is a list of rows: omit field."
        )
    if document is None:
        return {None: path}, None
    found = _rows_at(document, field, path) if field is not None else _find_rows(document, path)
    if found is None:
        return {None: path}, None
    files = {
        split: _write_lines(rows, file.name.partition(".")[0])
        for split, rows in found.splits.items()
        if rows
    }
    return files, f"{file.name}: {found.form}"


def _read_object(path: Path, line_is_row: bool) -> dict[str, Any] | None:
    """The content of a file that is one JSON object. None: a list, rows in lines, or malformed
    (`datasets` says how).

    Args:
        path: The file.
        line_is_row: Whether an object on a single line is a row.
    """
    try:
        with _open_text(path) as file:
            first = _next_line(file)
            if not first.startswith("{"):
                return None
            try:
                row = json.loads(first)
            except json.JSONDecodeError:  # an object of several lines
                return json.loads(first + file.read())
            return None if line_is_row or _next_line(file) else row
    except (ValueError, OSError, EOFError, zlib.error):
        return None


def _open_text(path: Path) -> TextIO:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig")


def _next_line(file: TextIO) -> str:
    """The next line that is not blank, without spaces in front; empty at the end of the file."""
    return next((line.lstrip() for line in file if line.strip()), "")


def _rows_at(document: Mapping[str, Any], field: str, path: str) -> Found:
    value: Any = document
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    rows = _rows_in(value)
    if rows is None:
        raise DataError(
            f"field {field}: there is no list of rows under this key of {path}, which has the keys "
            f"{', '.join(document)}."
        )
    return Found({None: rows}, f"rows under the key `{field}`")


def _find_rows(document: Mapping[str, Any], path: str) -> Found | None:
    """The rows of an object; None: it is itself a row.

    Raises:
        DataError: Several keys may hold the rows.
    """
    if any(_are_messages(value) for value in document.values()):
        return None
    if _is_split_form(document) or _is_table_form(document):
        return Found({None: _pandas_rows(document)}, "the form of pandas' to_json")
    splits = _splits_in(document, path)
    if splits is not None:
        return splits
    rows = _pandas_rows(document)
    if rows is not None:
        return Found({None: rows}, "one list or object per column or index, as pandas writes them")
    lists = dict(_lists_of_objects(document))
    if len(lists) > 1:
        raise DataError(
            f"{path} is one JSON object with several lists of rows ({', '.join(lists)}): name one "
            "with --field."
        )
    if lists:
        ((key, rows),) = lists.items()
        form = f"rows under the key `{key}`{_not_used(document, key)}"
        return Found({None: rows}, form)
    if _is_dict_of_dicts(document) and len(document) > 1:
        raise DataError(
            f"{path} is one JSON object of objects, and neither its keys ({_some(document)}) nor "
            "theirs are row numbers, so rows and columns cannot be told apart: write it with "
            "to_json(orient='records')."
        )
    return None


def _splits_in(document: Mapping[str, Any], path: str) -> Found | None:
    """Rows by split, if the keys are names of splits.

    Raises:
        DataError: Two keys name the same split, or a split has something else than rows.
    """
    rows = {key: _rows_in(value) for key, value in document.items()}
    has_splits = any(key in SPLIT_NAMES and of_key for key, of_key in rows.items())
    for key, of_key in rows.items():
        if has_splits and key in SPLIT_NAMES and of_key is None:
            raise DataError(
                f"{path} has rows under the names of splits, but those under {key} are not a list "
                "of objects: fix or remove them."
            )
    rows = {key: of_key for key, of_key in rows.items() if of_key is not None}
    keys = [key for key in rows if key in SPLIT_NAMES]
    named = {SPLIT_NAMES[key]: rows[key] for key in keys}
    if "train" not in named and len(keys) < max(1, len(rows)):
        return None
    if len(named) < len(keys):
        raise DataError(
            f"{path} has rows under the keys {', '.join(keys)}, of which several name the same "
            "split: rename or join them."
        )
    unused = [key for key in rows if key not in SPLIT_NAMES]
    form = f"splits under the keys {', '.join(keys)}"
    if unused:
        form += f" (not used: {', '.join(unused)})"
    return Found(dict(named), form)


def _not_used(document: Mapping[str, Any], used: str) -> str:
    """Name the other keys that hold more than one value, for the log."""
    first = used.partition(".")[0]
    others = [
        key for key, value in document.items() if key != first and isinstance(value, list | dict)
    ]
    return f" (not used: {', '.join(others)})" if others else ""


def _rows_in(value: Any) -> list[Row] | None:
    """The rows of a list of objects, or of a form of pandas; None if it is neither."""
    if isinstance(value, list):
        return value if all(isinstance(row, dict) for row in value) else None
    return _pandas_rows(value) if isinstance(value, dict) else None


def _pandas_rows(document: Mapping[str, Any]) -> list[Row] | None:
    """The rows of a form that pandas' `to_json` writes, or of lists per column."""
    if _is_split_form(document):
        return [dict(zip(document["columns"], row, strict=True)) for row in document["data"]]
    if _is_table_form(document):
        index = set(document["schema"].get("primaryKey", ())) & {"index"}
        return [_without(row, index) for row in document["data"]]
    if _is_dict_of_dicts(document):
        return _rows_of_dicts(document)
    columns = list(document.values())
    if columns and all(isinstance(column, list) and column for column in columns):
        is_plain = not any(isinstance(cell, dict) for column in columns for cell in column)
        if is_plain and len(set(map(len, columns))) == 1:
            return [dict(zip(document, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return None


def _rows_of_dicts(document: Mapping[str, dict[str, Any]]) -> list[Row] | None:
    """The rows of {column: {row number: cell}} or {row number: row}; None if none are numbers."""
    numbers = list(next(iter(document.values())))
    has_row_numbers_inside = all(map(str.isdecimal, numbers))
    has_row_numbers_outside = all(map(str.isdecimal, document))
    if has_row_numbers_inside == has_row_numbers_outside:
        return None
    if has_row_numbers_outside:
        return list(document.values())
    return [{name: column[i] for name, column in document.items()} for i in numbers]


def _is_split_form(document: Mapping[str, Any]) -> bool:
    """Whether an object is {"columns": [...], "index": [...], "data": [[...], ...]}."""
    columns, data = document.get("columns"), document.get("data")
    return isinstance(columns, list) and _is_list_of(list, data)


def _is_table_form(document: Mapping[str, Any]) -> bool:
    """Whether an object is {"schema": {"fields": [...]}, "data": [{...}, ...]}."""
    schema = document.get("schema")
    return (
        isinstance(schema, dict) and "fields" in schema and _is_list_of(dict, document.get("data"))
    )


def _is_dict_of_dicts(document: Mapping[str, Any]) -> bool:
    """Whether all values are objects with the same keys."""
    values = list(document.values())
    if not values or not all(isinstance(value, dict) and value for value in values):
        return False
    return all(value.keys() == values[0].keys() for value in values)


def _lists_of_objects(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list]]:
    """Yield lists of objects with their keys, joined by dots."""
    for key, value in document.items():
        if _is_list_of(dict, value):
            yield above + key, value
        elif isinstance(value, dict):
            yield from _lists_of_objects(value, f"{above}{key}.")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _are_messages(value: Any) -> bool:
    """Whether a value is a conversation, which makes the object that holds it a row."""
    return _is_list_of(dict, value) and any(keys <= value[0].keys() for keys in _OF_MESSAGES)


def _without(row: Row, names: set[str]) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:5])


def _write_lines(rows: Sequence[Row], name: str) -> str:
    """Write rows as JSON lines into the cache of `datasets`, under a name made of their content."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_ga"
    file = folder / f"{name}-{sha256(content).hexdigest()[:16]}.jsonl"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.partial")  # other processes write the same
        partial.write_bytes(content)
        partial.replace(file)
    return str(file)
