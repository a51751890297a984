"""What a row, or the name of a file, says and what could get lost without a word."""

import pytest
from chats import CHATML, TAGGED, TOOLS, said, targets_of, turns
from test_data import letter_tokenizer, prepared, write

from hf_ga.errors import DataError
from hf_ga.finetuning.data.formats.delimited import _cast_columns
from hf_ga.finetuning.data.formats.files import load_folder, load_splits

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SKIPS_TOOLS = TOOLS.replace("in messages %}", "in messages if m.role != 'tool' %}")
MARKS_ANSWERS_ONLY = TAGGED.replace(
    "{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}"
)


def texts_of(files):
    return load_splits(files)["train"]["text"][:]


@pytest.mark.parametrize(
    ("name", "other", "content"),
    [
        ("notes [1].jsonl", "notes 1.jsonl", '{{"text": "{}"}}\n'),
        ("t[1].csv", "t1.csv", "text,label\n{},x\n"),
        ("rows*.jsonl", "rows10.jsonl", '{{"text": "{}"}}\n'),
    ],
)
def test_a_name_with_wildcards_is_that_file(tmp_path, name, other, content):
    (tmp_path / name).write_text(content.format("right"))
    (tmp_path / other).write_text(content.format("wrong"))
    assert texts_of([str(tmp_path / name)]) == ["right"]


def test_a_message_whose_text_stands_elsewhere_too_is_missed():
    """The answer contains the tool's result, so the text contains it in any case."""
    messages = [
        said("user", "Weather?"),
        said("assistant", "", tool_calls=[CALL]),
        said("tool", "4 C"),
        said("assistant", "It is 4 C."),
    ]
    assert targets_of({"messages": messages}, TOOLS)  # the control
    with pytest.raises(DataError, match="does not render the message of the tool"):
        targets_of({"messages": messages}, SKIPS_TOOLS)


def test_turns_that_a_template_does_not_mark_are_missed():
    messages = turns("a", "b", "c", "d")
    assert targets_of({"messages": messages}, TAGGED) == ["b<|im_end|>", "d<|im_end|>"]
    with pytest.raises(DataError, match="marks 1 parts of 2 turns"):
        targets_of({"messages": messages}, MARKS_ANSWERS_ONLY)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("maybe", "bool"),
        ("1", "bool"),
        ("007", "int64"),
        ("1_0", "int64"),
        ("1.5", "int64"),
        ("nan", "float64"),
        ("1_0.5", "float64"),
    ],
)
def test_a_later_row_of_a_stream_of_another_type(text, dtype):
    """The first rows of a stream decide the types of its columns."""
    usual = {"bool": "true", "int64": "1", "float64": "1.5"}[dtype]
    with pytest.raises(DataError, match=f"a later one is '{text}'"):
        _cast_columns({"c": [usual, None, text]}, {"c": dtype})


@pytest.mark.parametrize(
    ("text", "dtype", "value"),
    [(" False", "bool", False), ("-7", "int64", -7), ("+1e3 ", "float64", 1000.0)],
)
def test_a_later_row_of_a_stream(text, dtype, value):
    assert _cast_columns({"c": [text, None]}, {"c": dtype}) == {"c": [value, None]}


def test_questions_without_answers_are_counted(tmp_path):
    answered = {"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [2]}}
    unanswered = {"question": "a", "context": "b c", "answers": {"text": [], "answer_start": []}}
    file = write(tmp_path / "rows.jsonl", [answered, unanswered, answered])
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="question-answering", validation_file=file, max_length=16)
    assert "train: 1 of 3 rows without an answer, so trained as unanswerable" in data.notes


HIDES_CONTENT_OF_CALLS = TOOLS.replace(
    "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
)


def test_a_turn_that_is_context_only_is_missed():
    """Its content stands beside a call, where some templates leave it out."""
    messages = [
        said("user", "Weather?"),
        said("assistant", "I look it up.", tool_calls=[CALL], weight=0),
        said("tool", "4 C"),
        said("assistant", "It is 4 C."),
    ]
    assert targets_of({"messages": messages}, TOOLS)  # the control
    with pytest.raises(DataError, match="does not render the message of the assistant"):
        targets_of({"messages": messages}, HIDES_CONTENT_OF_CALLS)


def test_an_option_is_not_a_part_of_another_ones_name():
    row = {"messages": turns("a", "b"), "chat_template_kwargs": {"thinking": False}}
    knows = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if thinking %}!{% endif %}")
    assert targets_of(row, knows)
    with pytest.raises(DataError, match="does not use the option 'thinking'"):
        targets_of(row, knows.replace("thinking", "enable_thinking"))


@pytest.mark.parametrize("role", ["Assistant", "chatgpt", "model"])
def test_other_names_of_the_assistant_are_learnt(role):
    messages = [said("user", "a"), said(role, "b")]
    assert targets_of({"messages": messages}, CHATML) == ["b<|im_end|>\n"]


def test_a_split_that_has_no_rows_is_missed(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"train": [{"text": "a"}], "validation": [{"text": "b"}, null]}')
    with pytest.raises(DataError, match="those under validation are not a list of objects"):
        load_splits([str(path)])


def test_other_keys_beside_the_rows_are_named(tmp_path):
    notes = []
    path = tmp_path / "rows.json"
    path.write_text('{"rows": [{"text": "a"}], "labels": ["neg", "pos"]}')
    assert load_splits([str(path)], notes=notes)["train"]["text"][:] == ["a"]
    assert notes == ["rows.json: rows under the key `rows` (not used: labels)"]


def test_splits_of_a_file_in_a_folder(tmp_path):
    content = '{"train": [{"text": "a"}], "validation": [{"text": "b"}]}'
    (tmp_path / "data.json").write_text(content)
    loaded = load_folder(tmp_path)
    assert {split: rows["text"][:] for split, rows in loaded.items()} == {
        "train": ["a"],
        "validation": ["b"],
    }
