"""Checks that a rendered conversation contains all that the row contains: chat templates silently
omit what they do not know.
"""

import re

from jinja2 import TemplateError

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
    messages = conversation.messages
    _check_options(conversation, template)
    _check_tools(conversation, template, text)
    if _omits_key("tool_calls", messages, template, text):
        raise DataError(f"the chat template does not render tool_calls: {REMEDY}")
    for index, turn in enumerate(conversation.turns):
        if not turn.is_target:
            _check_message(index, messages, template, text)


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
    _check_answers(messages, text, spans_by_turn)
    if _omits_earlier_thoughts(messages, text, spans_by_turn):
        notes.append(NO_THOUGHTS)
    if _omits_key("name", messages, template, text):
        notes.append(NO_NAMES)
    if spans_by_turn and not template.marks_generations:
        last_target = max(spans_by_turn)
        text_before = template.render(messages[:last_target], add_generation_prompt=True)
        if not text.startswith(text_before):
            notes.append(OTHER_BEGINNING)
    return tuple(notes)


def _check_options(conversation: Conversation, template: ChatTemplate) -> None:
    """Check that the source of the chat template contains each option of the row
    (`chat_template_kwargs`) as a word.

    Raises:
        DataError: If it lacks one.
    """
    unused = [
        name
        for name in conversation.template_options
        if re.search(rf"\b{re.escape(name)}\b", template.source) is None
    ]
    if unused:
        raise DataError(f"the chat template does not use the option {unused[0]!r}: {REMEDY}")


def _check_tools(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    """Check that the tools of a conversation change its rendered text.

    Args:
        conversation: The conversation; without tools the check passes.
        template: The chat template with the tools.
        text: The rendered conversation.

    Raises:
        DataError: If the chat template renders the same text without the tools.
    """
    without_tools = ChatTemplate(template.tokenizer, None, template.options)
    if conversation.tools and _renders_text(text, without_tools, conversation.messages):
        raise DataError(f"the chat template does not render tools: {REMEDY}")


def _check_message(index: int, messages: list[Message], template: ChatTemplate, text: str) -> None:
    """Check that the rendered text changes with the content of a message. (That the text contains
    the content would prove nothing, because another message may contain it, too.)

    Args:
        index: The message; one without content passes.
        messages: All messages of the conversation.
        template: The chat template.
        text: `template.render(messages)`.

    Raises:
        DataError: If the chat template renders the same text with another content.
    """
    message = messages[index]
    if not message.get("content"):
        return
    other_content = {**message, "content": MARKER}
    changed_messages = [*messages[:index], other_content, *messages[index + 1 :]]
    if _renders_text(text, template, changed_messages):
        raise DataError(
            f"the chat template does not render the message of the {message['role']}: {REMEDY}"
        )


def _check_answers(messages: list[Message], text: str, spans_by_turn: SpansByTurn) -> None:
    """Check that each target contains the answer of its turn (the content after thoughts) and the
    names of the functions that it calls, and the last message also its thoughts.

    Args:
        messages: All messages of the conversation.
        text: The rendered conversation.
        spans_by_turn: The characters of each turn that is a target.

    Raises:
        DataError: If a target does not.
    """
    last_message = len(messages) - 1
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
        if index == last_message and not _has_thoughts(message, text, spans):
            raise DataError(
                "the chat template does not render the thoughts of the last turn, so the model "
                f"would learn to answer without them: {REMEDY}"
            )


def _omits_earlier_thoughts(messages: list[Message], text: str, spans_by_turn: SpansByTurn) -> bool:
    """Return whether a target of the rendered conversation lacks the thoughts of its turn, as
    templates of reasoning models omit them in all but the last turn.

    Args:
        messages: All messages of the conversation.
        text: The rendered conversation.
        spans_by_turn: The characters of each turn that is a target.
    """
    return not all(
        _has_thoughts(messages[index], text, spans) for index, spans in spans_by_turn.items()
    )


def _has_thoughts(message: Message, text: str, spans: list[Span]) -> bool:
    """Return whether the target of a turn contains the turn's thoughts, which are in its content
    (between tags such as <think>) or in its `reasoning_content`.

    The beginning of the thoughts may be a part of the generation prompt, before the target.

    Args:
        message: The message of the turn.
        text: The rendered conversation.
        spans: The characters of the turn, its target.
    """
    target = "".join(text[start:end] for start, end in spans)
    target_start = spans[0][0] if spans else 0
    for thoughts in (message.get("content", ""), message.get("reasoning_content", "")):
        text_before = text[max(0, target_start - len(thoughts)) : target_start]
        if not _contains(text_before + target, thoughts):
            return False
    return True


def _omits_key(key: str, messages: list[Message], template: ChatTemplate, text: str) -> bool:
    """Return whether messages have a key, such as `tool_calls`, that makes no difference to the
    text that the chat template renders.

    Args:
        key: The key.
        messages: All messages of the conversation.
        template: The chat template.
        text: `template.render(messages)`.
    """
    messages_without_key = [
        {other: value for other, value in message.items() if other != key} for message in messages
    ]
    has_key = messages_without_key != messages
    return has_key and _renders_text(text, template, messages_without_key)


def _renders_text(text: str, template: ChatTemplate, messages: list[Message]) -> bool:
    """Return whether a chat template renders messages as this text; False if it fails because the
    messages lack something.
    """
    try:
        return template.render(messages) == text
    except (TemplateError, TypeError):
        return False


def _contains(text: str, part: str) -> bool:
    """Return whether the text of a rendered conversation contains a part of a message, directly or
    if white space, which chat templates strip, is ignored in both.

    >>> _contains("<user>Hello world<end>", " Hello  world "), _contains("<user><end>", "Hello")
    (True, False)
    """
    return part in text or "".join(part.split()) in "".join(text.split())
