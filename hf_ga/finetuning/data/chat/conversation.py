"""Rows of every format -> conversations."""

from dataclasses import dataclass, field
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.messages import parse_json, read_turn, without_none
from hf_ga.finetuning.data.chat.template import Message

PARAGRAPH = "\n\n"  # between the texts of an instruction
CONVERSATION_RULE = "a conversation must be a list of messages, or JSON of one"
OPTIONS_RULE = "chat_template_kwargs must be a mapping, or JSON of one"
TOOLS_RULE = "tools must be a list of JSON schemas, or JSON of one"


@dataclass(frozen=True)
class Conversation:
    """A row of a dataset of conversations, or of prompts with completions.

    Attributes:
        messages: The messages of all turns, in the format of `apply_chat_template`.
        targets: Indices of the messages that the model learns to write.
        tools: JSON schemas of functions that the model may call. None: the row has none.
        template_options: Variables for the chat template, such as `enable_thinking`.
        separator: The text between the contents of turns if the tokenizer has no chat template. (A
            system turn always ends with a paragraph.) None: the row needs a chat template.
    """

    messages: list[Message]
    targets: list[int]
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    separator: str | None = None


def read_conversation(row: dict[str, Any]) -> Conversation:
    """Read a conversation from a row of any supported format.

    Args:
        row: The values of the columns of `chat_columns`.

    Raises:
        DataError: If a value has a wrong type or format, or a message has an unknown key.

    >>> row = {"instruction": "Add", "input": "1 2", "output": "3"}
    >>> [message["content"] for message in read_conversation(row).messages]
    ['Add\\n\\n1 2', '3']
    """
    raw_messages, separator = _messages_of_row(row)
    if row.get("system") not in (None, ""):
        raw_messages = [{"role": "system", "content": row["system"]}, *raw_messages]
    turns = [read_turn(message) for message in raw_messages]
    messages = [message for message, _ in turns]
    if [message["role"] for message in messages[:2]] == ["system", "system"]:
        raise DataError("the row has a column system and a system turn: keep one")
    options = parse_json(row.get("chat_template_kwargs"), dict, OPTIONS_RULE)
    return Conversation(
        messages=messages,
        targets=[i for i, (_, is_target) in enumerate(turns) if is_target],
        tools=_read_tools(row),
        template_options=without_none(options),
        separator=separator,
    )


def _messages_of_row(row: dict[str, Any]) -> tuple[list[Any], str | None]:
    """Return the messages of a row of any format, to be read by `read_turn`, and their separator:
    those of `messages` or `conversations`, `instruction` and `output`, or `prompt` and
    `completion`.
    """
    for name in ("messages", "conversations"):
        if name in row:
            return parse_json(row[name], list, CONVERSATION_RULE), None
    if "instruction" in row:  # answers of the history are targets, too
        texts = [row["instruction"]]
        if row.get("input") not in (None, ""):
            texts.append(row["input"])
        are_texts = all(isinstance(text, str) for text in texts)
        instruction = PARAGRAPH.join(texts) if are_texts else None
        pairs = [*(row.get("history") or []), [instruction, row["output"]]]
        return [message for pair in pairs for message in _messages_of_pair(pair)], PARAGRAPH
    if isinstance(row["prompt"], list):
        prompt = [{**message, "weight": 0} for message in row["prompt"]]
        return [*prompt, *parse_json(row["completion"], list, CONVERSATION_RULE)], None
    return _messages_of_pair([row["prompt"], row["completion"]]), ""


def _messages_of_pair(pair: Any) -> list[Message]:
    """Return the messages of a pair of instruction and answer."""
    if not isinstance(pair, list) or len(pair) != 2:
        raise DataError(
            f"history must be a list of pairs of instruction and answer, got {pair!r:.80}"
        )
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]


def _read_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Read the JSON schemas of the functions that the model may call, from the columns `tools` and
    `functions`, OpenAI's older name.
    """
    tools = []
    for name in ("tools", "functions"):
        for schema in parse_json(row.get(name), list, TOOLS_RULE):
            tools.append(_read_tool(without_none(parse_json(schema, dict, TOOLS_RULE))))
    return tools or None


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert the JSON schema of a function to the format that chat templates expect: {"type":
    "function", "function": {"name": ..., "parameters": {...}}}.
    """
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{TOOLS_RULE}, each with the name of its function, got {tool!r:.80}")
    if "parameters" in function:
        parameters = parse_json(function["parameters"], dict, TOOLS_RULE)
        tool = {**tool, "function": {**function, "parameters": parameters}}
    return tool
