"""Rows of every format -> conversations."""

from dataclasses import dataclass, field, replace
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.messages import Turn, read_turns
from hf_ga.finetuning.data.chat.template import Message
from hf_ga.finetuning.data.chat.values import parse_json, without_none

PARAGRAPH = "\n\n"  # between the texts of an instruction
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
    turns, separator = _read_turns_of_row(row)
    if row.get("system") not in (None, ""):
        if turns and turns[0].message["role"] == "system":
            raise DataError("the row has a column system and a system turn: keep one")
        turns = [_make_turn("system", row["system"]), *turns]
    options = parse_json(row.get("chat_template_kwargs"), dict, OPTIONS_RULE)
    return Conversation(
        messages=[turn.message for turn in turns],
        targets=[i for i, turn in enumerate(turns) if turn.is_target],
        tools=_read_tools(row),
        template_options=without_none(options),
        separator=separator,
    )


def _read_turns_of_row(row: dict[str, Any]) -> tuple[list[Turn], str | None]:
    """Read the turns of a conversation from the columns of its format: `messages`, `conversations`,
    `instruction` and `output`, or `prompt` and `completion`.
    """
    for name in ("messages", "conversations"):
        if name in row:
            return read_turns(row[name]), None
    if "instruction" in row:
        return _read_instruction(row), PARAGRAPH
    if isinstance(row["prompt"], list):
        prompt = [replace(turn, is_target=False) for turn in read_turns(row["prompt"])]
        return [*prompt, *read_turns(row["completion"])], None
    return [_make_turn("user", row["prompt"]), _make_turn("assistant", row["completion"])], ""


def _read_instruction(row: dict[str, Any]) -> list[Turn]:
    """Read the turns of a row of Alpaca's format: `instruction`, optional `input`, `output`, and
    before them the pairs of instruction and answer in `history`, whose answers are targets, too.
    """
    turns = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(
                f"history must be a list of pairs of instruction and answer, got {pair!r:.80}"
            )
        turns += [_make_turn("user", pair[0]), _make_turn("assistant", pair[1])]
    instruction = _make_turn("user", row["instruction"])
    if row.get("input") not in (None, ""):
        input_text = _make_turn("user", row["input"]).message["content"]
        instruction.message["content"] += PARAGRAPH + input_text
    return [*turns, instruction, _make_turn("assistant", row["output"])]


def _make_turn(role: str, text: Any) -> Turn:
    """Make a turn of a conversation from its text; a turn of the assistant is a target."""
    if not isinstance(text, str):
        raise DataError("prompts, completions, instructions and outputs must be strings")
    return Turn({"role": role, "content": text}, is_target=role == "assistant")


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
