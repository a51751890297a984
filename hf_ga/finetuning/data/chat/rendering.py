"""Rows of conversations -> the texts that the model reads, and which characters are targets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.calls import adapt_calls
from hf_ga.finetuning.data.chat.columns import chat_columns
from hf_ga.finetuning.data.chat.conversation import PARAGRAPH, Conversation, read_conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Span
from hf_ga.finetuning.data.chat.turns import locate_targets
from hf_ga.finetuning.data.chat.usage import check_rendered, check_targets


@dataclass(frozen=True)
class RenderedRow:
    """A conversation, or a prompt with its completion, as the text that the model reads.

    Attributes:
        text: The text.
        targets: The characters [start, end) that the model learns to write, in order.
        is_templated: Whether a chat template rendered the text, and so wrote all special tokens.
        notes: What the template omits, for the log. Each note is the end of a sentence that begins
            with a number of rows, such as "have names in their messages, which ...".
    """

    text: str
    targets: list[Span]
    is_templated: bool
    notes: tuple[str, ...] = ()


def render_rows(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> Iterator[RenderedRow]:
    """Render each conversation of a batch of rows as text.

    A chat template renders the text if the tokenizer has one, otherwise prompt and completion are
    concatenated unchanged. All turns of the assistant are targets, except those that the row
    excludes (`weight` 0).

    Args:
        rows: A batch of rows by column, with the columns of `chat_columns`.
        tokenizer: The tokenizer of the model.

    Raises:
        DataError: If a row is malformed, it needs a chat template and the tokenizer has none, or
            the template omits a part of it, or renders turns that cannot be located.
    """
    columns = chat_columns(rows)
    for values in zip(*(rows[column] for column in columns), strict=True):
        row = dict(zip(columns, values, strict=True))
        with _errors_show_row(row):
            conversation = read_conversation(row)
            if tokenizer.chat_template:
                rendered = _render_with_template(conversation, tokenizer)
            else:
                rendered = _concatenate_turns(conversation)
        yield rendered


@contextmanager
def _errors_show_row(row: dict[str, Any]) -> Iterator[None]:
    """Turn errors of a row of conversations, or of the chat template that renders it, into a
    one-line DataError that shows the row.
    """
    try:
        yield
    except (TemplateError, DataError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{cause}. Fix or remove the row {row!r:.200}") from error


def _concatenate_turns(conversation: Conversation) -> RenderedRow:
    """Render a conversation without a chat template: concatenate the contents of its turns with its
    separator; a paragraph follows a system turn.

    Raises:
        DataError: If the conversation needs a chat template.
    """
    needs_template = conversation.separator is None
    if needs_template or conversation.tools or conversation.template_options:
        raise DataError(
            "the tokenizer has no chat template for conversations: use a tokenizer with one, or "
            "columns of strings"
        )
    text = ""
    separator = ""
    targets = []
    for turn in conversation.turns:
        text += separator
        start = len(text)
        text += turn.message["content"]
        if turn.is_target:
            targets.append((start, len(text)))
        is_system = turn.message["role"] == "system"
        separator = PARAGRAPH if is_system else conversation.separator
    return RenderedRow(text, targets, is_templated=False)


def _render_with_template(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> RenderedRow:
    """Render a conversation with the tokenizer's chat template, locate the turns that are targets,
    and check that the template omits nothing that the model should learn.

    A conversation without turns is an empty text.

    Raises:
        DataError: If the first turn is a target, the template omits something, or a turn cannot be
            located.
    """
    if not conversation.turns:
        return RenderedRow("", [], is_templated=True)
    if conversation.turns[0].is_target:
        raise DataError("the first turn is the assistant's: begin with a user or system turn")
    template = ChatTemplate(tokenizer, conversation.tools, conversation.template_options)
    messages = adapt_calls(conversation.messages, template)
    conversation = conversation.with_messages(messages)
    text = template.render(messages)
    check_rendered(conversation, template, text)
    spans_of_targets = locate_targets(conversation, template, text)
    notes = check_targets(messages, template, text, spans_of_targets)
    targets = sorted(span for spans in spans_of_targets.values() for span in spans)
    return RenderedRow(text, targets, is_templated=True, notes=notes)
