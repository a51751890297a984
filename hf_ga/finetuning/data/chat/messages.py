"""Messages as OpenAI, TRL, axolotl and LLaMA-Factory write them -> messages as chat templates read
them.

`datasets` fills keys that a row lacks with None, so None means absent everywhere.
"""

from dataclasses import dataclass
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.calls import CALLS_RULE, read_calls
from hf_ga.finetuning.data.chat.template import Message
from hf_ga.finetuning.data.chat.values import parse_json, without_none

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
}
# Keys and roles of ShareGPT's format -> those that chat templates read.
SHAREGPT_KEYS = {"from": "role", "value": "content"}
SHAREGPT_ROLES = {**ROLES, "observation": "tool", "function_response": "tool"}
SHAREGPT_CALLS = ("function_call", "tool_call")  # roles of messages that consist of calls
# Names that datasets use for the thoughts of a message.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
LOSS_KEYS = ("weight", "train")  # 0 or false: the turn is not a target
# All keys that a message may have.
KEYS = (
    "role",
    "content",
    "from",
    "value",
    *REASONING_KEYS,
    "tool_calls",
    "function_call",
    "tool_call_id",
    "name",
    *LOSS_KEYS,
)
# Those whose values must be strings.
STRING_KEYS = ("role", "from", *REASONING_KEYS, "tool_call_id", "name")
CONVERSATION_RULE = "a conversation must be a list of messages, or JSON of one"
MESSAGE_RULE = "every message needs the strings role and content"


@dataclass(frozen=True)
class Turn:
    """One message of a conversation in a chat dataset.

    Attributes:
        message: The message as chat templates read it: role, content, tool_calls, ...
        is_target: Whether the model learns to write it.
    """

    message: Message
    is_target: bool


def read_turns(value: Any) -> list[Turn]:
    """Read the messages of a conversation.

    Args:
        value: A list of messages in the format of OpenAI, TRL, axolotl, LLaMA-Factory or ShareGPT,
            or such a list as JSON.

    Returns:
        Its turns. Those of the assistant are targets, unless their `weight` is 0 or `train` false.

    Raises:
        DataError: If a message has an unknown key, no role, no content, or content that is not
            text.

    >>> read_turns([{"from": "gpt", "value": "hi", "weight": 0}])
    [Turn(message={'role': 'assistant', 'content': 'hi'}, is_target=False)]
    """
    messages = parse_json(value, CONVERSATION_RULE)
    if not isinstance(messages, list):
        raise DataError(f"{CONVERSATION_RULE}, got {messages!r:.80}")
    return [_read_turn(message) for message in messages]


def _read_turn(raw_message: Any) -> Turn:
    """Convert a message of a dataset to the format of chat templates, and find out whether it is a
    target.
    """
    if not isinstance(raw_message, dict):
        raise DataError(MESSAGE_RULE)
    raw_message = {key: value for key, value in raw_message.items() if value is not None}
    _check_keys(raw_message)
    raw_message = _convert_sharegpt(raw_message)
    if not raw_message.get("role"):
        raise DataError(MESSAGE_RULE)
    role = raw_message["role"].lower()  # templates compare names exactly
    role = ROLES.get(role, role)
    calls = read_calls(raw_message)
    if not calls and "content" not in raw_message:
        raise DataError(MESSAGE_RULE)
    message: Message = {"role": role}
    if "content" in raw_message:
        message["content"] = _read_content(raw_message["content"])
    if calls:
        message["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if key in raw_message:
            message[key] = raw_message[key]
    # Templates read thoughts under one of two names.
    thoughts = {raw_message[key] for key in REASONING_KEYS if key in raw_message}
    if len(thoughts) > 1:
        raise DataError(f"a message has different {' and '.join(REASONING_KEYS)}: keep one of them")
    for text in thoughts:
        message |= {"reasoning_content": text, "thinking": text}
    return Turn(message, _is_target(raw_message, role))


def _check_keys(raw_message: dict[str, Any]) -> None:
    """Check that a message of a dataset has known keys only, and strings where they are needed."""
    unknown = [key for key in raw_message if key not in KEYS]
    if unknown:
        raise DataError(
            f"a message has the unknown key {unknown[0]!r}, which may change what is to be learnt: "
            f"remove it, or use one of {', '.join(KEYS)}"
        )
    for key in STRING_KEYS:
        if not isinstance(raw_message.get(key, ""), str):
            raise DataError(
                f"the {key} of a message must be a string, got {raw_message[key]!r:.80}"
            )


def _convert_sharegpt(raw_message: dict[str, Any]) -> dict[str, Any]:
    """Rename the keys `from` and `value` of a message in ShareGPT's format to `role` and `content`,
    and its roles to those of chat templates.
    """
    has_both_roles = "role" in raw_message and "from" in raw_message
    has_both_contents = "content" in raw_message and "value" in raw_message
    if has_both_roles or has_both_contents:
        raise DataError("a message has both role and from, or both content and value: keep one")
    renamed = {SHAREGPT_KEYS.get(key, key): value for key, value in raw_message.items()}
    if "from" not in raw_message:
        return renamed
    role = renamed["role"]
    if role not in SHAREGPT_CALLS:
        return {**renamed, "role": SHAREGPT_ROLES.get(role, role)}
    calls = parse_json(renamed.pop("content", None), CALLS_RULE)
    calls = calls if isinstance(calls, list) else [calls]
    return {**renamed, "role": "assistant", "tool_calls": calls}


def _read_content(content: Any) -> str:
    """Return the content of a message as one string: itself, or the concatenated texts of a list of
    parts of type text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(MESSAGE_RULE)
    for part in content:
        part_type = part.get("type") if isinstance(part, dict) else None
        if part_type != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"parts of a content must be of type text, got {part!r:.80}")
        unknown = [key for key in without_none(part) if key not in ("type", "text")]
        if unknown:
            raise DataError(f"a part of type text has the unknown key {unknown[0]!r}: remove it")
    return "".join(part["text"] for part in content)


def _is_target(raw_message: dict[str, Any], role: str) -> bool:
    """Return whether the model learns to write a message: if the role is assistant, unless the
    message has `weight` 0 or `train` false.
    """
    loss_flags = {key: raw_message[key] for key in LOSS_KEYS if key in raw_message}
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
