"""Rows of conversations -> the texts that the model reads, and which characters are targets."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import commonprefix

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.columns import chat_columns
from hf_ga.finetuning.data.chat.conversation import PARAGRAPH, Conversation, read_conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message, Span, adapt_calls

# Content that replaces that of a turn, to find the turn in the rendered text.
MARKER = "hfgaturnmark"
# Index of a message -> the characters of the rendered conversation that are this turn.
SpansByTurn = dict[int, list[Span]]
# Notes for the log, each the end of a sentence that begins with a number of rows.
NO_THOUGHTS = "have thoughts in earlier turns, which the chat template leaves out"
NO_NAMES = "have names in their messages, which the chat template leaves out"
OTHER_BEGINNING = (
    "have a last turn that the chat template begins without its whole generation prompt"
)
END_OF_THOUGHTS = re.compile(r"</think>|</thinking>|</thought>|</reasoning>|\[/THINK\]")
REMEDY = "use a tokenizer whose template does, or remove it from the rows"


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


def locate_targets(conversation: Conversation, template: ChatTemplate, text: str) -> SpansByTurn:
    """Find the characters of the turns that are targets in a rendered conversation, each with the
    end token that follows its content.

    Args:
        conversation: The conversation; its first turn is not a target.
        template: The chat template.
        text: `template.render(conversation.messages)`.

    Raises:
        DataError: If the template renders a turn in a way that cannot be located.
    """
    messages = conversation.messages
    targets = conversation.targets
    if not template.marks_generations:
        return {i: [_locate_turn(i, messages, template, text)] for i in targets}
    spans = template.generations(messages)
    assistant_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) == len(assistant_turns):
        span_of_turn = dict(zip(assistant_turns, spans, strict=True))
        return {i: [span_of_turn[i]] for i in targets}
    if targets == assistant_turns and len(spans) > len(assistant_turns):
        return {targets[-1]: spans} if targets else {}
    raise DataError(
        f"the chat template marks {len(spans)} parts of {len(assistant_turns)} turns of the "
        "assistant with {% generation %}, so it is not known which turns are learnt: mark one part "
        "for each turn"
    )


def _locate_turn(index: int, messages: list[Message], template: ChatTemplate, text: str) -> Span:
    """Find the characters of a turn of the assistant in a rendered conversation: from the end of
    the generation prompt to the end of the turn.
    """
    text_before = template.render(messages[:index], add_generation_prompt=True)
    text_through_turn = template.render(messages[: index + 1])
    if text.startswith(text_through_turn) and text_through_turn.startswith(text_before):
        return len(text_before), len(text_through_turn)
    span = _locate_by_marker(index, messages, template, text, text_before)
    if span is None:
        raise DataError(
            "the tokenizer's chat template renders a turn of the assistant differently when it "
            "asks for the turn, or when others follow, so completions cannot be located: use a "
            "tokenizer whose template marks what the model generates with {% generation %}"
        )
    return span


def _locate_by_marker(
    index: int, messages: list[Message], template: ChatTemplate, text: str, text_before: str
) -> Span | None:
    """Locate a turn of the assistant that is rendered differently when others follow it: chat
    templates of reasoning models omit its thoughts, and some end the last turn in another way.
    """
    # With a marker as content, the conversation is rendered as `head MARKER ending rest`, where
    # `ending` is the turn's end token and `rest` all later turns: so the text with the true content
    # is `head ... ending rest`. The ending is known from a rendering in which nothing follows.
    marked_turn = {"role": "assistant", "content": MARKER}
    marked_messages = [*messages[:index], marked_turn, *messages[index + 1 :]]
    marked_text = template.try_render(marked_messages) or ""
    # The marked turn is last here, and the generation prompt follows it.
    last_messages = marked_messages[: index + 1]
    last_turn_text = template.try_render(last_messages, add_generation_prompt=True) or ""
    earlier_text = template.render(messages[:index])
    if not text_before.startswith(earlier_text):
        # Some templates end a conversation with the end-of-text token, but not before a turn.
        earlier_text = earlier_text.removesuffix(template.tokenizer.eos_token or "")
    is_marked = marked_text.count(MARKER) == 1 == last_turn_text.count(MARKER)
    if not is_marked or not text_before.startswith(earlier_text):
        return None
    prompt = text_before.removeprefix(earlier_text)
    head, _, tail = marked_text.partition(MARKER)
    head_if_last, _, tail_if_last = last_turn_text.partition(MARKER)
    ending = tail_if_last.removesuffix(prompt)
    rest = tail.removeprefix(ending)
    if not (text.startswith(head) and text.endswith(rest) and tail.startswith(ending)):
        return None
    start = _start_of_turn(head, head_if_last, text_before, prompt)
    end = len(text) - len(rest)
    return None if start is None else (start, end)


def _start_of_turn(head: str, head_if_last: str, text_before: str, prompt: str) -> int | None:
    """Find the first character of a turn of the assistant in a rendered conversation: the one after
    the generation prompt, or after as much of the prompt as the conversation contains.
    """
    # The longest beginning of the prompt that follows the earlier messages as they were rendered.
    common = commonprefix([head, text_before])  # noqa: RUF071
    earlier_messages = text_before.removesuffix(prompt)
    if head.startswith(text_before) or common[len(earlier_messages) :].strip():
        return len(common)
    # Or that stands before the content, or before what the template writes in front of it.
    num_spaces = len(prompt) - len(prompt.lstrip())
    for size in range(len(prompt), num_spaces, -1):
        for written in (head_if_last.removeprefix(text_before), ""):
            if head.endswith(prompt[:size] + written):
                return len(head) - len(written)
    return None


def check_rendered(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    """Check that the chat template renders the context of a conversation: options, tools, tool
    calls, and each message that is not a target (for targets see `check_targets`).

    Args:
        conversation: The conversation.
        template: The chat template.
        text: `template.render(conversation.messages)`.

    Raises:
        DataError: If the template omits one of them.
    """
    for name in conversation.template_options:
        if re.search(rf"\b{re.escape(name)}\b", template.source) is None:
            raise DataError(f"the chat template does not use the option {name!r}: {REMEDY}")
    for part, other_template, other_messages in _without_a_part(conversation, template):
        if other_template.try_render(other_messages) == text:
            raise DataError(f"the chat template does not render {part}: {REMEDY}")


def _without_a_part(
    conversation: Conversation, template: ChatTemplate
) -> Iterator[tuple[str, ChatTemplate, list[Message]]]:
    """Yield each part of a conversation's context, and template and messages without it. (That the
    text contains a part proves nothing: another message may contain it, too.)
    """
    messages = conversation.messages
    if conversation.tools:
        yield "tools", replace(template, tools=None), messages
    if any("tool_calls" in message for message in messages):
        yield "tool_calls", template, _without_key("tool_calls", messages)
    for index, message in enumerate(messages):
        if index not in conversation.targets and message.get("content"):
            other = {**message, "content": MARKER}
            other_messages = [*messages[:index], other, *messages[index + 1 :]]
            yield f"the message of the {message['role']}", template, other_messages


def check_targets(
    messages: list[Message], template: ChatTemplate, text: str, spans_by_turn: SpansByTurn
) -> tuple[str, ...]:
    """Check that the targets in a rendered conversation contain the contents of their turns.

    Args:
        messages: All messages of the conversation.
        template: The chat template.
        text: `template.render(messages)`.
        spans_by_turn: The characters of each turn that is a target.

    Returns:
        Notes for the log on what the template omits without harm: thoughts of earlier turns, names,
        or a part of the last turn's generation prompt.

    Raises:
        DataError: If a target lacks the answer or a tool call of its turn, or the last one its
            thoughts.
    """
    notes = []
    for index, spans in spans_by_turn.items():
        target = "".join(text[start:end] for start, end in spans)
        message = messages[index]
        content = message.get("content", "")
        answer = END_OF_THOUGHTS.split(content)[-1]
        function_names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        if not all(_contains(target, part) for part in (answer, *function_names)):
            raise DataError(
                "a turn of the assistant is not among the targets that the chat template renders "
                f"or marks, which are {target!r:.200}: {REMEDY}"
            )
        # Thoughts are in the content (between tags such as <think>) or in `reasoning_content`, and
        # may begin in the generation prompt.
        start = spans[0][0] if spans else 0
        has_thoughts = all(
            _contains(text[max(0, start - len(part)) : start] + target, part)
            for part in (content, message.get("reasoning_content", ""))
        )
        if has_thoughts:
            continue
        if index == len(messages) - 1:
            raise DataError(
                "the chat template does not render the thoughts of the last turn, so the model "
                f"would learn to answer without them: {REMEDY}"
            )
        if NO_THOUGHTS not in notes:
            notes.append(NO_THOUGHTS)
    has_names = any("name" in message for message in messages)
    if has_names and template.try_render(_without_key("name", messages)) == text:
        notes.append(NO_NAMES)
    if spans_by_turn and not template.marks_generations:
        text_before = template.render(messages[: max(spans_by_turn)], add_generation_prompt=True)
        if not text.startswith(text_before):
            notes.append(OTHER_BEGINNING)
    return tuple(notes)


def _without_key(key: str, messages: list[Message]) -> list[Message]:
    """Return copies of messages without a key, such as `tool_calls`."""
    return [
        {other: value for other, value in message.items() if other != key} for message in messages
    ]


def _contains(text: str, part: str) -> bool:
    """Return whether the text of a rendered conversation contains a part of a message, directly or
    if white space, which chat templates strip, is ignored in both.
    """
    return part in text or "".join(part.split()) in "".join(text.split())
