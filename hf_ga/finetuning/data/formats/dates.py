"""Dates in JSON files stay texts.

pyarrow, with which `datasets` reads JSON, converts strings that are ISO 8601 dates to timestamps if
all strings of a column (or of a block of about 10 MB of the file) are dates. "2024-01-02" would
become a `datetime`, or the string "2024-01-02 00:00:00" where other blocks have other texts.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from datasets import Features, IterableDataset, List, Value

from hf_ga.finetuning.data.formats.documents import open_json, to_dataset

_DATE = re.compile(r'"\s*\d{4}-\d\d-\d\d')  # how the string of a date begins


def with_dates_as_texts(rows: Any, path: str) -> Any:
    """Read a JSON file again with Python's JSON reader if pyarrow may have converted dates in it.

    Args:
        rows: The dataset or stream that `datasets` read from the file.
        path: The file: JSON lines, or a list of objects, optionally compressed (.gz).

    Returns:
        `rows` itself if it has no dates, otherwise the same rows with all dates as they are in the
        file.
    """
    if isinstance(rows, IterableDataset):
        # Without types, the file is a list. A column of dates in it is refused where it is used.
        features = Features(_with_strings(dict(rows.features or {})))
        if features == (rows.features or {}):
            return rows
        return IterableDataset.from_generator(
            rows_of_file, features=features, gen_kwargs={"path": path}
        )
    with open_json(path) as file:
        has_dates = any(map(_DATE.search, file))
    return to_dataset(list(rows_of_file(path))) if has_dates else rows


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
