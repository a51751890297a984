"""Where the turns of the assistant stand in a rendered conversation."""

from hf_ga.errors import DataError
from hf_ga.finetuning.data.chat.conversation import Conversation
from hf_ga.finetuning.data.chat.template import ChatTemplate, Message, Span

MARK = "hfgaturnmark"  # in place of a turn's content, to find it in the rendered text
Turns = dict[int, list[Span]]  # number of a message -> the characters that render it


def locate_targets(conversation: Conversation, template: ChatTemplate, text: str) -> Turns:
    """Find the turns that are targets, with what ends them.

    Args:
        conversation: Its first turn is not the assistant's.
        template: That of the tokenizer.
        text: `template.render(conversation.messages)`.

    Raises:
        DataError: The template renders a turn in a way that cannot be located.
    """
    targets = [i for i, turn in enumerate(conversation.turns) if turn.is_target]
    if template.marks_generations:
        return _marked_by_template(conversation, template, targets)
    messages = conversation.messages
    return {i: [_locate(i, messages, template, text)] for i in targets}


def _marked_by_template(
    conversation: Conversation, template: ChatTemplate, targets: list[int]
) -> Turns:
    spans = template.generations(conversation.messages)
    numbers = [i for i, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    if len(spans) == len(numbers):
        located = {i: [span] for i, span in zip(numbers, spans, strict=True)}
        return {i: located[i] for i in targets}
    if targets == numbers:
        return {targets[-1]: spans} if targets else {}
    raise DataError(
        f"the chat template marks {len(spans)} parts of {len(numbers)} turns of the assistant with "
        "{% generation %}, so single turns cannot be left out: mark one part for each turn"
    )


def _locate(index: int, messages: list[Message], template: ChatTemplate, text: str) -> Span:
    """The turn's characters: what follows the generation prompt, to the turn's end."""
    before = template.render(messages[:index], opens_turn=True)
    until = template.render(messages[: index + 1])
    if text.startswith(until) and until.startswith(before):
        return len(before), len(until)
    return _locate_by_mark(index, messages, template, text, before)


def _locate_by_mark(
    index: int, messages: list[Message], template: ChatTemplate, text: str, before: str
) -> Span:
    """Locate a turn that is rendered differently when others follow it: templates of reasoning
    models leave out its thoughts, and some end the last turn in another way.

    With a mark as its content, the turn is `head MARK ending rest`, and the text is `head ...
    ending rest` with the true content. The ending is known from a turn that nothing follows yet.
    """
    marked = [*messages[:index], {"role": "assistant", "content": MARK}, *messages[index + 1 :]]
    whole = template.render(marked)
    prompt = template.generation_prompt(messages[:index])
    alone = template.render(marked[: index + 1], opens_turn=True)
    if prompt is None or whole.count(MARK) != 1 or alone.count(MARK) != 1:
        raise _not_located(prompt)
    head, _, tail = whole.partition(MARK)
    ending = alone.removesuffix(prompt).partition(MARK)[2]
    rest = tail.removeprefix(ending)
    starts_after_prompt = text.startswith(head) and prompt != "" and head.endswith(prompt)
    start = len(before) if text.startswith(before) else len(head)
    end = len(text) - len(rest)
    is_found = text.startswith(before) or starts_after_prompt
    if not (is_found and tail.startswith(ending) and text.endswith(rest) and start <= end):
        raise _not_located(prompt)
    return start, end


def _not_located(prompt: str | None) -> DataError:
    return DataError(
        f"the tokenizer's chat template begins turns of the assistant with {prompt!r} when it asks "
        "for one, but renders those of a conversation in another way, so completions cannot be "
        "located: use a tokenizer whose template renders both alike, or marks what the model "
        "generates with {% generation %}"
    )
