"""Helpers for values in rows of conversations: JSON in strings, and keys without a value."""

import json
from typing import Any, TypeVar

from hf_ga.errors import DataError

T = TypeVar("T", list, dict)


def parse_json(value: Any, kind: type[T], rule: str) -> T:
    """Parse a value of a row of conversations as JSON if it is a string, and check its type.

    Args:
        value: The value. None, an empty string and JSON's null are an empty list or dict.
        kind: list or dict. A dict stands for a list of one.
        rule: What the value must be, the beginning of the error.

    Raises:
        DataError: If the value has another type, or is a string that is not valid JSON.

    >>> parse_json('{"a": 1}', dict, "a must be given"), parse_json(None, list, "a must be given")
    ({'a': 1}, [])
    """
    parsed = value or kind()
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed) or kind()
        except ValueError as error:
            raise DataError(f"{rule}, got {value!r:.80} ({error})") from error
    if kind is list and isinstance(parsed, dict):
        parsed = [parsed]
    if not isinstance(parsed, kind):
        raise DataError(f"{rule}, got {parsed!r:.80}")
    return parsed


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
