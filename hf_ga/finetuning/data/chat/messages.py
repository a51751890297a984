"""Messages as OpenAI, TRL, axolotl and LLaMA-Factory write them -> messages as chat templates read
them.

`datasets` fills keys that a row lacks with None, so None means absent everywhere.
"""

import json
from dataclasses import dataclass
from typing import Any

from hf_ga.errors import DataError

Message = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "function": "tool"}
SHAREGPT_ROLES = {**ROLES, "observation": "tool", "function_response": "tool"}
SHAREGPT_CALLS = ("function_call", "tool_call")  # roles of messages that consist of calls
REASONING = ("reasoning_content", "reasoning", "thinking")
MARKS = ("weight", "train")  # 0 or false: the turn is not learnt
KEYS = (
    "role",
    "content",
    "from",
    "value",
    *REASONING,
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    *MARKS,
)
CALL_KEYS = ("id", "type", "function")
NEEDS = "every message needs the strings role and content"


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        message: As chat templates read it: role, content, tool_calls, ...
        is_target: Whether the model learns to write it.
    """

    message: Message
    is_target: bool


def read_turns(value: Any) -> list[Turn]:
    """Read a conversation: a list of messages, or such a list as JSON.

    Returns:
        Its turns. Those of the assistant are targets, unless their `weight` is 0 or `train` false.

    Raises:
        DataError: An unknown key, a missing role or content, content that is no text.

    >>> read_turns([{"from": "gpt", "value": "hi", "weight": 0}])
    [Turn(message={'role': 'assistant', 'content': 'hi'}, is_target=False)]
    """
    messages = from_json(value, "a conversation")
    if not isinstance(messages, list):
        raise DataError("a conversation must be a list of messages")
    return [_read_turn(message) for message in messages]


def from_json(value: Any, what: str) -> Any:
    """Return what a string of JSON contains, and any other value as it is.

    Raises:
        DataError: A string that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{what} must be a list of messages or JSON: {error}") from error


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


def _read_turn(value: Any) -> Turn:
    if not isinstance(value, dict):
        raise DataError(NEEDS)
    given = {key: part for key, part in value.items() if part is not None}
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise DataError(
            f"a message has the unknown key {unknown[0]!r}, which may change what is to be learnt: "
            f"remove it, or use one of {', '.join(KEYS)}"
        )
    if "from" in given:
        given = _from_sharegpt(given)
    if not isinstance(given.get("role"), str) or not given["role"]:
        raise DataError(NEEDS)
    role = ROLES.get(given["role"], given["role"])
    message: Message = {"role": role}
    if "content" in given:
        message["content"] = _text(given["content"])
    calls = _calls(given)
    if calls:
        message["tool_calls"] = calls
    elif "content" not in message:
        raise DataError(NEEDS)
    for key in (*REASONING, "tool_call_id", "name"):
        if key in given:
            message[key] = given[key]
    return Turn(message, _is_target(given, role))


def _from_sharegpt(given: dict[str, Any]) -> dict[str, Any]:
    """ShareGPT's keys and roles -> role and content."""
    if "role" in given or "content" in given:
        raise DataError("a message has both from and role, or both value and content: keep one")
    others = {key: part for key, part in given.items() if key not in ("from", "value")}
    role, content = given["from"], given.get("value")
    if role in SHAREGPT_CALLS:
        calls = from_json(content, "the value of a function call")
        calls = calls if isinstance(calls, list) else [calls]
        return {**others, "role": "assistant", "tool_calls": calls}
    role = SHAREGPT_ROLES.get(role, role)
    return {**others, "role": role, "content": content}


def _text(content: Any) -> str:
    """A text, or the texts of a list of parts, concatenated."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(NEEDS)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"parts of a content must be of type text, got {part!r:.80}")
        others = [key for key in without_none(part) if key not in ("type", "text")]
        if others:
            raise DataError(f"a part of type text has the unknown key {others[0]!r}: remove it")
    return "".join(part["text"] for part in content)


def _calls(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a message; `function_call` is OpenAI's older form of one call."""
    calls = from_json(given.get("tool_calls", []), "tool_calls")
    if not isinstance(calls, list):
        raise DataError(f"tool_calls must be a list of calls, got {calls!r:.80}")
    if "function_call" in given:
        calls = [*calls, given["function_call"]]
    return [_read_call(without_none(call)) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    """{"function": {"name": ..., "arguments": ...}}, or its inner part alone, with the arguments as
    a dict, as templates expect them; OpenAI's are JSON.
    """
    if isinstance(call, dict) and "function" not in call:
        others = {key: part for key, part in call.items() if key not in ("name", "arguments")}
        inner = {key: part for key, part in call.items() if key in ("name", "arguments")}
        call = {**others, "function": inner}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call needs the name of its function, got {call!r:.80}")
    unknown = [key for key in call if key not in CALL_KEYS]
    unknown += [key for key in function if key not in ("name", "arguments")]
    if unknown or call.get("type", "function") != "function":
        raise DataError(
            f"a tool call must consist of id, type (function), and a function with name and "
            f"arguments, got {call!r:.200}"
        )
    arguments = from_json(function.get("arguments") or {}, "the arguments of a tool call")
    if not isinstance(arguments, dict):
        raise DataError(f"the arguments of a tool call must be named, got {arguments!r:.80}")
    named = {"name": function["name"], "arguments": arguments}
    return {**call, "type": "function", "function": named}


def _is_target(given: dict[str, Any], role: str) -> bool:
    marks = {key: given[key] for key in MARKS if key in given}
    for key, mark in marks.items():
        if not isinstance(mark, int | float) or mark not in (0, 1):
            raise DataError(
                f"the {key} of a message must be 0 or 1 (false or true), got {mark!r:.80}; rows "
                "are weighted by --weight_column"
            )
    if role == "assistant":
        return all(marks.values())
    if any(marks.values()):
        raise DataError(
            f"{next(iter(marks))} asks to learn a message of the {role}, but only turns of the "
            "assistant can be learnt: remove it"
        )
    return False
