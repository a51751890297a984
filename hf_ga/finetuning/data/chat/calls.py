"""Tool calls: from the formats of datasets to those that chat templates read."""

import json
from typing import Any

from jinja2 import TemplateError

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message
from hf_ga.finetuning.data.chat.values import parse_json, without_none

CALL_KEYS = ("id", "type")  # keys of a call besides `function`
FUNCTION_KEYS = ("name", "arguments")  # keys of `function`
ARGUMENTS_RULE = "the arguments of a tool call must be a mapping, or JSON of one"
CALLS_RULE = "tool_calls must be a list of calls, or JSON of one"


def read_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Read the tool calls of a chat message: `tool_calls`, or `function_call`, OpenAI's older
    format of a single call.

    Args:
        message: A message of a dataset, without keys whose value is None.

    Returns:
        `{"type": "function", "function": {"name": ..., "arguments": {...}}}` for each call, with
        `id` if it has one; an empty list for a message without calls.

    Raises:
        DataError: If a call has no name, unknown keys, or arguments that are not a dict.

    >>> message = {"function_call": {"name": "add", "arguments": '{"x": 1}'}}
    >>> read_calls(message)[0]["function"]
    {'name': 'add', 'arguments': {'x': 1}}
    """
    calls = parse_json(message.get("tool_calls", []), CALLS_RULE) or []
    if not isinstance(calls, list):
        raise DataError(f"{CALLS_RULE}, got {calls!r:.80}")
    if "function_call" in message:
        calls = [*calls, message["function_call"]]
    return [_read_call(without_none(call)) for call in calls]


def _read_call(call: Any) -> dict[str, Any]:
    """Convert a tool call of a dataset to the format of chat templates, see `read_calls`.

    Args:
        call: {"function": {"name": ..., "arguments": ...}}, or name and arguments without
            `function` around them. Arguments that are JSON, as OpenAI's, become a dict, as most
            templates expect.

    Raises:
        DataError: If the call has another format.
    """
    if not isinstance(call, dict):
        raise _invalid_call(call)
    top_level_function = {key: call[key] for key in FUNCTION_KEYS if key in call}
    other_keys = {key: call[key] for key in call if key not in ("function", *FUNCTION_KEYS)}
    function = call.get("function", top_level_function)
    if "function" in call and top_level_function:
        raise _invalid_call(call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid_call(call)
    if not set(other_keys) <= set(CALL_KEYS) or not set(function) <= set(FUNCTION_KEYS):
        raise _invalid_call(call)
    if other_keys.get("type", "function") != "function":
        raise _invalid_call(call)
    arguments = parse_json(function.get("arguments") or {}, ARGUMENTS_RULE) or {}
    if not isinstance(arguments, dict):
        raise DataError(f"{ARGUMENTS_RULE}, got {arguments!r:.80}")
    name_and_arguments = {"name": function["name"], "arguments": arguments}
    return {**other_keys, "type": "function", "function": name_and_arguments}


def _invalid_call(call: Any) -> DataError:
    """Return the error for a tool call in a chat dataset whose format is not supported."""
    return DataError(
        "a tool call must consist of id, type (function) and function, which has name and "
        f"arguments, got {call!r:.200}"
    )


def adapt_calls(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Convert the tool calls of a conversation to the first format that its chat template can
    render.

    Most templates accept arguments as a dict and messages with calls but no content, as
    transformers documents; some need arguments as JSON, or an empty content.

    Returns:
        The messages; unchanged if they have no calls, or if the template can render no format.
    """
    if not any("tool_calls" in message for message in messages):
        return messages
    for arguments_as_json in (False, True):
        for add_empty_content in (False, True):
            adapted = [
                _adapt_message(message, arguments_as_json, add_empty_content)
                for message in messages
            ]
            if _can_render_calls(adapted, template):
                return adapted
    return messages


def _adapt_message(message: Message, arguments_as_json: bool, add_empty_content: bool) -> Message:
    """Convert the tool calls of a message to one of the formats that chat templates read.

    Args:
        message: A message; it is returned unchanged if it has no calls.
        arguments_as_json: Convert the arguments of calls from a dict to JSON.
        add_empty_content: Add the content "" to a message without content.
    """
    if "tool_calls" not in message:
        return message
    adapted = dict(message)
    if arguments_as_json:
        adapted["tool_calls"] = [_with_json_arguments(call) for call in message["tool_calls"]]
    return {"content": "", **adapted} if add_empty_content else adapted


def _with_json_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call of a chat message with its arguments as a JSON string instead of a dict.

    >>> _with_json_arguments({"function": {"name": "add", "arguments": {"x": 1}}})
    {'function': {'name': 'add', 'arguments': '{"x": 1}'}}
    """
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _can_render_calls(messages: list[Message], template: ChatTemplate) -> bool:
    """Return whether a chat template renders tool calls as it should: without an error, and without
    Python's `repr` of a dict of arguments in the text.
    """
    try:
        text = template.render(messages)
    except (TemplateError, TypeError):
        return False
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    all_arguments = [call["function"]["arguments"] for call in calls]
    return not any(
        repr(arguments) in text
        for arguments in all_arguments
        if isinstance(arguments, dict) and arguments
    )
