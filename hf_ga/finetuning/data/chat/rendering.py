"""Rows -> the texts that the model reads, and which characters of them are targets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.calls import fit_calls
from hf_ga.finetuning.data.chat.columns import chat_columns
from hf_ga.finetuning.data.chat.conversation import PARAGRAPH, Conversation, read_conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Span
from hf_ga.finetuning.data.chat.turns import locate_targets
from hf_ga.finetuning.data.chat.usage import check_rendered, check_targets


@dataclass(frozen=True)
class Rendered:
    """One row.

    Attributes:
        text: What the model reads.
        targets: The characters that it learns to write, in order.
        is_templated: Whether a chat template rendered it, which adds all special tokens itself.
        notes: What the template left out, as the rests of sentences on the row.
    """

    text: str
    targets: list[Span]
    is_templated: bool
    notes: tuple[str, ...] = ()


def rendered(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> Iterator[Rendered]:
    """Render conversations.

    With a chat template, the template renders the text, and all turns of the assistant are targets
    that the row does not leave out. Without one, prompt and completion are concatenated unchanged.

    Args:
        rows: Conversation columns (see `chat_columns`) -> values.
        tokenizer: With or without a chat template.

    Raises:
        DataError: A malformed row, a conversation without a template, or a template that leaves out
            a part of it or cannot be cut into turns.
    """
    names = chat_columns(rows)
    for values in zip(*(rows[name] for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        with _naming(row):
            conversation = read_conversation(row)
            render = _with_template if tokenizer.chat_template else _plain
            one = render(conversation, tokenizer)
        yield one


@contextmanager
def _naming(row: dict[str, Any]) -> Iterator[None]:
    """Turn errors of a row or of its template into a one-line DataError that shows the row."""
    try:
        yield
    except (TemplateError, DataError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{cause}. Fix or remove the row {row!r:.200}") from error


def _plain(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Concatenate the contents of the turns."""
    if conversation.separator is None or conversation.tools or conversation.options:
        raise DataError(
            "the tokenizer has no chat template for conversations: use a tokenizer with one, or "
            "columns of strings"
        )
    text = ""
    between = ""
    targets = []
    for turn in conversation.turns:
        text += between
        start = len(text)
        text += turn.message["content"]
        if turn.is_target:
            targets.append((start, len(text)))
        is_system = turn.message["role"] == "system"
        between = PARAGRAPH if is_system else conversation.separator
    return Rendered(text, targets, is_templated=False)


def _with_template(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    if not conversation.turns:
        return Rendered("", [], is_templated=True)
    if conversation.turns[0].is_target:
        raise DataError("the first turn is the assistant's: begin with a user or system turn")
    template = ChatTemplate(tokenizer, conversation.tools, conversation.options)
    conversation = conversation.with_messages(fit_calls(conversation.messages, template))
    text = template.render(conversation.messages)
    check_rendered(conversation, template, text)
    located = locate_targets(conversation, template, text)
    notes = check_targets(conversation.messages, template, text, located)
    targets = sorted(span for spans in located.values() for span in spans)
    return Rendered(text, targets, is_templated=True, notes=notes)
