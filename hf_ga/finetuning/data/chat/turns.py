"""Where the turns of the assistant stand in a rendered conversation."""

from jinja2 import TemplateError

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
    if targets == numbers and len(spans) > len(numbers):  # several parts of a turn
        return {targets[-1]: spans} if targets else {}
    raise DataError(
        f"the chat template marks {len(spans)} parts of {len(numbers)} turns of the assistant with "
        "{% generation %}, so it is not known which turns are learnt: mark one part for each turn"
    )


def _locate(index: int, messages: list[Message], template: ChatTemplate, text: str) -> Span:
    """The turn's characters: what follows the generation prompt, to the turn's end."""
    before = template.render(messages[:index], opens_turn=True)
    until = template.render(messages[: index + 1])
    if text.startswith(until) and until.startswith(before):
        return len(before), len(until)
    span = _locate_by_mark(index, messages, template, text, before)
    if span is None:
        raise DataError(
            "the tokenizer's chat template renders a turn of the assistant differently when it "
            "asks for the turn, or when others follow, so completions cannot be located: use a "
            "tokenizer whose template marks what the model generates with {% generation %}"
        )
    return span


def _locate_by_mark(
    index: int, messages: list[Message], template: ChatTemplate, text: str, before: str
) -> Span | None:
    """Locate a turn that is rendered differently when others follow it: templates of reasoning
    models leave out its thoughts, and some end the last turn in another way.

    With a mark as its content, the conversation is `head MARK ending rest`, and the text is `head
    ... ending rest` with the true content. The ending is known from the same turn with nothing
    after it.
    """
    marked = [*messages[:index], {"role": "assistant", "content": MARK}, *messages[index + 1 :]]
    try:
        whole = template.render(marked)
        alone = template.render(marked[: index + 1], opens_turn=True)
    except TemplateError:
        return None
    prompt = template.generation_prompt(messages[:index], before)
    if prompt is None or whole.count(MARK) != 1 or alone.count(MARK) != 1:
        return None
    head, _, tail = whole.partition(MARK)
    head_alone, _, tail_alone = alone.partition(MARK)
    ending = tail_alone.removesuffix(prompt)
    rest = tail.removeprefix(ending)
    if not (text.startswith(head) and text.endswith(rest) and tail.startswith(ending)):
        return None
    start = _start(head, head_alone, before, prompt)
    end = len(text) - len(rest)
    return None if start is None else (start, end)


def _start(head: str, head_alone: str, before: str, prompt: str) -> int | None:
    """Where a turn begins, after the generation prompt or as much of it as the conversation shows;
    None if it shows none.

    Args:
        head: All that a conversation has before the content of the turn.
        head_alone: The same if nothing follows the turn.
        before: All before the turn when the template asks for it; it ends with the prompt.
        prompt: The generation prompt, such as that a turn begins, and then thoughts.
    """
    if head.startswith(before):
        return len(before)
    beginning = head_alone.removeprefix(before)  # of the turn, before its content
    if head_alone.startswith(before) and head.endswith(prompt + beginning):
        return len(head) - len(beginning)
    others = before.removesuffix(prompt)
    parts = [prompt[:size] for size in range(1, len(prompt) + 1)]
    first = [part for part in parts if head.startswith(others + part)]
    if first and first[-1].strip():
        return len(others + first[-1])
    last = [part for part in parts if head.endswith(part)]
    return len(head) if last and last[-1].strip() else None
