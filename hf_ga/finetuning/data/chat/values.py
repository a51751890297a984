"""Values of rows: JSON in strings, and keys without a value."""

import json
from typing import Any

from hf_ga.errors import DataError


def from_json(value: Any, rule: str) -> Any:
    """Return what a string of JSON contains, and any other value as it is.

    Args:
        value: Of a row.
        rule: What the value must be, for the error.

    Raises:
        DataError: A string that is not JSON.

    >>> from_json('{"a": 1}', "a must be given"), from_json([], "a must be given")
    ({'a': 1}, [])
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{rule}, got {value!r:.80} ({error})") from error


def without_none(value: Any) -> Any:
    """Remove keys without a value, at any depth.

    >>> without_none({"a": None, "b": [{"c": None, "d": 0}]})
    {'b': [{'d': 0}]}
    """
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [without_none(part) for part in value]
    return value
