"""Helpers for values in rows of conversations: JSON in strings, and keys without a value."""

import json
from typing import Any

from hf_ga.errors import DataError


def parse_json(value: Any, rule: str) -> Any:
    """Parse a value of a row of conversations as JSON if it is a string; return any other value
    unchanged.

    Args:
        value: The value.
        rule: What the value must be, the beginning of the error.

    Raises:
        DataError: If the value is a string that is not valid JSON.

    >>> parse_json('{"a": 1}', "a must be given"), parse_json([], "a must be given")
    ({'a': 1}, [])
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{rule}, got {value!r:.80} ({error})") from error


def without_none(value: Any) -> Any:
    """Return a copy of a value of a row of conversations without the keys of dicts whose value is
    None, also in nested dicts and lists: `datasets` adds such keys to rows that lack them.

    >>> without_none({"a": None, "b": [{"c": None, "d": 0}]})
    {'b': [{'d': 0}]}
    """
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
