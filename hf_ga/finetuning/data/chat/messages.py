"""Messages as OpenAI, TRL, axolotl and LLaMA-Factory write them -> messages as chat templates read
them.

`datasets` fills keys that a row lacks with None, so None means absent everywhere.
"""

from dataclasses import dataclass
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.calls import CALLS, read_calls
from hf_ga.finetuning.data.chat.template import Message
from hf_ga.finetuning.data.chat.values import from_json, without_none

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
SHAREGPT_KEYS = {"from": "role", "value": "content"}
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
STRINGS = ("role", "from", *REASONING, "tool_call_id", "name")
CONVERSATION = "a conversation must be a list of messages, or JSON of one"
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
    messages = from_json(value, CONVERSATION)
    if not isinstance(messages, list):
        raise DataError(f"{CONVERSATION}, got {messages!r:.80}")
    return [_read_turn(message) for message in messages]


def _read_turn(value: Any) -> Turn:
    if not isinstance(value, dict):
        raise DataError(NEEDS)
    given = {key: part for key, part in value.items() if part is not None}
    _check_keys(given)
    given = _from_sharegpt(given)
    if not given.get("role"):
        raise DataError(NEEDS)
    role = given["role"].lower()  # templates compare names exactly
    role = ROLES.get(role, role)
    calls = read_calls(given)
    if not calls and "content" not in given:
        raise DataError(NEEDS)
    message: Message = {"role": role}
    if "content" in given:
        message["content"] = _text(given["content"])
    if calls:
        message["tool_calls"] = calls
    message |= {key: given[key] for key in ("tool_call_id", "name") if key in given}
    return Turn(message | _thoughts(given), _is_target(given, role))


def _check_keys(given: dict[str, Any]) -> None:
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise DataError(
            f"a message has the unknown key {unknown[0]!r}, which may change what is to be learnt: "
            f"remove it, or use one of {', '.join(KEYS)}"
        )
    for key in STRINGS:
        if not isinstance(given.get(key, ""), str):
            raise DataError(f"the {key} of a message must be a string, got {given[key]!r:.80}")


def _from_sharegpt(given: dict[str, Any]) -> dict[str, Any]:
    """ShareGPT's `from`, `value` and roles -> role and content."""
    if ("role" in given and "from" in given) or ("content" in given and "value" in given):
        raise DataError("a message has both role and from, or both content and value: keep one")
    renamed = {SHAREGPT_KEYS.get(key, key): part for key, part in given.items()}
    if "from" not in given:
        return renamed
    role = renamed["role"]
    if role not in SHAREGPT_CALLS:
        return {**renamed, "role": SHAREGPT_ROLES.get(role, role)}
    calls = from_json(renamed.pop("content", None), CALLS)
    calls = calls if isinstance(calls, list) else [calls]
    return {**renamed, "role": "assistant", "tool_calls": calls}


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


def _thoughts(given: dict[str, Any]) -> Message:
    """Thoughts under both names that templates read; newer versions of transformers do the same."""
    thoughts = [given[key] for key in REASONING if key in given]
    if len(set(thoughts)) > 1:
        raise DataError(f"a message has different {' and '.join(REASONING)}: keep one of them")
    return dict.fromkeys(("reasoning_content", "thinking"), thoughts[0]) if thoughts else {}


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
