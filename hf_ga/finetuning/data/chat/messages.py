"""Messages as OpenAI, TRL, axolotl and LLaMA-Factory write them -> messages as chat templates read
them.

`datasets` fills keys that a row lacks with None, so None means absent everywhere.
"""

import json
from typing import Any, TypeVar

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.template import Message

T = TypeVar("T", list, dict)

# Other names of roles -> the names that chat templates use.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
CALL_ROLES = ("function_call", "tool_call")  # roles of messages that consist of calls
# All keys that a message may have -> the names that chat templates read.
KEYS = {
    "role": "role",
    "content": "content",
    "from": "role",
    "value": "content",
    "reasoning_content": "reasoning_content",
    "reasoning": "reasoning_content",
    "thinking": "reasoning_content",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_call_id": "tool_call_id",
    "name": "name",
    "weight": "weight",
    "train": "train",
}
# Those whose values must be strings.
STRING_KEYS = ("role", "reasoning_content", "tool_call_id", "name")
LOSS_KEYS = ("weight", "train")  # 0 or false: the turn is not a target
MESSAGE_RULE = (
    "every message needs the strings role and content; prompts, completions, instructions and "
    "outputs must be strings"
)
CALL_KEYS = ("id", "type")  # keys of a call besides `function`
FUNCTION_KEYS = ("name", "arguments")  # keys of `function`
ARGUMENTS_RULE = "the arguments of a tool call must be a mapping, or JSON of one"
CALLS_RULE = "tool_calls must be a list of calls, or JSON of one"


def read_turn(raw_message: Any) -> tuple[Message, bool]:
    """Read a message of a conversation.

    Args:
        raw_message: A message in the format of OpenAI, TRL, axolotl, LLaMA-Factory or ShareGPT.

    Returns:
        (the message as chat templates read it: role, content, tool_calls, ...; whether the model
        learns to write it: if it is the assistant's, unless its `weight` is 0 or `train` false)

    Raises:
        DataError: If the message has an unknown key, no role, no content, or content that is not
            text.

    >>> read_turn({"from": "gpt", "value": "hi", "weight": 0})
    ({'role': 'assistant', 'content': 'hi'}, False)
    """
    if not isinstance(raw_message, dict):
        raise DataError(MESSAGE_RULE)
    message = _rename_keys(raw_message)
    role = message.pop("role", "").lower()  # templates compare names exactly
    if role in CALL_ROLES:
        message["tool_calls"] = message.pop("content", None)
        role = "assistant"
    calls = read_calls(message.pop("tool_calls", None))
    if not role or not (calls or "content" in message):
        raise DataError(MESSAGE_RULE)
    loss_flags = {key: message.pop(key) for key in LOSS_KEYS if key in message}
    message = {"role": ROLES.get(role, role), **message}
    if "content" in message:
        message["content"] = _read_content(message["content"])
    if calls:
        message["tool_calls"] = calls
    # Templates read thoughts under one of two names.
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message, _is_target(loss_flags, message["role"])


def _rename_keys(raw_message: dict[str, Any]) -> Message:
    """Rename the keys of a message of a dataset to those that chat templates read, and check them;
    keys whose value is None are left out.
    """
    message: Message = {}
    for key, value in raw_message.items():
        if value is None:
            continue
        if key not in KEYS:
            raise DataError(
                f"a message has the unknown key {key!r}, which may change what is to be learnt: "
                f"remove it, or use one of {', '.join(KEYS)}"
            )
        name = KEYS[key]
        if name in STRING_KEYS and not isinstance(value, str):
            raise DataError(f"the {key} of a message must be a string, got {value!r:.80}")
        if message.setdefault(name, value) != value:
            same = " and ".join(other for other in raw_message if KEYS.get(other) == name)
            raise DataError(f"a message has different {same}: keep one of them")
    return message


def _read_content(content: Any) -> str:
    """Return the content of a message as one string: itself, or the concatenated texts of a list of
    parts of type text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(MESSAGE_RULE)
    for part in content:
        keys = set(without_none(part)) if isinstance(part, dict) else set()
        is_text = keys == {"type", "text"} and part["type"] == "text"
        if not is_text or not isinstance(part["text"], str):
            raise DataError(
                f"parts of a content must be of type text, and only have a text, got {part!r:.80}"
            )
    return "".join(part["text"] for part in content)


def _is_target(loss_flags: dict[str, Any], role: str) -> bool:
    """Return whether the model learns to write a message: if the role is assistant, unless its
    `weight` is 0 or `train` false.
    """
    for key, flag in loss_flags.items():
        if not isinstance(flag, int | float) or flag not in (0, 1):
            raise DataError(
                f"the {key} of a message must be 0 or 1 (false or true), got {flag!r:.80}; rows "
                "are weighted by --weight_column"
            )
    if role == "assistant":
        return all(loss_flags.values())
    if any(loss_flags.values()):
        raise DataError(
            f"{next(iter(loss_flags))} asks to learn a message of the {role}, but only turns of "
            "the assistant can be learnt: remove it"
        )
    return False


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
