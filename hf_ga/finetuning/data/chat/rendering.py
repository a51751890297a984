"""Rows of conversations -> the texts that the model reads, and which characters are targets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
        notes: What the template omits, for the log. Each note is the end of a sentence that begins
            with a number of rows, such as "have names in their messages, which ...".
    """

    text: str
    targets: list[Span]
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
            the template omits a part of it, or renders turns that cannot be located; if turns of
            the assistant have no end.
    """
    columns = chat_columns(rows)
    # Those with a role, such as `eos_token`, and those that were only added as special.
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special_tokens = (*added, *tokenizer.all_special_tokens)
    for values in zip(*(rows[column] for column in columns), strict=True):
        row = dict(zip(columns, values, strict=True))
        try:
            conversation = read_conversation(row)
            if tokenizer.chat_template:
                rendered = _render_with_template(conversation, tokenizer)
            else:
                rendered = _concatenate_turns(conversation)
        except (TemplateError, DataError, TypeError, ValueError) as error:
            cause = " ".join(str(error).split()).rstrip(".")
            raise DataError(f"{cause}. Fix or remove the row {row!r:.200}") from error
        if tokenizer.chat_template:
            _check_ending(rendered, special_tokens)
        yield rendered


def _concatenate_turns(conversation: Conversation) -> RenderedRow:
    """Render a conversation without a chat template: concatenate the contents of its turns with its
    separator; a paragraph follows a system turn.
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
    for index, message in enumerate(conversation.messages):
        text += separator
        start = len(text)
        text += message["content"]
        if index in conversation.targets:
            targets.append((start, len(text)))
        separator = PARAGRAPH if message["role"] == "system" else conversation.separator
    return RenderedRow(text, targets)


def _render_with_template(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> RenderedRow:
    """Render a conversation with the tokenizer's chat template, locate the turns that are targets,
    and check that the template omits nothing that the model should learn.
    """
    if not conversation.messages:
        return RenderedRow("", [])
    if 0 in conversation.targets:
        raise DataError("the first turn is the assistant's: begin with a user or system turn")
    template = ChatTemplate(tokenizer, conversation.tools, conversation.template_options)
    messages = adapt_calls(conversation.messages, template)
    conversation = replace(conversation, messages=messages)
    text = template.render(messages)
    check_rendered(conversation, template, text)
    spans_of_targets = locate_targets(conversation, template, text)
    notes = check_targets(messages, template, text, spans_of_targets)
    targets = sorted(span for spans in spans_of_targets.values() for span in spans)
    return RenderedRow(text, targets, notes)


def _check_ending(row: RenderedRow, special_tokens: tuple[str, ...]) -> None:
    """Check that at least one target of a conversation ends with a special token, that of the end
    of text or of a turn: generation stops only at such a token. White space may follow it.

    Raises:
        DataError: If there are targets, but none of them ends with a special token.
    """
    targets = [row.text[start:end] for start, end in row.targets]
    if targets and not any(target.rstrip().endswith(special_tokens) for target in targets):
        raise DataError(
            "the tokenizer's chat template ends turns of the assistant without an end token, so "
            f"the model would never learn to stop; the last target is {targets[-1]!r:.80}. "
            "In the template, end these turns with {{ eos_token }}, or with another special token "
            "at which generation stops, inside {% generation %} if it is marked."
        )
