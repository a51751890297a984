"""Messages as OpenAI, TRL, axolotl and LLaMA-Factory write them -> messages as chat templates read
them.

`datasets` fills keys that a row lacks with None, so None means absent everywhere.
"""

from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.calls import read_calls
from hf_ga.finetuning.data.chat.template import Message
from hf_ga.finetuning.data.chat.values import without_none

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
