"""JSON files that are one object instead of one row per line: rows under a key, splits as keys, and
the formats that pandas' `to_json` writes.

`datasets` would read such a file as a single row.

Dates in JSON files stay texts. pyarrow, with which `datasets` reads JSON, converts strings that are
ISO 8601 dates to timestamps if all strings of a column (or of a block of about 10 MB of the file)
are dates. "2024-01-02" would become a `datetime`, or the string "2024-01-02 00:00:00" where other
blocks have other texts. So Python reads files with dates, into a file that is mapped into memory.
"""

import gzip
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset
from datasets.data_files import SPLIT_KEYWORDS

from hf_ga.errors import DataError

Row = dict[str, Any]
# Split name (None if the object does not name splits) -> rows; where they were found, for the log.
FoundRows = tuple[dict[str | None, list[Row]], str]
# Key in a JSON file -> the split that it names, as in names of files.
SPLIT_NAMES = {name: str(split) for split, names in SPLIT_KEYWORDS.items() for name in names}
# Keys that every message of a conversation has: in OpenAI's format, and in ShareGPT's.
_MESSAGE_KEYS = ({"role", "content"}, {"from", "value"})
LARGEST_EXACT = 2**53  # the floats up to it include all whole numbers
_DATE = re.compile(r'"\s*\d{4}-\d\d-\d\d')  # how the string of a date begins
PARAGRAPHS = "paragraphs"  # the column that has the paragraphs of an article


def read_document(
    path: str, field: str | None, *, streaming: bool = False
) -> tuple[dict[str | None, Dataset], str | None] | None:
    """Read the rows of a JSON file that is one object, or that has dates.

    Args:
        path: The JSON file, optionally compressed (.gz).
        field: Key of the rows, with dots for nested keys. None: search for the rows.
        streaming: Do not read dates; a column of them in a stream is refused where it is used.

    Returns:
        (split -> rows; a line for the log, which says where the rows were found). The split is None
        if the file does not name splits. None for a file that `datasets` can read: one with a list
        of rows, or with one row per line.

    Raises:
        DataError: If there are no rows under `field`, or rows under more than one key.

    Example:
        splits, note = read_document("rows.json", None)  # {"data": [{"text": "a"}, ...]}
        print(splits[None], note)  # a dataset; rows.json: rows under the key `data`
    """
    file = Path(path)
    # In .jsonl and .ndjson files, a single line is a row.
    line_is_row = field is None and ".json" not in file.suffixes
    document = _read_single_object(file, line_is_row)
    if field is not None:
        found = _rows_under_field(document, field, path)
    else:
        found = _find_rows(document, path) if document else None
    if found is not None:
        rows_by_split, description = found
        splits = {split: to_dataset(rows) for split, rows in rows_by_split.items() if rows}
        return splits, f"{file.name}: {description}"
    if document:
        return {None: to_dataset([document])}, None
    with open_json(path) as lines:
        if streaming or not any(map(_DATE.search, lines)):
            return None
    return {None: _map_rows(path)}, None


def to_dataset(rows: Sequence[Row]) -> Dataset:
    """Make a dataset of rows, some of which may lack keys or have values of other types."""
    # Not `Dataset.from_list`, which takes the names of columns from the first row.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Dataset.from_dict(columns, on_mixed_types="use_json")


def open_json(path: str | Path) -> TextIO:
    """Open a JSON file, optionally compressed (.gz), with or without a byte order mark."""
    opener = gzip.open if Path(path).suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig")


def _read_single_object(path: Path, line_is_row: bool) -> dict[str, Any] | None:
    """Read a JSON file if its whole content is one object."""
    with open_json(path) as file:
        lines = (line.lstrip() for line in file if line.strip())
        first_line = next(lines, "")
        if first_line.startswith("null"):  # which would crash the process in pyarrow's reader
            raise DataError(
                f"the file {path} begins with `null` instead of a row: remove that line."
            )
        if not first_line.startswith("{"):
            return None
        try:
            row = json.loads(first_line)
        except json.JSONDecodeError:  # an object that spans several lines
            return json.loads(first_line + file.read())
        return None if line_is_row or any(lines) else row


def _rows_under_field(document: Mapping[str, Any] | None, field: str, path: str) -> FoundRows:
    """Return the rows under the key that the option `field` names."""
    if document is None:
        raise DataError(
            f"field {field} names a key of a JSON file that is one object, but {path} has one row "
            "per line or is a list of rows: omit field."
        )
    value: Any = document
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    rows = _to_rows(value)
    if rows is None:
        raise DataError(
            f"field {field}: there is no list of rows under this key of {path}, which has the keys "
            f"{', '.join(document)}."
        )
    return {None: rows}, f"rows under the key `{field}`"


def _find_rows(document: Mapping[str, Any], path: str) -> FoundRows | None:
    """Find the rows in the content of a JSON file that is one object: by keys that name splits, in
    a format of pandas, or under the only key with a list of objects.
    """
    lists = {key: value for key, value in document.items() if _is_list_of(dict, value)}
    if any(keys <= rows[0].keys() for rows in lists.values() for keys in _MESSAGE_KEYS):
        return None  # a conversation
    splits = {key: _to_rows(document[key]) for key in document if key in SPLIT_NAMES}
    if any(splits.values()):
        rows_by_split = _rows_by_split(splits, path)
        description = f"splits under the keys {', '.join(splits)}"
        return rows_by_split, description + _not_used(document, splits)
    rows = _rows_of_pandas(document)
    if rows is not None:
        return {None: rows}, "a format of pandas' to_json, or a list per column"
    if len(lists) > 1:
        raise DataError(
            f"{path} is one JSON object with several lists of rows ({', '.join(lists)}): name one "
            "with --field."
        )
    if lists:
        ((key, rows),) = lists.items()
        description = f"rows under the key `{key}`"
        return {None: rows}, description + _not_used(document, lists)
    return None


def _not_used(document: Mapping[str, Any], used: Collection[str]) -> str:
    """List the lists and objects under other keys of a JSON object, for the log."""
    others = [
        key for key, value in document.items() if key not in used and isinstance(value, list | dict)
    ]
    return f" (not used: {', '.join(others)})" if others else ""


def _rows_by_split(
    rows_by_key: Mapping[str, list[Row] | None], path: str
) -> dict[str | None, list[Row]]:
    """Return the rows of a JSON file by split, from those under the keys that name splits."""
    splits: dict[str | None, list[Row]] = {}
    for key, rows in rows_by_key.items():
        if rows is None:
            raise DataError(
                f"{path} has rows under the names of splits, but those under {key} are not a list "
                "of objects: fix or remove them."
            )
        if SPLIT_NAMES[key] in splits:
            raise DataError(
                f"{path} has rows under the keys {', '.join(rows_by_key)}, of which several name "
                "the same split: rename or join them."
            )
        splits[SPLIT_NAMES[key]] = rows
    return splits


def _to_rows(value: Any) -> list[Row] | None:
    """Return a JSON value as the rows of a dataset if it is a list of objects (which may be empty),
    or an object in a format of pandas. Return None for any other value.
    """
    if isinstance(value, list):
        return value if all(isinstance(row, dict) for row in value) else None
    return _rows_of_pandas(value) if isinstance(value, dict) else None


def _rows_of_pandas(document: Mapping[str, Any]) -> list[Row] | None:
    """Return the rows of a JSON object in one of the formats that pandas' `to_json` writes, or of
    an object with a list per column. Return None for any other object.
    """
    # pandas' format "split": {"columns": [...], "index": [...], "data": [[...], ...]}
    if isinstance(document.get("columns"), list) and _is_list_of(list, document.get("data")):
        return [dict(zip(document["columns"], row, strict=True)) for row in document["data"]]
    columns = list(document.values())
    if columns and all(isinstance(column, dict) and column for column in columns):
        has_row_numbers_inside = all(map(str.isdecimal, columns[0]))
        has_row_numbers_outside = all(map(str.isdecimal, document))
        have_same_keys = all(column.keys() == columns[0].keys() for column in columns)
        if has_row_numbers_inside == has_row_numbers_outside or not have_same_keys:
            return None
        if has_row_numbers_outside:  # {row number: row}
            return columns
        # {column: {row number: cell}}
        return [{name: column[i] for name, column in document.items()} for i in columns[0]]
    if columns and all(isinstance(column, list) and column for column in columns):
        has_objects = any(isinstance(cell, dict) for column in columns for cell in column)
        have_same_length = len(set(map(len, columns))) == 1
        if have_same_length and not has_objects:
            return [dict(zip(document, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return None


def _is_list_of(item_type: type, value: Any) -> bool:
    """Return whether a JSON value is a non-empty list whose items all have the given type."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(item, item_type) for item in value)


def _map_rows(path: str) -> Dataset:
    """Read a JSON file into a file of the cache of `datasets`, which is mapped into memory: first
    the types of all rows are found, then the rows are written.
    """
    status = Path(path).stat()
    version = (status.st_size, status.st_mtime_ns)
    shapes = _distinct(map(_shape, _read_rows(path, version)))
    return Dataset.from_generator(
        _read_rows,
        features=to_dataset(shapes).features,
        gen_kwargs={"path": path, "version": version},
    )


def _shape(value: Any) -> Any:
    """Reduce a JSON value to its type: empty texts, zeros, and lists without repeats. A whole
    number that no float equals stays one, as it is refused in a column with floats.
    """
    if type(value) is int and abs(value) > LARGEST_EXACT:
        return LARGEST_EXACT + 1
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return _distinct(map(_shape, value))
    return type(value)()


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Leave out JSON values that are equal to earlier ones. (In Python, 0 equals 0.0 and False.)"""
    return list({json.dumps(value): value for value in values}.values())


def _read_rows(path: str, version: tuple[int, int]) -> Iterator[Row]:
    """Read a JSON file of one row per line, or with a list of objects or strings, by Python's JSON
    reader, which does not convert dates. The cache finds the rows by both arguments.
    """
    with open_json(path) as file:
        lines = (line for line in file if line.strip())
        first_line = next(lines)
        if not first_line.lstrip().startswith("["):
            yield from map(json.loads, chain([first_line], lines))
            return
        rows = json.loads(first_line + file.read())
    # As `datasets` does with a list of strings.
    yield from ({"text": row} if isinstance(row, str) else row for row in rows)


def flatten_articles(dataset: Dataset) -> Dataset:
    """Replace each article of SQuAD's nested format by a row per question; rows of another format
    are returned unchanged.

    An article is {"title": ..., "paragraphs": [{"context": ..., "qas": [question, ...]}, ...]}, and
    a question {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}, ...]}.
    The `plausible_answers` of SQuAD 2 are not used. If no question has `answers`, the rows have no
    such column.
    """
    paragraph = getattr(dataset.features.get(PARAGRAPHS), "feature", None)
    if isinstance(paragraph, dict) and {"context", "qas"} <= paragraph.keys():
        return to_dataset([row for article in dataset for row in _questions_in(article)])
    return dataset


def _questions_in(article: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each question of a SQuAD article."""
    for paragraph in article[PARAGRAPHS] or ():
        for question in paragraph["qas"] or ():
            row = {
                "id": question.get("id"),
                "title": article.get("title"),
                "question": question.get("question"),
                "context": paragraph["context"],
            }
            answers = question.get("answers")
            if answers is not None or question.get("is_impossible"):
                row["answers"] = answers or []
            yield row
