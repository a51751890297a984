"""Dates in JSON files stay texts.

pyarrow, with which `datasets` reads JSON, converts strings that are ISO 8601 dates to timestamps if
all strings of a column (or of a block of about 10 MB of the file) are dates. "2024-01-02" would
become a `datetime`, or the string "2024-01-02 00:00:00" where other blocks have other texts.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_ga.finetuning.data.formats.documents import open_json

# How pyarrow writes a timestamp as a string.
_WRITTEN_TIMESTAMP = r"^\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}"


def with_dates_as_texts(rows: Any, path: str) -> Any:
    """Read a JSON file again with Python's JSON reader if pyarrow may have converted dates in them.

    Of a stream, only the types of its columns are inspected, if they are known.

    Args:
        rows: The dataset or stream that `datasets` read from the file.
        path: The file: JSON lines, or a list of objects, optionally compressed (.gz).

    Returns:
        `rows` itself if it has no dates, otherwise the same rows with all dates as they are in the
        file.
    """
    if rows.features is None:
        # A stream of a file that is a list. A column of dates in it is refused where it is used.
        return rows
    is_stream = isinstance(rows, IterableDataset)
    if is_stream:
        may_have_dates = "timestamp" in str(rows.features.arrow_schema.types)
    else:
        columns = [rows.data.column(name) for name in rows.column_names]
        may_have_dates = any(
            _may_be_converted(part) for column in columns for part in column.chunks
        )
    if not may_have_dates:
        return rows
    features = Features(_with_strings(dict(rows.features)))
    if is_stream:
        return IterableDataset.from_generator(
            rows_of_file, features=features, gen_kwargs={"path": path}
        )
    read_again = list(rows_of_file(path))
    # Not `Dataset.from_list`, which takes the names of columns from the first row.
    columns_by_name = {name: [row.get(name) for row in read_again] for name in features}
    return Dataset.from_dict(columns_by_name, features=features)


def rows_of_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON file, the rows of a dataset, read by Python's JSON reader, which
    does not convert dates.

    Args:
        path: A file of JSON lines, or with a list of objects or strings, optionally compressed
            (.gz).
    """
    with open_json(path) as file:
        lines = (line for line in file if line.strip())
        first = next(lines, "")
        if not first.lstrip().startswith("["):
            yield json.loads(first)
            yield from map(json.loads, lines)
            return
        for row in json.loads(first + file.read()):
            # As `datasets` does with a list of strings.
            yield {"text": row} if isinstance(row, str) else row


def _may_be_converted(values: pa.Array) -> bool:
    """Return whether pyarrow may have converted dates in a column of a JSON file: whether it has
    timestamps, or strings as pyarrow writes them.
    """
    if pa.types.is_timestamp(values.type):
        return True
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        looks_like_timestamp = pc.match_substring_regex(values, _WRITTEN_TIMESTAMP)
        return bool(pc.any(looks_like_timestamp).as_py())
    if pa.types.is_struct(values.type):
        return any(_may_be_converted(child) for child in values.flatten())
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        return _may_be_converted(values.flatten())
    return False


def _with_strings(feature: Any) -> Any:
    """Return the type of a JSON file's column in `datasets` (or a dict of such types) with strings
    in place of timestamps, also in nested types.
    """
    if isinstance(feature, dict):
        return {name: _with_strings(child) for name, child in feature.items()}
    if isinstance(feature, List):
        return List(_with_strings(feature.feature))
    if isinstance(feature, Value) and feature.dtype.startswith("timestamp"):
        return Value("string")
    return feature
