"""Locates the turns of the assistant in a rendered conversation."""

from os.path import commonprefix

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.conversation import Conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message, Span

# Content that replaces that of a turn, to find the turn in the rendered text.
MARKER = "hfgaturnmark"
# Index of a message -> the characters of the rendered conversation that are this turn.
SpansByTurn = dict[int, list[Span]]


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
