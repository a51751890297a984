"""Conversations, prompts and instructions: what the model reads, and which characters of it are
targets.
"""

import pytest
from test_data import letter_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_ga import DataError
from hf_ga.finetuning.data.chat.rendering import RenderedRow, render_rows
from hf_ga.finetuning.data.encoding.tokenization import tokenize_causal
from hf_ga.finetuning.data.formats import corpus

IGNORED = -100
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Without a separate generation prompt, as Llama 2 and Mistral write it; it refuses two turns of one
# role.
INSTRUCT = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ "
    "raise_exception('roles must alternate') }}"
    "{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content "
    "}}</s>{% endif %}{% endfor %}"
)
# Thoughts are left out of all but the last turn, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else "
    "m.content.split('</think>')[-1] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_with(template):
    tokenizer = corpus.train_tokenizer(["some words to train on"], 280)
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<|im_start|>",
                "<|im_end|>",
                "[INST]",
                "[/INST]",
                "</s>",
                "<end>",
            ]
        }
    )
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents, system=None):
    """Messages of user and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def targets(rows, tokenizer):
    """Of each row the text, and the parts of it that are targets."""
    return [
        (row.text, [row.text[start:end] for start, end in row.targets])
        for row in render_rows(rows, tokenizer)
    ]


def decoded_targets(rows, tokenizer):
    """Of each row the labelled ids as text."""
    labels = tokenize_causal(rows, tokenizer, 512)["labels"]
    return [tokenizer.decode([i for i in row if i != IGNORED]) for row in labels]


def test_every_turn_of_the_assistant_is_a_target():
    tokenizer = tokenizer_with(CHATML)
    rows = {
        "messages": [
            turns("Hi", "Hello!", "How?", "Fine, é 日本."),
            turns("Hi", "Yes", system="Obey."),
            turns("Hi", "", "Hm"),
        ]
    }
    expected = [
        ["Hello!<|im_end|>\n", "Fine, é 日本.<|im_end|>\n"],
        ["Yes<|im_end|>\n"],
        ["<|im_end|>\n"],
    ]
    found = targets(rows, tokenizer)
    assert [parts for _, parts in found] == expected
    assert [text for text, _ in found] == [
        tokenizer.apply_chat_template(m, tokenize=False) for m in rows["messages"]
    ]
    assert found[0][0].startswith("<|im_start|>system\nBe kind.")
    assert "Be kind" not in found[1][0]
    assert decoded_targets(rows, tokenizer) == ["".join(parts) for parts in expected]


def test_a_template_without_a_generation_prompt():
    tokenizer = tokenizer_with(INSTRUCT)
    rows = {"messages": [turns("Hi", "Hello!", "How?", "Fine.")]}
    text = "<s>[INST] Hi [/INST] Hello!</s>[INST] How? [/INST] Fine.</s>"
    assert targets(rows, tokenizer) == [(text, [" Hello!</s>", " Fine.</s>"])]
    assert decoded_targets(rows, tokenizer) == [" Hello!</s> Fine.</s>"]


@pytest.mark.parametrize(
    ("rows", "asked", "answers"),
    [
        ({"prompt": ["Hi", ""], "completion": ["Hello!", "Yes"]}, ["Hi", ""], ["Hello!", "Yes"]),
        ({"instruction": ["Add", "Tell"], "output": ["3", "no"]}, ["Add", "Tell"], ["3", "no"]),
        (
            {"instruction": ["Add"] * 3, "input": ["1 2", "", None], "output": ["3"] * 3},
            ["Add\n\n1 2", "Add", "Add"],
            ["3"] * 3,
        ),
    ],
)
def test_prompts_and_instructions_are_turns_of_the_user(rows, asked, answers):
    tokenizer = tokenizer_with(CHATML)
    texts = [
        tokenizer.apply_chat_template(turns(*pair), tokenize=False)
        for pair in zip(asked, answers, strict=True)
    ]
    assert targets(rows, tokenizer) == [
        (text, [f"{answer}<|im_end|>\n"]) for text, answer in zip(texts, answers, strict=True)
    ]


def test_prompts_and_completions_of_messages():
    """Turns of the assistant in the prompt were given, not asked for."""
    tokenizer = tokenizer_with(CHATML)
    whole = turns("Hi", "Hello!", "How?", "Fine.", "And?", "Well.")
    rows = {"prompt": [whole[:3], whole[:5]], "completion": [whole[3:], whole[5:]]}
    expected = [["Fine.<|im_end|>\n", "Well.<|im_end|>\n"], ["Well.<|im_end|>\n"]]
    found = targets(rows, tokenizer)
    assert [parts for _, parts in found] == expected
    assert found[0][0] == found[1][0]
    assert targets({"messages": [whole]}, tokenizer)[0][1] == [
        "Hello!<|im_end|>\n",
        *expected[0],
    ]  # the control


def test_no_messages_are_an_empty_row():
    out = tokenize_causal({"messages": [[], turns("Hi", "Yes")]}, tokenizer_with(CHATML), 64)
    assert out["input_ids"][0] == []
    assert out["labels"][0] == []
    assert out["num_targets"][0] == 0 < out["num_targets"][1]
    out = tokenize_causal({"prompt": [[]], "completion": [[]]}, tokenizer_with(CHATML), 64)
    assert out["input_ids"] == [[]]
    assert out["num_targets"] == [0]
    out = tokenize_causal(
        {"messages": [turns("Hi"), turns("Hi", system="Obey.")]}, tokenizer_with(CHATML), 64
    )
    assert out["num_targets"] == [0, 0] and all(out["length"])  # no answer: no target


def test_a_template_that_rewrites_earlier_turns():
    """The targets are what the whole conversation shows of each turn."""
    tokenizer = tokenizer_with(FORGETFUL)
    thought = turns("Hi", "<think>Hm.</think>Hello!", "How?", "<think>So.</think>Fine.")
    ((text, parts),) = targets({"messages": [thought]}, tokenizer)
    assert parts == ["Hello!<end>", "<think>So.</think>Fine.<end>"]
    assert text == f"<user>Hi<end><assistant>{parts[0]}<user>How?<end><assistant>{parts[1]}"
    ((text, parts),) = targets({"messages": [thought[:2]]}, tokenizer)
    assert parts == ["<think>Hm.</think>Hello!<end>"]
    assert text.endswith(parts[0])
    ((text, parts),) = targets({"prompt": [thought[:3]], "completion": [thought[3:]]}, tokenizer)
    assert parts == ["<think>So.</think>Fine.<end>"]
    assert "Hm." not in text
    assert targets({"messages": [turns("Hi", "Yes", "How?", "Fine")]}, tokenizer)[0][1] == [
        "Yes<end>",
        "Fine<end>",
    ]


BROKEN = {
    "no list": ({"messages": ["Hi"]}, "must be a list of messages.* the row {'messages': 'Hi'}"),
    "JSON of no list": ({"messages": ["3"]}, "must be a list of messages"),
    "a dict of lists": (
        {"messages": [{"role": ["user"], "content": ["Hi"]}]},
        "role of a message must be a string",
    ),
    "no dict": ({"messages": [["Hi"]]}, "strings role and content"),
    "no content": ({"messages": [[{"role": "user"}]]}, "strings role and content"),
    "content in parts": (
        {"messages": [[{"role": "user", "content": [{"text": "Hi"}]}]]},
        "must be of type text",
    ),
    "no role": ({"messages": [[{"role": None, "content": "Hi"}]]}, "strings role and content"),
    "assistant first": ({"messages": [turns("Hi", "Yes")[1:]]}, "first turn is the assistant's"),
    "completion alone": (
        {"prompt": [[]], "completion": [turns("Hi", "Yes")[1:]]},
        "first turn is the assistant's",
    ),
    "completion of numbers": ({"prompt": ["a"], "completion": [3]}, "must be strings.*3"),
    "prompt of messages, completion of a string": (
        {"prompt": [turns("Hi")], "completion": ["Yes"]},
        "must be a list of messages",
    ),
    "prompt of a string, completion of messages": (
        {"prompt": ["Hi"], "completion": [turns("a")]},
        "must be of type text",
    ),
    "input of a number": (
        {"instruction": ["a"], "input": [3], "output": ["b"]},
        "must be strings.*3",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_rows_are_refused(case):
    rows, message = BROKEN[case]
    with pytest.raises(DataError, match=message):
        list(render_rows(rows, tokenizer_with(CHATML)))


def test_strings_without_a_template_stand_as_they_are():
    tokenizer = letter_tokenizer()
    rows = {"prompt": ["a b", ""], "completion": [" c", "d"]}
    assert list(render_rows(rows, tokenizer)) == [
        RenderedRow("a b c", [(3, 5)]),
        RenderedRow("d", [(0, 1)]),
    ]
    rows = {"instruction": ["a", "a", "a"], "input": ["b", "", None], "output": ["c"] * 3}
    assert targets(rows, tokenizer) == [
        ("a\n\nb\n\nc", ["c"]),
        ("a\n\nc", ["c"]),
        ("a\n\nc", ["c"]),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        {"messages": [turns("a", "b")]},
        {"prompt": [turns("a")], "completion": [turns("a", "b")[1:]]},
    ],
)
def test_messages_without_a_template_are_refused(rows):
    with pytest.raises(DataError, match="no chat template"):
        list(render_rows(rows, letter_tokenizer()))


def test_equal_turns_are_found_at_their_own_places():
    """Not by searching for the content: all turns have the same."""
    header = "<|im_start|>{}\n"
    end = "yes<|im_end|>\n"
    written = [
        header.format(role) + end for role in ("system", "user", "assistant", "user", "assistant")
    ]
    (row,) = render_rows({"messages": [turns(*["yes"] * 4, system="yes")]}, tokenizer_with(CHATML))
    ends = [len("".join(written[: i + 1])) for i in range(5)]
    assert row.text == "".join(written)
    assert row.targets == [(ends[i] - len(end), ends[i]) for i in (2, 4)]


def test_nothing_is_added_to_what_a_template_writes():
    """No special tokens and no end of text. The control: they are added to strings without a
    template.
    """
    tokenizer = tokenizer_with(CHATML)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<cls> $A", special_tokens=[("<cls>", tokenizer.cls_token_id)]
    )
    rows = {"prompt": ["Hi"], "completion": ["Hello!"]}
    ids = tokenize_causal(rows, tokenizer, 512)["input_ids"][0]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        turns("Hi", "Hello!"), tokenize=False
    )
    tokenizer.chat_template = None
    assert (
        tokenizer.decode(tokenize_causal(rows, tokenizer, 512)["input_ids"][0])
        == "<cls>HiHello!<eos>"
    )


TEMPLATES = {
    "raises": (
        "{{ raise_exception('no system turn, please') }}",
        "no system turn, please. Fix or remove",
    ),
    "undefined": ("{{ messages[0]['name'].first }}", "has no attribute 'name'"),
    "wrong type": ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
    "another beginning of turns": (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if "
        "add_generation_prompt %}A:{% endif %}",
        "cannot be located",
    ),
    "not Jinja": ("{% for m in messages %}", "Unexpected end of template"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_templates_that_cannot_be_used_show_the_row(case):
    template, message = TEMPLATES[case]
    with pytest.raises(DataError, match=f"{message}.*the row {{'messages'"):
        list(render_rows({"messages": [turns("Hi", "Yes")]}, tokenizer_with(template)))
