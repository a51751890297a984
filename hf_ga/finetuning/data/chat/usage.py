"""Checks that the rendered text contains what the row does: templates silently leave out what they
do not know.
"""

import re

from jinja2 import TemplateError

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.conversation import Conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message, Span
from hf_ga.finetuning.data.chat.turns import MARK, Turns

NO_THOUGHTS = "have thoughts in earlier turns, which the chat template leaves out"
NO_NAMES = "have names in their messages, which the chat template leaves out"
OTHER_BEGINNING = (
    "have a last turn that the chat template begins without its whole generation prompt"
)
END_OF_THOUGHTS = re.compile(r"</think>|</thinking>|</thought>|</reasoning>|\[/THINK\]")
REMEDY = "use a tokenizer whose template does, or remove it from the rows"


def check_rendered(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    """Check that the text depends on all that a row has.

    Args:
        conversation: The row.
        template: That of the tokenizer.
        text: The row as the template renders it.

    Raises:
        DataError: The template leaves out tools, calls, an option or a message.
    """
    messages = conversation.messages
    _check_options(conversation, template)
    _check_tools(conversation, template, text)
    if _leaves_out("tool_calls", messages, template, text):
        raise DataError(f"the chat template does not render tool_calls: {REMEDY}")
    for index, turn in enumerate(conversation.turns):
        if not turn.is_target:  # see `check_targets`
            _check_message(index, messages, template, text)


def check_targets(
    messages: list[Message], template: ChatTemplate, text: str, located: Turns
) -> tuple[str, ...]:
    """Check that targets contain their turns.

    Args:
        messages: Those of the row.
        template: That of the tokenizer.
        text: The row as the template renders it.
        located: The turns that are targets.

    Returns:
        What the template leaves out without harm, as the rests of sentences on the row.

    Raises:
        DataError: A target lacks the answer or calls of its turn, or the last one its thoughts.
    """
    notes = []
    if _leaves_out_thoughts(messages, text, located):
        notes.append(NO_THOUGHTS)
    if _leaves_out("name", messages, template, text):
        notes.append(NO_NAMES)
    if located and not template.marks_generations:
        before = template.render(messages[: max(located)], opens_turn=True)
        if not text.startswith(before):
            notes.append(OTHER_BEGINNING)
    return tuple(notes)


def _check_options(conversation: Conversation, template: ChatTemplate) -> None:
    unknown = [
        name
        for name in conversation.options
        if re.search(rf"\b{re.escape(name)}\b", template.source) is None
    ]
    if unknown:
        raise DataError(f"the chat template does not use the option {unknown[0]!r}: {REMEDY}")


def _check_tools(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    without = ChatTemplate(template.tokenizer, None, template.options)
    if conversation.tools and _renders_as(text, without, conversation.messages):
        raise DataError(f"the chat template does not render tools: {REMEDY}")


def _check_message(index: int, messages: list[Message], template: ChatTemplate, text: str) -> None:
    """Check that the text depends on the content of a message. (That the text contains it shows
    nothing: another message may contain it, too.)
    """
    message = messages[index]
    if not message.get("content"):
        return
    changed = [*messages[:index], {**message, "content": MARK}, *messages[index + 1 :]]
    if _renders_as(text, template, changed):
        raise DataError(
            f"the chat template does not render the message of the {message['role']}: {REMEDY}"
        )


def _leaves_out_thoughts(messages: list[Message], text: str, located: Turns) -> bool:
    """Check that each target contains its turn; whether earlier turns lack their thoughts."""
    last = len(messages) - 1
    lacks_thoughts = False
    for index, spans in located.items():
        target = "".join(text[start:end] for start, end in spans)
        message = messages[index]
        content = message.get("content", "")
        names = [call["function"]["name"] for call in message.get("tool_calls", [])]
        thoughts = message.get("reasoning_content", "")
        answer = END_OF_THOUGHTS.split(content)[-1]
        if not all(_contains(target, part) for part in (answer, *names)):
            raise DataError(
                "a turn of the assistant is not among the targets that the chat template renders "
                f"or marks, which are {target!r:.200}: {REMEDY}"
            )
        if all(_has_thoughts(text, spans, part) for part in (content, thoughts)):
            continue
        if index == last:
            raise DataError(
                "the chat template does not render the thoughts of the last turn, so the model "
                f"would learn to answer without them: {REMEDY}"
            )
        lacks_thoughts = True
    return lacks_thoughts


def _has_thoughts(text: str, spans: list[Span], part: str) -> bool:
    """Whether spans of the text contain a part; the generation prompt may have its beginning."""
    target = "".join(text[start:end] for start, end in spans)
    start = spans[0][0] if spans else 0
    return _contains(text[max(0, start - len(part)) : start] + target, part)


def _leaves_out(key: str, messages: list[Message], template: ChatTemplate, text: str) -> bool:
    """Whether messages have a key that makes no difference to the text."""
    without = [{k: v for k, v in message.items() if k != key} for message in messages]
    return without != messages and _renders_as(text, template, without)


def _renders_as(text: str, template: ChatTemplate, messages: list[Message]) -> bool:
    """Whether a template renders messages as this text."""
    try:
        return template.render(messages) == text
    except (TemplateError, TypeError):  # it needs what the messages lack
        return False


def _contains(text: str, part: str) -> bool:
    """Whether a text contains another, apart from white space, which templates strip."""
    return part in text or "".join(part.split()) in "".join(text.split())
