"""Rows as OpenAI, TRL, axolotl and LLaMA-Factory write them: what each means, and what is refused
by name.
"""

import json
from pathlib import Path

import pytest
from chats import (
    CHATML,
    TOOLS,
    TOOLS_OF_JSON,
    WHOLE,
    learnt,
    said,
    targets_of,
    text_of,
    tokenizer_with,
    turns,
)
from column_types import LISTS, MESSAGES, TEXT, Columns, empty_rows
from datasets import DatasetDict, load_dataset
from test_data import prepared

from hf_ga import DataError
from hf_ga.finetuning.data.columns import choose_columns
from hf_ga.finetuning.data.options import DataOptions
from hf_ga.finetuning.data.tasks import TASKS

GREETING = turns("Hi", "Hello!")
FUNCTION = {"name": "weather", "arguments": {"city": "Oslo"}}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
SCHEMA = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOL = {"type": "function", "function": SCHEMA}
CALLED = '<call>weather {"city": "Oslo"}</call><|im_end|>\n'


def asked(**call) -> list[dict]:
    """A conversation with a call."""
    answer = said("assistant", "It is 4 C.")
    return [said("user", "Weather?"), {"role": "assistant", **call}, said("tool", "4 C"), answer]


SAME = {  # forms of the same conversation
    "OpenAI": {"messages": GREETING},
    "JSON": {"messages": json.dumps(GREETING)},
    "parts": {
        "messages": [
            said("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]),
            said("assistant", [{"type": "text", "text": "Hello!", "image_url": None}]),
        ]
    },
    "parts and strings": {
        "messages": [said("user", [{"type": "text", "text": "Hi"}]), said("assistant", "Hello!")]
    },
    "None is absent": {
        "messages": [
            said("user", "Hi", tool_calls=None, weight=None, name=None, anything=None),
            said("assistant", "Hello!", tool_calls=None, reasoning_content=None, train=None),
        ],
        "tools": None,
        "system": None,
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    },
    "ShareGPT with OpenAI's roles": {
        "conversations": [
            {"from": "user", "value": "Hi"},
            {"from": "assistant", "value": "Hello!"},
        ]
    },
    "ShareGPT's roles": {"conversations": [said("human", "Hi"), said("gpt", "Hello!")]},
    "ShareGPT in JSON": {
        "conversations": json.dumps(
            [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
        )
    },
    "pygmalion": {
        "conversations": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello!"}]
    },
    "messages of ShareGPT": {
        "messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
    },
    "TRL's prompt": {"prompt": GREETING[:1], "completion": GREETING[1:]},
    "strings": {"prompt": "Hi", "completion": "Hello!"},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello!"},
    "Alpaca without history": {
        "instruction": "Hi",
        "output": "Hello!",
        "system": "",
        "history": [],
    },
    "nothing to call": {"messages": GREETING, "tools": "", "functions": []},
    "nothing to call in JSON": {"messages": GREETING, "tools": "null", "functions": "[]"},
}


@pytest.mark.parametrize("form", SAME)
def test_forms_of_one_conversation(form):
    header = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(SAME[form], CHATML) == f"{header}Hello!<|im_end|>\n"
    assert learnt(SAME[form], CHATML) == "Hello!<|im_end|>\n"


CALLS = {  # forms of the same call
    "empty content": asked(content="", tool_calls=[CALL]),
    "no content": asked(tool_calls=[CALL]),
    "content None": asked(content=None, tool_calls=[CALL]),
    "arguments as JSON": asked(
        tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": '{"city": "Oslo"}'}}]
    ),
    "the function alone": asked(tool_calls=[FUNCTION]),
    "filled with None": asked(
        tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": {"city": "Oslo", "unit": None}}}]
    ),
    "a single call": asked(tool_calls=CALL),
    "calls as JSON": asked(tool_calls=json.dumps([CALL])),
    "OpenAI's function_call": asked(content=None, function_call=FUNCTION),
    "a result of a function": [
        said("function" if turn["role"] == "tool" else turn["role"], turn.get("content"), **more)
        for turn, more in zip(
            asked(), ({}, {"tool_calls": [CALL]}, {"name": "weather"}, {}), strict=True
        )
    ],
    "ShareGPT of LLaMA-Factory": [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": json.dumps(FUNCTION)},
        {"from": "observation", "value": "4 C"},
        {"from": "gpt", "value": "It is 4 C."},
    ],
    "ShareGPT with tool": [
        {"from": "human", "value": "Weather?"},
        {"from": "gpt", "value": "", "tool_calls": [CALL]},
        {"from": "tool", "value": "4 C"},
        {"from": "gpt", "value": "It is 4 C."},
    ],
}


@pytest.mark.parametrize("template", [TOOLS, TOOLS_OF_JSON], ids=["dicts", "JSON"])
@pytest.mark.parametrize("form", CALLS)
def test_calls_are_targets_and_results_are_not(form, template):
    """The control: without the call, the turn would be only its end."""
    row = {"messages": CALLS[form], "tools": [TOOL]}
    assert targets_of(row, template) == [CALLED, "It is 4 C.<|im_end|>\n"]
    assert learnt(row, template) == CALLED + "It is 4 C.<|im_end|>\n"
    text = text_of(row, template)
    assert text.startswith(f"<|im_start|>system\n[{json.dumps(TOOL)}]<|im_end|>\n")
    assert "<|im_start|>tool\n4 C<|im_end|>" in text


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"tools": [SCHEMA]},
        {"functions": [SCHEMA]},
        {"tools": [{**TOOL, "function": {**SCHEMA, "strict": None}}]},
        {
            "tools": [
                {**TOOL, "function": {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}}
            ]
        },
    ],
    ids=str,
)
def test_tools_reach_the_template(columns):
    text = text_of({"messages": GREETING, **columns}, TOOLS)
    assert text.startswith(f"<|im_start|>system\n[{json.dumps(TOOL)}]<|im_end|>\n")


def test_rows_of_a_file_with_different_keys(tmp_path):
    """`datasets` fills the keys that a message lacks with None, or keeps the messages as JSON: both
    give the same rows.
    """
    other = {**CALL, "function": {"name": "add", "arguments": {"x": 1, "y": [2, None]}}}
    rows = [
        {"messages": asked(content=None, tool_calls=[CALL]), "tools": [TOOL]},
        {"messages": GREETING, "tools": None},
        {"messages": asked(tool_calls=[other, CALL]), "tools": [TOOL]},
        {"messages": [said("user", "Hi"), said("assistant", "Yes", weight=0)], "tools": None},
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = load_dataset("json", data_files=str(tmp_path / "d.jsonl"), split="train")
    found = [targets_of(row, TOOLS) for row in loaded]
    assert found == [targets_of(row, TOOLS) for row in rows]
    assert [len(parts) for parts in found] == [2, 1, 2, 0]
    assert found[2][0].startswith('<call>add {"x": 1, "y": [2, null]}</call><call>weather')


MARKED = {  # marks of the four turns (None: without) -> which answers are learnt
    "weight 0": ([{}, {"weight": 0}, {}, {"weight": 1}], ["second"]),
    "weight 0.0": (
        [{"weight": 0.0}, {"weight": 0.0}, {"weight": 0.0}, {"weight": 1.0}],
        ["second"],
    ),
    "train false": ([{}, {"train": False}, {}, {"train": True}], ["second"]),
    "train false at the end": ([{}, {}, {}, {"train": False}], ["first"]),
    "both": ([{}, {"train": True, "weight": 0}, {}, {"train": True}], ["second"]),
    "weights of 1": ([{}, {"weight": 1}, {}, {"weight": True}], ["first", "second"]),
    "the user's, too": ([{"train": False}, {}, {"weight": 0}, {}], ["first", "second"]),
    "none": ([{}, {"weight": 0}, {}, {"weight": 0}], []),
}


@pytest.mark.parametrize("case", MARKED)
def test_turns_that_are_left_out_have_no_targets(case):
    """They are read as context; the text does not change."""
    marks, answers = MARKED[case]
    plain = turns("Hi", "first", "And?", "second")
    marked = [{**turn, **mark} for turn, mark in zip(plain, marks, strict=True)]
    expected = [f"{answer}<|im_end|>\n" for answer in answers]
    assert targets_of({"messages": marked}, CHATML) == expected
    assert learnt({"messages": marked}, CHATML) == "".join(expected)
    assert text_of({"messages": marked}, CHATML) == text_of({"messages": plain}, CHATML)


ALPACA = {
    "instruction": "Say 3",
    "output": "3",
    "system": "Use digits.",
    "history": [["Say 1", "1"], ["Say 2", "2"]],
}


def test_alpaca_with_system_and_history():
    """Answers of the history are learnt, as LLaMA-Factory does."""
    whole = turns("Say 1", "1", "Say 2", "2", "Say 3", "3")
    expected = {"messages": [said("system", "Use digits."), *whole]}
    assert text_of(ALPACA, CHATML) == text_of(expected, CHATML)
    assert targets_of(ALPACA, CHATML) == [f"{number}<|im_end|>\n" for number in (1, 2, 3)]


def test_alpaca_without_a_template():
    text = "Use digits.\n\nSay 1\n\n1\n\nSay 2\n\n2\n\nSay 3\n\n3"
    assert text_of(ALPACA, None) == text
    assert targets_of(ALPACA, None) == ["1", "2", "3"]
    assert learnt(ALPACA, None) == "123<eos>"
    prompt = {"prompt": "a b", "completion": " c", "system": "Obey."}
    assert text_of(prompt, None) == "Obey.\n\na b c"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": GREETING, "system": "Obey."},
        {"conversations": SAME["ShareGPT"]["conversations"], "system": "Obey."},
        {"prompt": "Hi", "completion": "Hello!", "system": "Obey."},
        {"instruction": "Hi", "output": "Hello!", "system": "Obey."},
        {"messages": [said("system", "Obey."), *GREETING]},
    ],
    ids=lambda row: "+".join(row),
)
def test_a_column_of_system_prompts(row):
    text = text_of(row, CHATML)
    assert text.startswith("<|im_start|>system\nObey.<|im_end|>\n<|im_start|>user\nHi")
    assert targets_of(row, CHATML) == ["Hello!<|im_end|>\n"]


def test_options_of_the_template():
    template = "{% if shout %}!{% endif %}" + CHATML
    for options in ({"shout": True}, '{"shout": true}', {"shout": True, "other": None}):
        row = {"messages": GREETING, "chat_template_kwargs": options}
        assert text_of(row, template).startswith("!<|im_start|>user")
    assert text_of({"messages": GREETING}, template).startswith("<|im_start|>")


REFUSED = {
    "an unknown key": ([said("user", "Hi", mask=1)], "unknown key 'mask'.*may change.*content"),
    "axolotl's train_detail": (
        [said("user", "Hi"), said("assistant", "Hm", train_detail=[{"train": False}])],
        "unknown key 'train_detail'",
    ),
    "OpenAI's refusal": ([said("assistant", "Hm", refusal="No.")], "unknown key 'refusal'"),
    "an image": (
        [said("user", [{"type": "image_url", "image_url": {"url": "a.png"}}])],
        "must be of type text.*got {'type': 'image_url'",
    ),
    "axolotl's parts with train": (
        [said("user", "Hi"), said("assistant", [{"type": "text", "text": "a", "train": False}])],
        "only have a text, got {.*'train'",
    ),
    "parts that are strings": ([said("user", ["Hi"])], "must be of type text.*got 'Hi'"),
    "half a weight": (
        [said("user", "Hi"), said("assistant", "Hm", weight=0.5)],
        "weight of a message must be 0 or 1.*got 0.5.*--weight_column",
    ),
    "train in words": (
        [said("user", "Hi"), said("assistant", "Hm", train="no")],
        "train of a message must be 0 or 1.*got 'no'",
    ),
    "a user to learn": ([said("user", "Hi", train=True)], "train asks to learn.*of the user"),
    "a system to learn": ([said("system", "Hi", weight=1)], "weight asks to learn.*of the system"),
    "two roles": ([{"role": "user", "from": "gpt", "content": "a"}], "different role and from"),
    "two contents": (
        [{"role": "user", "value": "b", "content": "a"}],
        "different value and content",
    ),
    "nothing said": ([said("user", None)], "needs the strings role and content"),
    "no calls either": ([said("assistant", None, tool_calls=[])], "strings role and content"),
    "thoughts of numbers": (
        [said("assistant", "a", thinking=3)],
        "thinking of a message must be a string, got 3",
    ),
    "two thoughts": (
        [said("assistant", "a", thinking="b", reasoning="c")],
        "different thinking and reasoning",
    ),
    "a call without a name": (asked(tool_calls=[{"id": "c1"}]), "a tool call must consist of"),
    "a call of another type": (
        asked(tool_calls=[{**CALL, "type": "custom"}]),
        "a tool call must consist of",
    ),
    "a call with more": (asked(tool_calls=[{**CALL, "weight": 0}]), "must consist of.*weight"),
    "arguments that are no JSON": (
        asked(tool_calls=[{"name": "f", "arguments": "{city"}]),
        "arguments of a tool call must be a mapping.*'{city'",
    ),
    "arguments in a list": (
        asked(tool_calls=[{"name": "f", "arguments": [1]}]),
        r"arguments of a tool call must be a mapping.*\[1\]",
    ),
    "a call in words": (
        [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f(1)"}],
        "must be a list of calls.*f\\(1\\)",
    ),
    "words for JSON": ("user: Hi", "must be a list of messages.*'user: Hi'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_messages_that_are_refused(case):
    messages, words = REFUSED[case]
    with pytest.raises(DataError, match=f"{words}.*Fix or remove the row"):
        text_of({"messages": messages}, TOOLS)


REFUSED_ROWS = {
    "two system prompts": (
        {"messages": [said("system", "a"), *GREETING], "system": "b"},
        "column system and a system turn",
    ),
    "history in a dict": ({**ALPACA, "history": [{"a": "b"}]}, "history must be a list of pairs"),
    "half a pair": ({**ALPACA, "history": [["Say 1"]]}, "history must be a list of pairs"),
    "history of numbers": ({**ALPACA, "history": [["Say 1", 1]]}, "must be strings"),
    "tools in words": ({"messages": GREETING, "tools": "weather"}, "tools must be.*'weather'"),
    "tools without names": ({"messages": GREETING, "tools": [{"type": "web"}]}, "name of its"),
    "an unknown option": (
        {"messages": GREETING, "chat_template_kwargs": {"shout": True}},
        "does not use the option 'shout'",
    ),
    "options in a list": (
        {"messages": GREETING, "chat_template_kwargs": ["shout"]},
        "chat_template_kwargs must be a mapping",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ROWS)
def test_rows_that_are_refused(case):
    row, words = REFUSED_ROWS[case]
    with pytest.raises(DataError, match=words):
        text_of(row, TOOLS)


@pytest.mark.parametrize(
    "row",
    [
        SAME["ShareGPT"],
        {**SAME["Alpaca"], "tools": [TOOL]},
        {**SAME["strings"], "chat_template_kwargs": {"a": 1}},
    ],
    ids=lambda row: "+".join(row),
)
def test_without_a_template_nothing_is_left_out(row):
    with pytest.raises(DataError, match="no chat template"):
        text_of(row, None)


# Columns of a dataset, and how the error names what they hold.
OTHER_DATA: list[tuple[Columns, str]] = [
    (
        {"prompt": TEXT, "completion": TEXT, "label": TEXT},
        "completion, label have .*labels of preferences.*KTO",
    ),
    ({"messages": MESSAGES, "kto_tag": TEXT}, "kto_tag have .*labels of preferences"),
    (
        {"instruction": TEXT, "input": TEXT, "output": TEXT, "kto_tag": TEXT},
        "kto_tag have .*labels of preferences",
    ),
    ({"prompt": TEXT}, "prompts without completions.*nothing to learn.*--text_column"),
    ({"prompt": MESSAGES, "answer": TEXT}, "prompts without completions.*prompt, answer"),
    ({"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}, "chosen, rejected have preferences"),
    ({"chosen": MESSAGES, "rejected": MESSAGES}, "chosen, rejected have preferences"),
    ({"instruction": TEXT, "chosen": TEXT, "rejected": TEXT}, "chosen, rejected have preferences"),
    (
        {"input": TEXT, "preferred_output": TEXT, "non_preferred_output": TEXT},
        "non_preferred_output have preferences",
    ),
    (
        {"prompt": TEXT, "completions": LISTS, "labels": LISTS},
        "completions, labels have .*reward models",
    ),
    ({"segments": LISTS}, "segments have texts that skip the chat template"),
    ({"messages": MESSAGES, "images": LISTS}, "columns images have images"),
    ({"messages": MESSAGES, "videos": TEXT}, "videos"),
    ({"messages": MESSAGES, "audio": TEXT}, "sound"),
]


def chosen(columns: Columns, **flags) -> dict[str, str]:
    rows = DatasetDict(train=empty_rows(columns))
    return choose_columns(rows, DataOptions(**flags), TASKS["causal-lm"])


@pytest.mark.parametrize(("columns", "message"), OTHER_DATA)
def test_preferences_and_images_are_refused_by_name(columns, message):
    with pytest.raises(DataError, match=message):
        chosen(columns)


def test_a_named_text_and_other_labels_are_no_preferences():
    completions = {"prompt": TEXT, "completion": TEXT, "label": TEXT}
    assert chosen(completions, text_column="prompt") == {"text": "prompt"}
    assert chosen({"text": TEXT, "label": TEXT}) == {"text": "text"}
    preferences = {"text": TEXT, "audio": TEXT, "chosen": TEXT, "rejected": TEXT}
    assert chosen(preferences) == {"text": "text"}


UNUSED = [
    ({"messages": GREETING, "id": "a", "source": "b"}, "unused columns: id, source"),
    ({"prompt": "a", "completion": "b", "text": "c"}, "unused columns: text"),
    ({"text": "a b", "label": 1, "url": "c"}, "unused columns: label, url"),
    ({"text": "a b"}, None),
    ({**ALPACA, "input": ""}, None),
]


@pytest.mark.parametrize(("row", "line"), UNUSED, ids=str)
def test_columns_that_are_not_used_are_named_once(row, line, tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join([json.dumps(row)] * 9))
    data = prepared(tmp_path / "d.jsonl", tokenizer_with(CHATML), max_length=512)
    assert [fact for fact in data.notes if "unused" in fact] == ([line] if line else [])


# The forms of the section about conversations in docs/finetune.md, by library.
USED_FORMS: dict[str, dict] = {
    "messages (all)": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    },
    "messages as a string of JSON": {
        "messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
    },
    "system or developer turn (all)": {
        "messages": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
        ]
    },
    "turns that are not learnt (OpenAI)": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "5", "weight": 0},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "4", "weight": 1},
        ]
    },
    "the same (axolotl)": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "5", "train": False},
            {"role": "user", "content": "No."},
            {"role": "assistant", "content": "4"},
        ]
    },
    "calls and tools (OpenAI, TRL, axolotl)": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4 C"},
            {"role": "assistant", "content": "It is 4 C."},
        ],
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
        ],
    },
    "calls (OpenAI, older)": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": "{}"},
            },
            {"role": "function", "name": "weather", "content": "4 C"},
            {"role": "assistant", "content": "It is 4 C."},
        ],
        "functions": [{"name": "weather", "parameters": {"type": "object"}}],
    },
    "tools as a string of JSON (TRL, LLaMA-Factory)": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        "tools": '[{"name": "weather", "parameters": {"type": "object"}}]',
    },
    "thoughts (TRL, axolotl)": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "add them"},
        ]
    },
    "thoughts in the content (axolotl, LLaMA-Factory)": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>Hm.</think>Hello"},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
        ]
    },
    "parts of type text (OpenAI)": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        ]
    },
    "names (OpenAI)": {
        "messages": [
            {"role": "user", "content": "Hi", "name": "Ann"},
            {"role": "assistant", "content": "Hello"},
        ]
    },
    "ShareGPT (TRL, axolotl, LLaMA-Factory)": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    },
    "ShareGPT with calls (LLaMA-Factory)": {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {
                "from": "function_call",
                "value": '{"name": "weather", "arguments": {"city": "Oslo"}}',
            },
            {"from": "observation", "value": "4 C"},
            {"from": "gpt", "value": "It is 4 C."},
        ],
        "system": "Be kind.",
        "tools": '[{"name": "weather"}]',
    },
    "pygmalion (axolotl)": {
        "conversations": [{"role": "user", "value": "Hi"}, {"role": "assistant", "value": "Hello"}]
    },
    "prompt and completion (TRL)": {"prompt": "The sky is", "completion": " blue."},
    "the same as messages (TRL)": {
        "prompt": [{"role": "user", "content": "Hi"}],
        "completion": [{"role": "assistant", "content": "Hello"}],
    },
    "options of the template (TRL)": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "Alpaca (axolotl, LLaMA-Factory)": {"instruction": "Add", "input": "1 2", "output": "3"},
    "Alpaca with earlier turns (LLaMA-Factory)": {
        "instruction": "Say 3",
        "input": "",
        "output": "3",
        "system": "Use digits.",
        "history": [["Say 1", "1"], ["Say 2", "2"]],
    },
    "plain text (all)": {"text": "The sky is blue."},
}
REFUSED_FORMS: dict[str, dict] = {
    "turns of the user to learn (axolotl)": {
        "messages": [
            {"role": "user", "content": "Hi", "train": True},
            {"role": "assistant", "content": "Hello"},
        ]
    },
    "parts of a turn to learn (axolotl)": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Hello",
                "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}],
            },
        ]
    },
    "the same as parts of a content (axolotl)": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Hm.", "train": False},
                    {"type": "text", "text": " Hello"},
                ],
            },
        ]
    },
    "parts of thoughts (axolotl)": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": "4",
                "reasoning_content": [{"type": "text", "text": "5", "train": False}],
            },
        ]
    },
    "images and sound in a content (OpenAI, TRL)": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "cat.png"}}]},
            {"role": "assistant", "content": "A cat"},
        ]
    },
    "columns of images and sound (TRL, LLaMA-Factory)": {
        "messages": [
            {"role": "user", "content": "<image>What?"},
            {"role": "assistant", "content": "A cat"},
        ],
        "images": ["cat.png"],
    },
    "a refusal (OpenAI)": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "refusal": "No."}]
    },
    "other instructions (axolotl)": {
        "system_prompt": "Be kind.",
        "question": "Hi",
        "response": "Hello",
    },
    "segments (axolotl)": {
        "segments": [{"label": False, "text": "Hi "}, {"label": True, "text": "Hello"}]
    },
    "token ids (axolotl)": {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]},
    "prompts alone (TRL)": {"prompt": "The sky is"},
    "preferences (OpenAI)": {
        "input": {"messages": [{"role": "user", "content": "Hi"}]},
        "preferred_output": [{"role": "assistant", "content": "Hello"}],
        "non_preferred_output": [{"role": "assistant", "content": "What?"}],
    },
    "preferences (TRL, axolotl, LLaMA-Factory)": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "labels of preferences, as for KTO (TRL)": {
        "prompt": "2+2?",
        "completion": "5",
        "label": False,
    },
    "the same (LLaMA-Factory)": {
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "5"}],
        "kto_tag": False,
    },
    "steps with labels (TRL, axolotl)": {
        "prompt": "2+2?",
        "completions": ["2+2 is", "5"],
        "labels": [True, False],
    },
}


@pytest.mark.parametrize("form", USED_FORMS)
def test_the_forms_that_the_page_says_are_used(form, tmp_path):
    """From a file, without an unused column."""
    file = written(USED_FORMS[form], tmp_path)
    data = prepared(file, tokenizer_with(WHOLE), max_length=512, validation_file=file)
    assert sum(data.splits["train"]["num_targets"]) > 0
    assert not any("unused" in fact for fact in data.notes)


def written(row: dict, folder: Path) -> str:
    """A file with nine equal rows."""
    file = folder / "d.jsonl"
    file.write_text("\n".join([json.dumps(row)] * 9))
    return str(file)


@pytest.mark.parametrize("form", REFUSED_FORMS)
def test_the_forms_that_the_page_says_are_refused(form, tmp_path):
    """From a file."""
    file = written(REFUSED_FORMS[form], tmp_path)
    with pytest.raises(DataError):
        prepared(file, tokenizer_with(WHOLE), max_length=512, validation_file=file)


def test_the_page_names_every_key_of_the_forms_that_are_used():
    page = (Path(__file__).parents[3] / "docs" / "finetune.md").read_text()
    section = page.split("## Conversations")[1].split("\n## ")[0]
    keys = {key for row in USED_FORMS.values() for key in keys_of(row)}
    assert {key for key in keys if f"`{key}`" not in section} == set()
    forms = " ".join([*USED_FORMS, *REFUSED_FORMS])
    for library in ("OpenAI", "TRL", "axolotl", "LLaMA-Factory"):
        assert library in section
        assert forms.count(library) >= 5, library


def keys_of(row: dict) -> set[str]:
    """The columns of a row and the keys of its messages."""
    columns = [row[name] for name in ("messages", "conversations") if name in row]
    messages = [message for column in columns if isinstance(column, list) for message in column]
    return {*row, *(key for message in messages for key in message)}
