"""Conversations and prompts with completions -> text with the spans of characters that are
completions.

Three formats of columns; the first that the dataset has is used:

    messages                      [{"role": "user", "content": ...}, {"role": "assistant",
    "content": ...}, ...] prompt, completion            two strings, or two lists of messages
    instruction, (input), output  three strings
"""

from collections.abc import Collection, Iterator
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError

Message = dict[str, str]
Rendered = tuple[
    str, list[tuple[int, int]], bool
]  # text, completions as [start, end), whether rendered by a template

KINDS = (("messages",), ("prompt", "completion"), ("instruction", "output"))


def chat_columns(columns: Collection[str]) -> list[str]:
    """The conversation columns of a dataset; empty if it has none."""
    for needed in KINDS:
        if set(needed) <= set(columns):
            return (
                [*needed, "input"]
                if "instruction" in needed and "input" in columns
                else list(needed)
            )
    return []


def rendered(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> Iterator[Rendered]:
    """Each row as the text that the model sees, with the spans of characters that are targets.

    With a chat template, the template renders the text and all assistant turns are targets. Without
    one, prompt and completion are concatenated unchanged.

    Raises:
        DataError: a malformed row, a conversation without a template, or a template that cannot be
            cut into turns.
    """
    names = chat_columns(rows)
    for values in zip(*(rows[name] for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        try:
            prompt, completion = _parts(row)
            if tokenizer.chat_template:
                yield _with_template(prompt, completion, tokenizer)
            else:
                yield _plain(prompt, completion, between="" if "prompt" in row else "\n\n")
        except (TemplateError, DataError, TypeError, ValueError) as error:
            raise DataError(
                f"{' '.join(str(error).split()).rstrip('.')}. Fix or remove the row {row!r:.200}"
            ) from error


def _plain(prompt: Any, completion: Any, between: str) -> Rendered:
    """Render strings without a template."""
    if not isinstance(prompt, str):
        raise DataError(
            "the tokenizer has no chat template for conversations: use a tokenizer with one, or "
            "columns of strings"
        )
    prompt += between
    return prompt + completion, [(len(prompt), len(prompt + completion))], False


def _parts(row: dict[str, Any]) -> tuple[Any, Any]:
    """Prompt and completion: two strings, or two lists of messages."""
    if "messages" in row:
        return [], _messages(row["messages"])
    if "prompt" in row:
        check = _messages if isinstance(row["prompt"], list) else _text
        return check(row["prompt"]), check(row["completion"])
    more = "" if row.get("input") in (None, "") else f"\n\n{_text(row['input'])}"
    return _text(row["instruction"]) + more, _text(row["output"])


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise DataError("a conversation must be a list of messages")
    for message in value:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or not message.get("role")
        ):
            raise DataError("every message needs the strings role and content")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError("prompts, completions, instructions and outputs must be strings")
    return value


def _with_template(prompt: Any, completion: Any, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    if isinstance(prompt, str):
        prompt, completion = (
            [{"role": "user", "content": prompt}],
            [{"role": "assistant", "content": completion}],
        )
    messages, first = prompt + completion, len(prompt)  # the first that may be a target
    if not messages:
        return "", [], True
    if first == 0 and messages[0]["role"] == "assistant":
        raise DataError("the first turn is the assistant's: begin with a user or system turn")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if index < first or message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:index], tokenize=False, add_generation_prompt=True
        )
        until = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
        if not (until.startswith(before) and text.startswith(until)):
            raise DataError(
                "the tokenizer's chat template renders a turn differently if others follow it, so "
                "completions cannot be located: "
                "keep only one assistant turn per row, the last"
            )
        spans.append((len(before), len(until)))
    return text, spans, True
