"""Rows of every form -> conversations."""

from dataclasses import dataclass, field, replace
from typing import Any

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.messages import Turn, read_turns
from hf_ga.finetuning.data.chat.template import Message
from hf_ga.finetuning.data.chat.values import from_json, without_none

PARAGRAPH = "\n\n"  # between the texts of an instruction
OPTIONS = "chat_template_kwargs must be a mapping, or JSON of one"
TOOLS = "tools must be a list of JSON schemas, or JSON of one"


@dataclass(frozen=True)
class Conversation:
    """A row.

    Attributes:
        turns: Messages, and which of them are targets.
        tools: JSON schemas of functions. None: the row has none.
        options: Variables for the chat template, such as `enable_thinking`.
        separator: Without a chat template, what stands between the contents of the turns after the
            system's, which ends with a paragraph. None: the row needs a template.
    """

    turns: list[Turn]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    separator: str | None = None

    @property
    def messages(self) -> list[Message]:
        """The turns as `apply_chat_template` takes them."""
        return [turn.message for turn in self.turns]

    def with_messages(self, messages: list[Message]) -> "Conversation":
        """The same conversation with its messages in another form."""
        turns = zip(self.turns, messages, strict=True)
        return replace(self, turns=[replace(turn, message=message) for turn, message in turns])


def read_conversation(row: dict[str, Any]) -> Conversation:
    """Read a row, whose columns are those of `chat_columns`.

    Raises:
        DataError: Something in it has another type or form than it should, or an unknown key.

    >>> row = {"instruction": "Add", "input": "1 2", "output": "3"}
    >>> [turn.message["content"] for turn in read_conversation(row).turns]
    ['Add\\n\\n1 2', '3']
    """
    turns, separator = _turns(row)
    if row.get("system") not in (None, ""):
        if turns and turns[0].message["role"] == "system":
            raise DataError("the row has a column system and a system turn: keep one")
        turns = [_said("system", row["system"]), *turns]
    options = from_json(row.get("chat_template_kwargs") or {}, OPTIONS) or {}
    if not isinstance(options, dict):
        raise DataError(f"{OPTIONS}, got {options!r:.80}")
    return Conversation(turns, _tools(row), without_none(options), separator)


def _turns(row: dict[str, Any]) -> tuple[list[Turn], str | None]:
    """Turns, and their separator; see `Conversation`."""
    for name in ("messages", "conversations"):
        if name in row:
            return read_turns(row[name]), None
    if "instruction" in row:
        return _instruction(row), PARAGRAPH
    if isinstance(row["prompt"], list):
        asked = [replace(turn, is_target=False) for turn in read_turns(row["prompt"])]
        return [*asked, *read_turns(row["completion"])], None
    return [_said("user", row["prompt"]), _said("assistant", row["completion"])], ""


def _instruction(row: dict[str, Any]) -> list[Turn]:
    """Alpaca: earlier pairs of instruction and answer, which are learnt too, then the last."""
    turns = []
    for pair in row.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(
                f"history must be a list of pairs of instruction and answer, got {pair!r:.80}"
            )
        turns += [_said("user", pair[0]), _said("assistant", pair[1])]
    instruction = _said("user", row["instruction"])
    if row.get("input") not in (None, ""):
        more = _said("user", row["input"]).message["content"]
        instruction = _said("user", instruction.message["content"] + PARAGRAPH + more)
    return [*turns, instruction, _said("assistant", row["output"])]


def _said(role: str, text: Any) -> Turn:
    if not isinstance(text, str):
        raise DataError("prompts, completions, instructions and outputs must be strings")
    return Turn({"role": role, "content": text}, is_target=role == "assistant")


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Schemas of functions of the columns tools and functions, OpenAI's older name."""
    tools = []
    for name in ("tools", "functions"):
        of_column = from_json(row.get(name) or [], TOOLS) or []
        if not isinstance(of_column, list):
            raise DataError(f"{TOOLS}, got {of_column!r:.80}")
        tools += [_tool(without_none(from_json(tool, TOOLS))) for tool in of_column]
    return tools or None


def _tool(tool: Any) -> dict[str, Any]:
    """A schema as templates expect it: inside `function`, and with the parameters as a dict."""
    if not isinstance(tool, dict):
        raise DataError(f"{TOOLS}, got {tool!r:.80}")
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{TOOLS}, each with the name of its function, got {tool!r:.80}")
    if "parameters" in function:
        parameters = from_json(function["parameters"], TOOLS)
        tool = {**tool, "function": {**function, "parameters": parameters}}
    return tool
