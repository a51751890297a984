"""Tool calls: from the formats of datasets to those that chat templates read."""

import json
from itertools import product
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message
from hf_ga.finetuning.data.chat.values import parse_json, without_none

CALL_KEYS = ("id", "type")  # keys of a call besides `function`
FUNCTION_KEYS = ("name", "arguments")  # keys of `function`
ARGUMENTS_RULE = "the arguments of a tool call must be a mapping, or JSON of one"
CALLS_RULE = "tool_calls must be a list of calls, or JSON of one"


def read_calls(value: Any) -> list[dict[str, Any]]:
    """Read the tool calls of a chat message.

    Args:
        value: A list of calls, a single call, or JSON of them. None: no call.

    Returns:
        `{"type": "function", "function": {"name": ..., "arguments": {...}}}` for each call, with
        `id` if it has one.

    Raises:
        DataError: If a call has no name, unknown keys, or arguments that are not a dict.

    >>> read_calls({"name": "add", "arguments": '{"x": 1}'})[0]["function"]
    {'name': 'add', 'arguments': {'x': 1}}
    """
    return [_read_call(without_none(call)) for call in parse_json(value, list, CALLS_RULE)]


def _read_call(call: Any) -> dict[str, Any]:
    """Convert a tool call of a dataset to the format of chat templates, see `read_calls`."""
    other_keys = dict(call) if isinstance(call, dict) else {}
    function = other_keys.pop("function", None)
    if function is None:  # name and arguments without `function` around them
        function = {key: other_keys.pop(key) for key in FUNCTION_KEYS if key in other_keys}
    is_valid = (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and set(function) <= set(FUNCTION_KEYS)
        and set(other_keys) <= set(CALL_KEYS)
        and other_keys.get("type", "function") == "function"
    )
    if not is_valid:
        raise DataError(
            "a tool call must consist of id, type (function) and function, which has name and "
            f"arguments, got {call!r:.200}"
        )
    # Arguments that are JSON, as OpenAI's, become a dict, as most templates expect.
    arguments = parse_json(function.get("arguments"), dict, ARGUMENTS_RULE)
    name_and_arguments = {"name": function["name"], "arguments": arguments}
    return {**other_keys, "type": "function", "function": name_and_arguments}


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
    for arguments_as_json, add_empty_content in product((False, True), repeat=2):
        adapted = [
            _adapt_message(message, arguments_as_json, add_empty_content) for message in messages
        ]
        if _can_render_calls(adapted, template):
            return adapted
    return messages


def _adapt_message(message: Message, arguments_as_json: bool, add_empty_content: bool) -> Message:
    """Convert the tool calls of a message to one of the formats that chat templates read."""
    if "tool_calls" not in message:
        return message
    adapted = {"content": "", **message} if add_empty_content else dict(message)
    if arguments_as_json:
        adapted["tool_calls"] = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            adapted["tool_calls"].append({**call, "function": function})
    return adapted


def _can_render_calls(messages: list[Message], template: ChatTemplate) -> bool:
    """Return whether a chat template renders tool calls as it should: without an error, and without
    Python's `repr` of a dict of arguments in the text.
    """
    text = template.try_render(messages)
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    dicts = [call["function"]["arguments"] or "" for call in calls]
    return text is not None and not any(
        isinstance(value, dict) and repr(value) in text for value in dicts
    )
