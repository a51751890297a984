"""What a row, or the name of a file, says and what could get lost without a word."""

import pytest
from chats import TAGGED, TOOLS, said, targets_of, turns
from test_data import letter_tokenizer, prepared, write

from hf_ga.errors import DataError
from hf_ga.finetuning.data.files import load_splits

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


# `datasets` leaves the file open when the reading of a stream ends with an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(
    ("first", "later", "message"),
    [("true", "maybe", "neither true nor false"), ("7", "007", "is a code")],
)
def test_a_later_row_of_a_stream_of_another_type(tmp_path, first, later, message):
    """The first rows of a stream decide the types of its columns."""
    rows = [f"words,{first}"] * 1000 + [f"others,{later}"]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["text,label", *rows]))
    stream = load_splits([str(path)], streaming=True)["train"]
    with pytest.raises(ValueError, match=message):
        list(stream)


def test_questions_without_answers_are_counted(tmp_path):
    answered = {"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [2]}}
    unanswered = {"question": "a", "context": "b c", "answers": {"text": [], "answer_start": []}}
    file = write(tmp_path / "rows.jsonl", [answered, unanswered, answered])
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="question-answering", validation_file=file, max_length=16)
    assert "train: 1 of 3 rows without an answer, so trained as unanswerable" in data.facts
