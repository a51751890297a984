"""Calls of tools, as datasets write them and as chat templates read them."""

import json
from typing import Any

from jinja2 import TemplateError

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message
from hf_ga.finetuning.data.chat.values import from_json, without_none

CALL_KEYS = ("id", "type")  # besides `function`
FUNCTION_KEYS = ("name", "arguments")
ARGUMENTS = "the arguments of a tool call must be a mapping, or JSON of one"
CALLS = "tool_calls must be a list of calls, or JSON of one"


def read_calls(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the calls of a message: `tool_calls`, or `function_call`, OpenAI's older form of one.

    Returns:
        `{"type": "function", "function": {"name": ..., "arguments": {...}}}` of each.

    Raises:
        DataError: A call without a name, with unknown keys, or with arguments that are no dict.

    >>> given = {"function_call": {"name": "add", "arguments": '{"x": 1}'}}
    >>> read_calls(given)[0]["function"]
    {'name': 'add', 'arguments': {'x': 1}}
    """
    calls = from_json(given.get("tool_calls", []), CALLS) or []
    if not isinstance(calls, list):
        raise DataError(f"{CALLS}, got {calls!r:.80}")
    if "function_call" in given:
        calls = [*calls, given["function_call"]]
    return [_read_call(without_none(call)) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    """A call, or the part of it that names the function alone. Arguments become a dict, as most
    templates expect them; OpenAI's are JSON.
    """
    if not isinstance(call, dict):
        raise _not_a_call(call)
    alone = {key: call[key] for key in FUNCTION_KEYS if key in call}
    outer = {key: call[key] for key in call if key not in ("function", *FUNCTION_KEYS)}
    function = call.get("function", alone)
    if "function" in call and alone:
        raise _not_a_call(call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _not_a_call(call)
    if not set(outer) <= set(CALL_KEYS) or not set(function) <= set(FUNCTION_KEYS):
        raise _not_a_call(call)
    if outer.get("type", "function") != "function":
        raise _not_a_call(call)
    arguments = from_json(function.get("arguments") or {}, ARGUMENTS) or {}
    if not isinstance(arguments, dict):
        raise DataError(f"{ARGUMENTS}, got {arguments!r:.80}")
    named = {"name": function["name"], "arguments": arguments}
    return {**outer, "type": "function", "function": named}


def _not_a_call(call: Any) -> DataError:
    return DataError(
        "a tool call must consist of id, type (function) and function, which has name and "
        f"arguments, got {call!r:.200}"
    )


def fit_calls(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Return the messages with calls in the form that a template can read.

    Most templates take arguments as a dict and calls without a content, as transformers documents;
    some need JSON, or an empty content.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    for is_json in (False, True):
        for defaults in ({}, {"content": ""}):
            form = [_with_form(message, is_json, defaults) for message in messages]
            if _is_readable(form, template):
                return form
    return messages


def _with_form(message: Message, is_json: bool, defaults: dict[str, str]) -> Message:
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if is_json:
        calls = [_with_json(call) for call in calls]
    return {**defaults, **message, "tool_calls": calls}


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _is_readable(messages: list[Message], template: ChatTemplate) -> bool:
    """Whether a template renders calls without an error, and no dict as Python writes it."""
    try:
        text = template.render(messages)
    except (TemplateError, TypeError):
        return False
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    arguments = [call["function"]["arguments"] for call in calls]
    return not any(repr(named) in text for named in arguments if isinstance(named, dict) and named)
