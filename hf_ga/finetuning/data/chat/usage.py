"""Checks that a rendered conversation contains all that the row contains: chat templates silently
omit what they do not know.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.conversation import Conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message, Span
from hf_ga.finetuning.data.chat.turns import MARKER, SpansByTurn

# Notes for the log, each the end of a sentence that begins with a number of rows.
NO_THOUGHTS = "have thoughts in earlier turns, which the chat template leaves out"
NO_NAMES = "have names in their messages, which the chat template leaves out"
OTHER_BEGINNING = (
    "have a last turn that the chat template begins without its whole generation prompt"
)
END_OF_THOUGHTS = re.compile(r"</think>|</thinking>|</thought>|</reasoning>|\[/THINK\]")
REMEDY = "use a tokenizer whose template does, or remove it from the rows"


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
        answer = END_OF_THOUGHTS.split(message.get("content", ""))[-1]
        function_names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        if not all(_contains(target, part) for part in (answer, *function_names)):
            raise DataError(
                "a turn of the assistant is not among the targets that the chat template renders "
                f"or marks, which are {target!r:.200}: {REMEDY}"
            )
        if _has_thoughts(message, text, spans):
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


def _has_thoughts(message: Message, text: str, spans: list[Span]) -> bool:
    """Return whether the target of a turn contains the turn's thoughts, which are in its content
    (between tags such as <think>) or in its `reasoning_content`.
    """
    target = "".join(text[start:end] for start, end in spans)
    target_start = spans[0][0] if spans else 0
    for thoughts in (message.get("content", ""), message.get("reasoning_content", "")):
        text_before = text[max(0, target_start - len(thoughts)) : target_start]
        if not _contains(text_before + target, thoughts):
            return False
    return True


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
