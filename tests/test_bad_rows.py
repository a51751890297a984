"""Every column of every task: missing, of another type, null, out of range. The row is named before a model is built, or it is left
out and counted, by number too.
"""

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers as tf
from datasets import Dataset, DatasetDict
from test_bad_input import arguments_of, assert_one_line, files, no_model  # noqa: F401 (fixtures)

import hf_ga
from hf_ga.data import corpus
from hf_ga.data.column_checks import check_token_ids
from hf_ga.data.columns import choose_columns
from hf_ga.data.data import prepare_data
from hf_ga.data.file_checks import lines_of_rows
from hf_ga.data.row_checks import RowsError
from hf_ga.data.sources import load_file, load_rows
from hf_ga.data.tasks import TASKS
from hf_ga.run import cli
from hf_ga.run.config import FinetuneConfig

WRONG, COUNT = 6, 12  # the row that is wrong, of so many
EMPTY = "train: 1 of 11 rows left out because they are empty: row 6"
WORDS = "some words to learn"
ASKED = {"text": ["words"], "answer_start": [5]}


def fitting(number: int) -> dict[str, dict]:
    """A good row of every kind."""
    return {
        "causal-lm": {"text": f"{WORDS} {number}"},
        "causal-lm, completions": {"prompt": WORDS, "completion": f" n{number}"},
        "causal-lm, instructions": {"instruction": WORDS, "input": "a", "output": f" n{number}"},
        "causal-lm, conversations": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": WORDS}]},
        "masked-lm": {"text": f"{WORDS} {number}"},
        "text-classification": {"text": WORDS, "second": "more", "label": number % 2},
        "regression": {"text": WORDS, "second": "more", "label": number / 2},
        "multi-label": {"text": WORDS, "second": "more", "labels": [["x"], ["x", "y"]][number % 2]},
        "token-classification": {"tokens": ["a", "b"], "tags": ["x", "y"]},
        "question-answering": {"question": "what?", "context": WORDS, "answers": ASKED},
        "question-answering, flat": {"question": "what?", "context": WORDS, "answer": "words", "answer_start": 5},
        "multiple-choice": {"question": "what?", "begin": "it is", "choices": ["a", "b"], "label": number % 2},
        "multiple-choice, numbered": {"question": "what?", "ending0": "a", "ending1": "b", "label": number % 2},
        "seq2seq": {"source": WORDS, "target": f"some {number}"},
    }


PAIR = "text_pair_column"
TEXT = {
    "missing": ["text_column", "is not in the train rows", "--text_column"],
    "type": (5, ["row 6 of train holds 5 (line 7 of", "the text column", "not strings", "--text_column"]),
    "null": (None, EMPTY),
}
SECOND = {
    "missing": ["text_pair_column 'second' is not in the train rows", "--text_pair_column"],
    "type": ([1], ["row 6 of train holds [1] (line 7 of", "the text column", "not strings", "--text_pair_column"]),
    "null": (None, ""),  # a pair may lack its second text
}
CHAT = {
    "missing": ["text_column 'text' is not in the train rows", "--text_column"],
    "type": (5, ["row 6 of train (columns", "(line 7 of", "a string is needed, but found 5"]),
    "null": (None, ["row 6 of train (columns", "(line 7 of", "a string is needed, but found None"]),
}
QUESTION = {
    "missing": ["text_column", "is not in the train rows", "--text_column"],
    "type": (5, ["row 6 of train holds 5 (line 7 of", "column", "not strings", "--text_column"]),
    "null": (None, EMPTY),
}
NO_LABEL = ["label_column", "is not in the train rows", "--label_column"]
CLASSES = "the labels must be lists of names or whole numbers"
SHAPE = 'they must be {"text": [strings], "answer_start": [whole numbers]}'
# kind: column: what may be wrong: (value, words of the message, or the line that counts it). A missing column has words only.
BAD: dict[str, dict[str, dict]] = {
    "causal-lm": {"text": TEXT},
    "causal-lm, completions": {
        "prompt": {**CHAT, "missing": ""},  # what is left is the only column of strings
        "completion": {**CHAT, "missing": ""},
    },
    "causal-lm, instructions": {
        "instruction": CHAT,
        "input": {"missing": "", "null": (None, ""), "type": CHAT["type"]},  # it may be left out
        "output": CHAT,
    },
    "causal-lm, conversations": {
        "messages": {
            "missing": CHAT["missing"],
            "type": (
                "hello",
                ["row 6 of train (columns messages)", "(line 7 of", "a list of messages is needed", "'hello'"],
            ),
            "null": (None, ["row 6 of train (columns messages)", "(line 7 of", "a list of messages is needed", "None"]),
            "range": ([{"role": "user", "content": None}], ["row 6 of train", "a message needs the strings role and content"]),
        }
    },
    "masked-lm": {"text": TEXT},
    "text-classification": {
        "text": {**TEXT, "null": (None, "")},  # its pair has a second text
        "second": SECOND,
        "label": {
            "missing": NO_LABEL,
            "type": ([1], ["row 6 of train has the label [1] (line 7 of", "the labels must be names or whole numbers"]),
            "null": (None, ["row 6 of train has the label None (line 7 of", "the labels must be names or whole numbers"]),
            "range": (-100, ["row 6 of train has the label -100 (line 7 of", "-100 stands for what is ignored"]),
        },
    },
    "regression": {
        "text": {**TEXT, "null": (None, "")},
        "second": SECOND,
        "label": {
            "missing": NO_LABEL,
            "type": ("x", ["row 6 of train has the label 'x' (line 7 of", "must be finite numbers"]),
            "null": (None, ["row 6 of train has the label None (line 7 of", "must be finite numbers"]),
            "range": (float("nan"), ["row 6 of train has the label nan (line 7 of", "must be finite numbers"]),
            "range of float32": (1e39, ["row 6 of train has the label 1e+39 (line 7 of", "too large ones for float32"]),
        },
    },
    "multi-label": {
        "text": {**TEXT, "null": (None, "")},
        "second": SECOND,
        "labels": {
            "missing": NO_LABEL,
            "type": ("x", ["row 6 of train has the label 'x' (line 7 of", CLASSES]),
            "null": (None, ""),  # none of the labels
            "null inside": (["x", None], ["row 6 of train has the label ['x', None] (line 7 of", CLASSES]),
            "range": ([0.5], ["row 6 of train has the label [0.5] (line 7 of", CLASSES]),
        },
    },
    "token-classification": {
        "tokens": {
            "missing": ["text_column 'tokens' is not in the train rows", "--text_column"],
            "type": ("a b", ["row 6 of train holds 'a b' (line 7 of", "must be lists of strings", "--text_column"]),
            "null": (None, ["row 6 of train has 0 words but 2 tags (line 7 of", "every word needs one tag"]),
            "null inside": (["a", None], ["row 6 of train has a word that is null (line 7 of", "every word must be a string"]),
            "range": (["a"], ["row 6 of train has 1 words but 2 tags (line 7 of"]),
            "no token": (
                ["a", ""],
                "train: 1 of 11 rows have words of which no token is left, so that nobody learns their tags: row 6",
            ),
        },
        "tags": {
            "missing": ["label_column 'tags' is not in the train rows", "--label_column"],
            "type": ("xy", ["row 6 of train has the label 'xy' (line 7 of", CLASSES]),
            "null": (None, ["row 6 of train has 2 words but 0 tags (line 7 of"]),
            "null inside": (["x", None], ["row 6 of train has the label ['x', None] (line 7 of", CLASSES]),
            "range": (["x"], ["row 6 of train has 2 words but 1 tags (line 7 of"]),
        },
    },
    "question-answering": {
        "question": QUESTION,
        "context": {
            "missing": ["text_pair_column 'context' is not in the train rows", "--text_pair_column"],
            "type": (5, ["row 6 of train holds 5 (line 7 of", "context column", "--text_pair_column"]),
            "null": (None, ["row 6 of train ('what?'): the answer 'words' is not at character 5 of its context, where ''"]),
        },
        "answers": {
            "missing": ["label_column 'answers' is not in the train rows"],
            "type": ({"text": [5], "answer_start": [5]}, ["row 6 of train ('what?') has", "(line 7 of", SHAPE]),
            "null": (None, "train: 1 of 11 rows have no answer"),
            "range": (
                {"text": ["words"], "answer_start": [10**12]},
                ["row 6 of train ('what?')", "not at character 1000000000000"],
            ),
            "negative": (
                {"text": ["words"], "answer_start": [-1]},
                ["row 6 of train ('what?')", "is not at character -1", "line 7"],
            ),
            "length": ({"text": ["words"], "answer_start": [5, 6]}, ["row 6 of train ('what?') has", SHAPE]),
        },
    },
    "question-answering, flat": {
        "question": QUESTION,
        "context": {
            "missing": ["text_pair_column 'context' is not in the train rows", "--text_pair_column"],
            "type": ([1], ["row 6 of train holds [1] (line 7 of", "context column", "--text_pair_column"]),
            "null": (None, ["row 6 of train ('what?'): the answer 'words' is not at character 5 of its context, where ''"]),
        },
        "answer": {
            "missing": ["label_column 'answers' is not in the train rows"],
            "type": (5, ["row 6 of train ('what?') has 5 and 5 for its answers (line 7 of", SHAPE]),
            "null": (None, "train: 1 of 11 rows have no answer"),
            "range": ("word!", ["row 6 of train ('what?'): the answer 'word!' is not at character 5", "'words' stands (line 7"]),
        },
        "answer_start": {
            "missing": ["no column 'answer_start'"],
            "type": ([5], ["row 6 of train ('what?') has 'words' and [5] for its answers (line 7 of", SHAPE]),
            "null": (None, ["row 6 of train ('what?') has 'words' and None for its answers (line 7 of", SHAPE]),
            "range": (6, ["row 6 of train ('what?'): the answer 'words' is not at character 6", "counts characters from 0"]),
        },
    },
    "multiple-choice": {
        "question": QUESTION,
        "begin": {**SECOND, "missing": ["text_pair_column 'begin' is not in the train rows"]},
        "choices": {
            "missing": ["choices_column 'choices' is not in the train rows", "--choices_column"],
            "type": ("a, b", ["row 6 of train ('what?') has no list of strings", "'a, b'", "(line 7 of", "--choices_column"]),
            "null": (None, ["row 6 of train ('what?') has no list of strings", "None", "(line 7 of", "--choices_column"]),
            "range": (["a"], ["row 6 of train ('what?') has 1 choices, the rows before it 2 (line 7 of", "all rows need as many"]),
        },
        "label": {
            "missing": ["label_column 'label' is not in the train rows", "--label_column"],
            "type": ([1], ["row 6 of train ('what?') has the label [1] for 2 choices (line 7 of", "from 0 to 1"]),
            "null": (None, ["row 6 of train ('what?') has the label None for 2 choices (line 7 of"]),
            "range": (2, ["row 6 of train ('what?') has the label 2 for 2 choices (line 7 of", "a number from 0 to 1"]),
            "fraction": (0.5, ["row 6 of train ('what?') has the label 0.5 for 2 choices (line 7 of"]),
        },
    },
    "multiple-choice, numbered": {
        "question": QUESTION,
        "ending0": {
            "missing": ["row 0 of train ('what?') has 1 choice(s)", "nothing to choose from"],
            "type": (5, ["row 6 of train ('what?') has no list of strings", "5", "(line 7 of", "--choices_column"]),
            "null": (None, ""),  # a choice may be empty
        },
        "ending1": {
            "missing": ["row 0 of train ('what?') has 1 choice(s)", "nothing to choose from"],
            "type": ([5], ["row 6 of train ('what?') has no list of strings", "[5]", "(line 7 of", "--choices_column"]),
            "null": (None, ""),
        },
        "label": {
            "missing": ["label_column 'label' is not in the train rows", "--label_column"],
            "type": ({"a": 1}, ["row 6 of train ('what?') has the label {'a': 1} for 2 choices (line 7 of"]),
            "null": (None, ["row 6 of train ('what?') has the label None for 2 choices (line 7 of"]),
            "range": ("C", ["row 6 of train ('what?') has the label 'C' for 2 choices (line 7 of", "a letter from A to B"]),
        },
    },
    "seq2seq": {
        "source": {**TEXT, "missing": ["text_column 'source' is not in the train rows", "--text_column"]},
        "target": {
            "missing": ["target_column 'target' is not in the train rows", "--target_column"],
            "type": (5, ["row 6 of train holds 5 (line 7 of", "target column", "--target_column"]),
            "null": (None, "train: 1 of 11 rows kept although they have no target"),
        },
    },
}
FLAGS = {
    "causal-lm, conversations": "--model_name_or_path {d}/chat",
    "text-classification": f"--{PAIR} second",
    "regression": f"--{PAIR} second",
    "multi-label": f"--{PAIR} second",
    "multiple-choice": f"--{PAIR} begin",
}
MODELS = {"causal-lm": "gpt", "seq2seq": "bart"}
CASES = [(kind, column, what) for kind, columns in BAD.items() for column, whats in columns.items() for what in whats]


@pytest.fixture(scope="session")
def place(files):  # noqa: F811
    """The files of test_bad_input, and a GPT-2 whose tokenizer has a chat template."""
    tokenizer = tf.AutoTokenizer.from_pretrained(files / "gpt")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    (files / "chat").mkdir()
    tf.AutoConfig.from_pretrained(files / "gpt").save_pretrained(files / "chat")
    tokenizer.save_pretrained(files / "chat")
    return files


def arguments(kind: str, place, output, file, flag: str = "--dataset_name", more: str = "") -> list[str]:
    task = kind.partition(",")[0]
    text = f"--task {task} {flag} {file} {FLAGS.get(kind, '')} {more}"
    if "--model_name_or_path" not in text:
        text += f" --model_name_or_path {{d}}/{MODELS.get(task, 'bert')}"
    return arguments_of(text, place, output)


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_wrong(kind: str, column: str, what: str) -> str:
    """Good rows, of which one is wrong, or all lack a column."""
    rows = [fitting(number)[kind] for number in range(COUNT)]
    if what == "missing":
        return lines({"other": 1} | {name: value for name, value in row.items() if name != column} for row in rows)
    rows[WRONG] = {**rows[WRONG], column: BAD[kind][column][what][0]}
    return lines(rows)


def check(arguments: list[str], expected, capsys) -> None:
    """A list of words: refused with them. A text: the model is reached, and a line of the output holds it."""
    if isinstance(expected, list):
        assert cli.finetune_main(arguments) == 2
        assert_one_line(capsys.readouterr().err, expected)
        return
    with pytest.raises(AssertionError, match="was built before"):
        cli.finetune_main(arguments)
    assert expected in capsys.readouterr().out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("kind", "column", "what"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_column(kind, column, what, place, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(with_wrong(kind, column, what))
    expected = BAD[kind][column][what]
    more = ""
    if kind == "seq2seq":  # the fixture's BART has no weights: what is kept ends there
        expected = expected if what == "missing" or isinstance(expected[1], list) else (None, ["cannot load the model"])
    check(
        arguments(kind, place, tmp_path / "out", tmp_path / "rows.jsonl", more=more),
        expected if what == "missing" else expected[1],
        capsys,
    )
    assert not (tmp_path / "out").exists()


def test_table_has_every_column_of_every_task():
    """Missing, type and null for every role that `choose_columns` gives, out of range for every label; all tasks are there."""
    assert {kind.partition(",")[0] for kind in BAD} == set(TASKS)
    for kind, columns in BAD.items():
        task, row = kind.partition(",")[0], fitting(0)[kind]
        pair = {PAIR: FLAGS[kind].split()[1]} if PAIR in FLAGS.get(kind, "") else {}
        chosen = choose_columns(DatasetDict(train=Dataset.from_list([row])), FinetuneConfig(task=task, **pair), TASKS[task])
        assert set(columns) == set(chosen.values()) == set(row), kind
        for role, column in chosen.items():
            needed = {"missing", "type", "null"} | ({"range"} if role in ("label", "answers", "answer", "answer_start") else set())
            assert needed <= set(columns[column]), (kind, column)


# All files


def classes(**wrong) -> str:
    rows = [{"text": f"{WORDS} {number}", "label": number % 2} for number in range(COUNT)]
    rows[WRONG] |= wrong
    return lines(rows)


OTHER_FILES = {
    "text of a number": ({"text": 3}, "row 6 of {split} holds 3 (line 7 of rows.jsonl)"),
    "label that is null": ({"label": None}, "row 6 of {split} has the label None (line 7 of rows.jsonl)"),
    "label that training does not know": ({"label": 7}, "row 6 of {split} has the label 7 (line 7 of rows.jsonl)"),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", OTHER_FILES)
@pytest.mark.parametrize("split", ["validation", "test"])
def test_other_files(split, name, place, tmp_path, capsys):
    wrong, words = OTHER_FILES[name]
    (tmp_path / "rows.jsonl").write_text(classes(**wrong))
    flags = arguments("text-classification", place, tmp_path / "out", tmp_path / "rows.jsonl", f"--{split}_file")
    check([flag for flag in flags if flag not in (f"--{PAIR}", "second")], [words.format(split=split)], capsys)


PREDICT = {
    "causal-lm": ("text", 3, ["row 6 of predict holds 3 (line 7 of", "not strings"]),
    "text-classification": ("second", 3, ["row 6 of predict holds 3 (line 7 of", "--text_pair_column"]),
    "token-classification": ("tokens", ["a", None], ["row 6 of predict has a word that is null (line 7 of"]),
    "question-answering": ("question", "why " * 60, ["row 6 of predict is too long", "leave no room for a context", "(line 7 of"]),
    "multiple-choice": ("choices", ["a"], ["row 6 of predict ('what?') has 1 choices, the rows before it 2 (line 7 of"]),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("kind", PREDICT)
def test_file_to_predict(kind, place, tmp_path, capsys):
    column, value, words = PREDICT[kind]
    good = [fitting(number)[kind] for number in range(COUNT)]
    (tmp_path / "good.jsonl").write_text(lines(good))
    good[WRONG] |= {column: value}
    (tmp_path / "rows.jsonl").write_text(lines(good))
    more = f"--max_new_tokens 8 --predict_file {tmp_path / 'rows.jsonl'}"
    check(arguments(kind, place, tmp_path / "out", tmp_path / "good.jsonl", more=more), words, capsys)


# Streams: the first 1,000 rows are read ahead, the others while training

LATE = {
    "label that is not known": ({"label": 9}, "row 1300 of the stream has the label 9"),
    "label that is null": ({"label": None}, "row 1300 of the stream has the label None"),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", LATE)
def test_late_row_of_a_stream(name, tmp_path):
    wrong, words = LATE[name]
    rows = [{"text": f"{WORDS} {number}", "label": number % 2} for number in range(1500)]
    (tmp_path / "good.jsonl").write_text(lines(rows))
    rows[1300] |= wrong
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    assert sum(1 for _ in streamed(tmp_path / "good.jsonl", tmp_path)) == 1500
    with pytest.raises(hf_ga.DataError, match=rf"{words} \(line 1301 of rows.jsonl\)"):
        list(streamed(tmp_path / "rows.jsonl", tmp_path))


@pytest.mark.usefixtures("no_model")
def test_late_bytes_of_a_stream(tmp_path):
    rows = [{"text": f"{WORDS} {number}", "label": number % 2} for number in range(1500)]
    (tmp_path / "good.jsonl").write_text(lines(rows))
    (tmp_path / "rows.jsonl").write_bytes(lines(rows).encode() + b'{"text": "\xff", "label": 1}\n')
    with pytest.raises(hf_ga.DataError, match=r"rows.jsonl: line 1501: byte 10 \(0xff\) is no UTF-8. Mend these lines"):
        list(streamed(tmp_path / "rows.jsonl", tmp_path))


def streamed(file, folder):
    config = FinetuneConfig(
        task="text-classification", dataset_name=str(file), validation_file=str(folder / "good.jsonl"), streaming=True, max_steps=2
    )
    return prepare_data(config, corpus.train_tokenizer([WORDS], 280)).stream


# Files that cannot be decoded


def parquet(cut: int | None = None, **columns) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table(columns or {"text": [WORDS] * 50}), written)
    return written.getvalue()[:cut]


def texts(count: int, bad: str | bytes, end: str = "") -> bytes:
    rows = [json.dumps({"text": f"{WORDS} {number}"}).encode() for number in range(count)]
    rows[WRONG] = bad if isinstance(bad, bytes) else bad.encode()
    return b"\n".join(rows) + end.encode()


UNDECODED = {
    "UTF-8 in JSON lines": (
        "jsonl",
        texts(9, b'{"text": "\xff"}'),
        ["row 6 of train has bytes in 'text'", "(line 7 of rows.jsonl)"],
    ),
    "UTF-8 in text": ("txt", b"one\ntwo\n\xff\n", ["rows.txt: line 3: byte 0 (0xff) is no UTF-8"]),
    "UTF-8 in CSV": ("csv", b"text,label\na,1\nb\xe9,1\n", ["rows.csv: line 3: byte 1 (0xe9) is no UTF-8"]),
    "fields of a CSV": ("csv", b"text,label\na,1\nb,1,2\n", ["rows.csv", "Expected 2 fields in line 3, saw 3"]),
    "quotes of a CSV": ("csv", b'text,label\na,1\n"b,1\n', ["rows.csv", "EOF inside string"]),
    "half a line": ("jsonl", texts(9, '{"text": "some'), ["rows.jsonl: line 7: no JSON"]),
    "half a file": ("jsonl", texts(9, '{"text": "a"}')[:-9], ["rows.jsonl: line 9: no JSON (Unterminated string"]),
    "a line that is a list": ("jsonl", texts(9, "[1]"), ["rows.jsonl: line 7: holds list, not an object"]),
    "null first": ("jsonl", b"null\n" + texts(9, "{}"), ["rows.jsonl: line 1 holds null, not an object"]),
    "null in between": ("jsonl", texts(9, " null"), ["rows.jsonl: line 7 holds null, not an object"]),
    "null in a gzip": ("jsonl.gz", gzip.compress(b"\n\nnull\n"), ["rows.jsonl.gz: line 3 holds null, not an object"]),
    "null alone": ("json", b"\n null", ["rows.json: line 2 holds null, not an object"]),
    "half a character": ("jsonl", texts(9, '{"text": "\\ud800"}'), ["rows.jsonl: line 7: half of a surrogate pair"]),
    "half of a gzip": ("jsonl.gz", gzip.compress(texts(900, "{}"))[:-9], ["rows.jsonl.gz: after line", "ended before"]),
    "no gzip": ("jsonl.gz", texts(9, "{}"), ["rows.jsonl.gz: after line 0: Not a gzipped file"]),
    "half a parquet": ("parquet", parquet(-9), ["rows.parquet", "Parquet"]),
    "bytes in a parquet": ("parquet", parquet(text=pa.array([b"a"] * 9)), ["holds Value('binary'), not strings"]),
    "types and blank lines": (
        "jsonl",
        b'{"text": "a"}\n\n{"text": 5}\n\n' * 3,
        ["rows.jsonl: line 3: 'text' holds a number, on line 1 a str; line 7"],
    ),
    "nothing but nulls": ("jsonl", lines([{"text": None}] * 9).encode(), ["all 8 train rows are empty"]),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", UNDECODED)
def test_files_that_cannot_be_decoded(name, place, tmp_path, capsys):
    ending, content, words = UNDECODED[name]
    (tmp_path / f"rows.{ending}").write_bytes(content)
    check(arguments("causal-lm", place, tmp_path / "out", tmp_path / f"rows.{ending}"), words, capsys)


# Token ids


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq"])
@pytest.mark.parametrize("is_used", [True, False])
def test_tokens_beyond_the_vocabulary(task, is_used, place, tmp_path, capsys):
    """A tokenizer with one token more than the model: used in one row, or in none."""
    model = {"masked-lm": "bert", **MODELS}[task]
    tokenizer = tf.AutoTokenizer.from_pretrained(place / model)
    tf.AutoConfig.from_pretrained(place / model).save_pretrained(tmp_path / "model")
    last = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [fitting(number)[task] for number in range(COUNT)]
    text = "source" if task == "seq2seq" else "text"
    rows[WRONG] |= {text: "some <new> words"} if is_used else {}
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    more = f"--model_name_or_path {tmp_path / 'model'}"
    expected = [f"row 6 of train has token {last} (line 7 of", f"only tokens 0 to {last - 1}"]
    unused = [f"the tokenizer has {last + 1} tokens (the last, '<new>', is number {last}), the model only {last}"]
    check(arguments(task, place, tmp_path / "out", tmp_path / "rows.jsonl", more=more), expected if is_used else unused, capsys)


def test_token_ids_by_an_oracle():
    """Random ids, of which some are negative or too large, against plain Python; ignored labels are no ids."""
    generator = np.random.default_rng(0)
    rows = [generator.integers(-1, 52, generator.integers(0, 9)).tolist() for _ in range(2500)]
    wrong = [number for number, ids in enumerate(rows) if any(i < 0 or i >= 50 for i in ids)]
    assert 0 < len(wrong) < len(rows)
    with pytest.raises(RowsError) as caught:
        check_token_ids({"train": Dataset.from_dict({"input_ids": rows})}, 50)
    assert caught.value.numbers == wrong
    fitting_rows = [ids for number, ids in enumerate(rows) if number not in set(wrong)]
    labels = [[-100, *ids] for ids in fitting_rows]
    check_token_ids({"train": Dataset.from_dict({"input_ids": fitting_rows, "labels": labels})}, 50)
    with pytest.raises(RowsError, match=r"row 2 of train has token -100: the model has only tokens 0 to 49"):
        check_token_ids({"train": Dataset.from_dict({"input_ids": [[1], [2], [-100]]})}, 50)


# Numbers


@pytest.mark.usefixtures("no_model")
def test_numbers_are_those_of_the_file(place, tmp_path, capsys):
    """Whichever rows are taken for validation: of 60 rows 20 are, and every third is wrong; all are found, none else."""
    rows = [{"text": f"{WORDS} {number}", "label": number / 7} for number in range(60)]
    for number in range(0, 60, 3):
        rows[number]["label"] = 1e39 + number * 1e37
    (tmp_path / "rows.jsonl").write_text("\n" + lines(rows).replace("}\n", "}\n\n"))  # a blank line before each
    config = FinetuneConfig(task="regression", dataset_name=str(tmp_path / "rows.jsonl"), validation_split_percentage=33.3)
    splits, origins = load_rows(config)
    assert [len(splits[split]) for split in ("train", "validation")] == [40, 20]
    for split, dataset in splits.items():
        told = {origins[split].number(place): row["text"] for place, row in enumerate(dataset)}
        assert all(text == f"{WORDS} {number}" for number, text in told.items()) and len(told) == len(dataset)
    with pytest.raises(hf_ga.DataError) as caught:
        prepare_data(config, corpus.train_tokenizer([WORDS], 280))
    first = [number for number in origins["train"].numbers if number % 3 == 0]
    named = "; ".join(f"row {number} of train has the label {1e39 + int(number) * 1e37!r}" for number in first[:3])
    at = ", ".join(str(2 * number + 2) for number in first[:3])
    assert str(caught.value).startswith(
        f"{len(first)} of 40 train rows cannot be used, such as {named} (lines {at} of rows.jsonl): "
    )


@pytest.mark.parametrize("ending", ["csv", "txt", "jsonl", "jsonl.gz"])
def test_lines_of_rows(ending, tmp_path):
    """Against rows that say themselves on which line they stand: cells of several lines, blank lines, compressed."""
    csv = 'line,text\n2,a\n3,"b\nc"\n\n6,d\n7,"e ""\n\n"\n10,f\n'
    content = {
        "csv": csv,
        "txt": "1\n2\n3\n4\n5\n",
        "jsonl": '{"line": 1}\n\n{"line": 3}\n  \n{"line": 5}\n{"line": 6}\n{"line": 7}',
    }
    text = content[ending.split(".")[0]].encode()
    (tmp_path / f"rows.{ending}").write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    rows = load_file(str(tmp_path / f"rows.{ending}"))
    told = [int(row.get("line", row.get("text"))) for row in rows]
    assert lines_of_rows(str(tmp_path / f"rows.{ending}"), range(len(rows))) == told and len(told) == 5


def test_rows_of_a_batch_are_numbered(tmp_path):
    """In the second batch of 1,000 too."""
    rows = [{"prompt": "a", "completion": " b"} for _ in range(1500)]
    rows[1200]["completion"] = None
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    config = FinetuneConfig(dataset_name=str(tmp_path / "rows.jsonl"), validation_file=str(tmp_path / "rows.jsonl"))
    with pytest.raises(hf_ga.DataError, match=r"row 1200 of train \(columns prompt, completion\).*\(line 1201 of rows.jsonl\)"):
        prepare_data(config, corpus.train_tokenizer([WORDS], 280))
