"""Templates of reasoning models, templates that mark what is generated, ends of turns, and parts of
a row that a template leaves out.
"""

import json

import pytest
from chats import (
    CALLS,
    CHATML,
    ENDLESS,
    IGNORED,
    OTHER_END,
    TAGGED,
    THINKING,
    THOUGHTLESS,
    TOOLS,
    learnt,
    said,
    targets_of,
    text_of,
    tokenizer_with,
    turns,
)
from test_data import prepared

from hf_ga import DataError
from hf_ga.finetuning.data.chat import rendering
from hf_ga.finetuning.data.chat.rendering import render_rows
from hf_ga.finetuning.data.encoding.tokenization import tokenize_causal

END = "<|im_end|>\n"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = '<call>weather {"city": "Oslo"}</call>'


def notes_of(messages: list[dict], template: str) -> tuple[str, ...]:
    (found,) = render_rows({"messages": [messages]}, tokenizer_with(template))
    return found.notes


# Thoughts. Turn by turn what is learnt: thoughts after the last message of the user only.
THOUGHT = said("assistant", "4", reasoning_content="add them")
SEEN = f"<think>\nadd them\n</think>\n\n4{END}"
NOTHING_THOUGHT = f"<think>\n\n</think>\n\n4{END}"
THOUGHTS = {
    "one turn": ([said("user", "2+2?"), THOUGHT], [SEEN]),
    "no thought": ([said("user", "2+2?"), said("assistant", "4")], [NOTHING_THOUGHT]),
    "two turns": (
        [said("user", "2+2?"), THOUGHT, said("user", "Sure?"), THOUGHT],
        [f"4{END}", SEEN],
    ),
    "three turns": (
        [said("user", "2+2?"), THOUGHT, said("user", "?"), THOUGHT, said("user", "!"), THOUGHT],
        [f"4{END}", f"4{END}", SEEN],
    ),
    "an earlier turn left out": (
        [said("user", "2+2?"), {**THOUGHT, "weight": 0}, said("user", "Sure?"), THOUGHT],
        [SEEN],
    ),
    "the last turn left out": (
        [said("user", "2+2?"), THOUGHT, said("user", "Sure?"), {**THOUGHT, "train": False}],
        [f"4{END}"],
    ),
    "thoughts in the content": (
        [
            said("user", "2+2?"),
            said("assistant", "<think>\nno\n</think>\n\n4"),
            said("user", "Sure?"),
            THOUGHT,
        ],
        [f"4{END}", SEEN],
    ),
    "calls after the last message of the user": (
        [
            said("user", "2+2?"),
            said("assistant", "", reasoning_content="ask", tool_calls=[CALL]),
            said("tool", "4"),
            THOUGHT,
        ],
        [f"<think>\nask\n</think>\n\n{CALLED}{END}", SEEN],
    ),
    "calls in an earlier turn": (
        [
            said("user", "2+2?"),
            said("assistant", "", reasoning_content="ask", tool_calls=[CALL]),
            said("tool", "4"),
            THOUGHT,
            said("user", "Sure?"),
            THOUGHT,
        ],
        [f"{CALLED}{END}", f"4{END}", SEEN],
    ),
    "a user at the end": (
        [said("user", "2+2?"), THOUGHT, said("user", "Thanks")],
        [f"4{END}"],
    ),
}


@pytest.mark.parametrize("case", THOUGHTS)
def test_thoughts_are_learnt_where_the_conversation_shows_them(case):
    """The text is the template's, and targets and context together are the whole text."""
    messages, expected = THOUGHTS[case]
    row = {"messages": messages}
    assert targets_of(row, THINKING) == expected
    assert learnt(row, THINKING) == "".join(expected)
    unmarked = [
        {key: value for key, value in message.items() if key not in ("weight", "train")}
        for message in messages
    ]
    tokenizer = tokenizer_with(THINKING)
    assert text_of(row, THINKING) == tokenizer.apply_chat_template(unmarked, tokenize=False)


def test_each_target_stands_where_its_turn_is():
    """All turns say the same, so a search for the content would find the first. By hand."""
    messages = [said("user", "4"), THOUGHT, said("user", "4"), THOUGHT]
    (found,) = render_rows({"messages": [messages]}, tokenizer_with(THINKING))
    user = f"<|im_start|>user\n4{END}"
    first = f"{user}<|im_start|>assistant\n"
    second = f"{first}4{END}{first}"
    assert found.text == f"{second}{SEEN}"
    assert found.targets == [
        (len(first), len(f"{first}4{END}")),
        (len(second), len(f"{second}{SEEN}")),
    ]


def test_labels_by_hand():
    """Token by token: each byte is one. The control: with the first turn, there are others."""
    tokenizer = tokenizer_with(THINKING, num_tokens=0)
    messages = [said("user", "a"), said("assistant", "b", weight=0), said("user", "c"), THOUGHT]
    context = [
        *("<|im_start|>", *"user\na", "<|im_end|>", "\n"),
        *("<|im_start|>", *"assistant\nb", "<|im_end|>", "\n"),
        *("<|im_start|>", *"user\nc", "<|im_end|>", "\n"),
        *("<|im_start|>", *"assistant\n"),
    ]
    target = [*"<think>\nadd them\n</think>\n\n4", "<|im_end|>", "\n"]
    ids = [token for text in [*context, *target] for token in tokenizer(text)["input_ids"]]
    labels = [IGNORED] * len(context) + ids[len(context) :]
    assert len(ids) == len(context) + len(target)
    out = tokenize_causal({"messages": [messages]}, tokenizer, None)
    assert out["input_ids"] == [ids]
    assert out["labels"] == [labels]
    assert out["num_targets"] == [len(target)]
    messages[1] = said("assistant", "b")
    control = tokenize_causal({"messages": [messages]}, tokenizer, None)
    assert control["input_ids"] == [ids]
    assert control["num_targets"] == [len(target) + 3]


def test_thoughts_that_are_left_out_are_counted(tmp_path):
    conversation = THOUGHTS["two turns"][0]
    rows = [{"messages": conversation}] * 8 + [{"messages": THOUGHTS["one turn"][0]}] * 4
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = str(tmp_path / "d.jsonl")
    data = prepared(file, tokenizer_with(THINKING), max_length=512, validation_file=file)
    assert f"train: 8 of 12 rows {rendering.NO_THOUGHTS}" in data.notes


def test_a_template_that_drops_the_last_thought_is_refused():
    """In the key or in the content; without thoughts it is used, and the prompt's own is printed."""
    for answer in (
        THOUGHT,
        said("assistant", "<think>add them</think>4"),
        said("assistant", "4", thinking="add them"),
    ):
        with pytest.raises(DataError, match="does not render the thoughts of the last turn"):
            targets_of({"messages": [said("user", "2+2?"), answer]}, THOUGHTLESS)
    plain = turns("2+2?", "4", "Sure?", "Yes")
    assert targets_of({"messages": plain}, THOUGHTLESS) == ["4</s>", "Yes</s>"]
    assert notes_of(plain, THOUGHTLESS) == (rendering.OTHER_BEGINNING,)
    thought = [*turns("2+2?", "<think>add</think>4"), *turns("Sure?", "Yes")]
    assert targets_of({"messages": thought}, THOUGHTLESS) == ["4</s>", "Yes</s>"]
    assert rendering.NO_THOUGHTS in notes_of(thought, THOUGHTLESS)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_the_names_of_thoughts(name):
    """transformers gives templates all of them under the first."""
    row = {"messages": [said("user", "2+2?"), said("assistant", "4", **{name: "add them"})]}
    assert targets_of(row, THINKING) == [SEEN]


def test_a_last_turn_with_another_end():
    """As of Phi-3: the end of text follows the last turn only."""
    row = {"messages": turns("Hi", "Yes", "And?", "No")}
    assert targets_of(row, OTHER_END) == [f"Yes{END}", f"No{END}<eos>"]
    assert learnt(row, OTHER_END) == f"Yes{END}No{END}<eos>"


# Marks of the template


def test_what_the_template_marks_is_learnt():
    """As transformers itself says. The control: without the marks, headers are learnt, too, as this
    template has no generation prompt.
    """
    tokenizer = tokenizer_with(TAGGED)
    messages = turns("Hi", "Yes", "And?", "No")
    out = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    found = tokenize_causal({"messages": [messages]}, tokenizer, None)
    is_target = [int(label != IGNORED) for label in found["labels"][0]]
    assert found["input_ids"][0] == out["input_ids"]
    assert is_target == out["assistant_masks"]
    row = {"messages": messages}
    assert targets_of(row, TAGGED) == ["Yes<|im_end|>", "No<|im_end|>"]
    untagged = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert targets_of(row, untagged)[0] == "<|im_start|>assistant\nYes<|im_end|>\n"


def test_marked_turns_can_be_left_out():
    messages = turns("Hi", "Yes", "And?", "No")
    messages[1]["weight"] = 0
    assert targets_of({"messages": messages}, TAGGED) == ["No<|im_end|>"]
    split = {"prompt": turns("Hi", "Yes", "And?"), "completion": turns("", "No")[1:]}
    assert targets_of(split, TAGGED) == ["No<|im_end|>"]


def test_turns_in_several_marked_parts():
    """They can be learnt, but it cannot be told to which turn a part belongs."""
    template = TAGGED.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}",
        "{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}",
    )
    messages = turns("Hi", "Yes", "And?", "No")
    assert learnt({"messages": messages}, template) == "Yes<|im_end|>No<|im_end|>"
    messages[1]["weight"] = 0
    with pytest.raises(DataError, match=r"marks 4 parts of 2 turns.*which turns are learnt"):
        targets_of({"messages": messages}, template)


def test_a_call_outside_the_mark_is_refused():
    template = TAGGED.replace("{% endgeneration %}", "{% endgeneration %}" + CALLS)
    messages = [said("user", "2+2?"), said("assistant", "Hm", tool_calls=[CALL])]
    with pytest.raises(DataError, match=r"not among the targets.*'Hm<\|im_end\|>'"):
        targets_of({"messages": messages}, template)


# Ends of turns

ENDINGS = {  # template -> whether it can be used
    "end of a turn": (CHATML, True),
    "end of text": (CHATML.replace("<|im_end|>", "{{ eos_token }}"), True),
    "end of text, last turn": (
        ENDLESS + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
        True,
    ),
    "marked": (TAGGED, True),
    "none, as of GLM": (ENDLESS, False),
    "a heading, as of Alpaca": (
        "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}",
        False,
    ),
    "words for an end": (CHATML.replace("<|im_end|>", "<|over|>"), False),
    "an end outside the mark": (
        TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        False,
    ),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_template_must_teach_where_to_stop(case):
    template, is_usable = ENDINGS[case]
    row = {"messages": turns("Hi", "Yes", "And?", "No")}
    if is_usable:
        assert learnt(row, template).rstrip().endswith(("<|im_end|>", "<eos>"))
        return
    with pytest.raises(DataError, match=r"without an end token.*never learn to stop.*eos_token"):
        learnt(row, template)


def test_the_remedy_for_a_template_without_an_end():
    """What the documentation says to add."""
    tokenizer = tokenizer_with(ENDLESS)
    tokenizer.chat_template += "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    row = {"messages": turns("Hi", "Yes", "And?", "No")}
    assert targets_of(row, tokenizer.chat_template) == ["Yes", "No<eos>"]


# What a template leaves out


UNUSED = {
    "tools": ({"messages": turns("Hi", "Yes"), "tools": [TOOL]}, CHATML, "not render tools"),
    "calls": (
        {"messages": [said("user", "Hi"), said("assistant", "", tool_calls=[CALL])]},
        CHATML,
        "not render tool_calls",
    ),
    "results": (
        {"messages": [said("user", "Hi"), said("tool", "4 C"), said("assistant", "Yes")]},
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}",
        "message of the tool",
    ),
    "system": (
        {"messages": [said("system", "Obey."), *turns("Hi", "Yes")]},
        THOUGHTLESS.replace("{% else %}", "{% elif m.role == 'assistant' %}"),
        "message of the system",
    ),
    "a developer": (
        {"messages": [said("developer", "Obey."), *turns("Hi", "Yes")]},
        CHATML.replace("for m in messages", "for m in messages if m.role != 'developer'"),
        "message of the developer",
    ),
    "an answer": (
        {"messages": turns("Hi", "Yes, of course")},
        CHATML.replace("{{ m.content }}", "{{ m.content[:5] }}"),
        "not among the targets",
    ),
}


@pytest.mark.parametrize("case", UNUSED)
def test_what_a_template_leaves_out_is_refused(case):
    """The control: with a template that renders it, the row is used."""
    row, template, words = UNUSED[case]
    with pytest.raises(DataError, match=f"{words}.*Fix or remove the row"):
        targets_of(row, template)
    assert targets_of(row, TOOLS)[-1].endswith(END)


def test_results_may_be_written_in_another_way():
    messages = [
        said("user", "Hi"),
        said("assistant", "", tool_calls=[CALL]),
        said("tool", '{"temperature": "4 \\"C\\""}'),
        said("assistant", "Yes"),
    ]
    as_json = TOOLS.replace("{{ m.content }}", "{{ m.content | tojson if m.content else '' }}")
    upper = TOOLS.replace("{{ m.content }}", "{{ m.content | upper }}").replace(
        "<|im_end|>", "{{ m.content if m.role == 'assistant' else '' }}<|im_end|>"
    )
    for template in (as_json, upper):
        assert targets_of({"messages": messages}, template)[0].startswith(CALLED)


def test_names_that_are_left_out_are_counted():
    named = [said("user", "Hi", name="Ann"), said("assistant", "Yes")]
    assert notes_of(named, CHATML) == (rendering.NO_NAMES,)
    assert notes_of(named, "{% for m in messages %}{{ m.name }}{% endfor %}" + CHATML) == ()
    assert notes_of(turns("Hi", "Yes"), CHATML) == ()
