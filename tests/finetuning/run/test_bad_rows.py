"""Columns of every task that are missing, of another type, null or out of range: one line before a
model is built, or counted.
"""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers as tf
from bad_files import arguments_of, assert_one_line

import hf_ga
from hf_ga.finetuning.data.data import prepare_data
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.flags import cli
from hf_ga.finetuning.run.flags.config import FinetuneConfig

WRONG, COUNT = 6, 12  # the row that is wrong, of so many
EMPTY = "train: 1 of 11 rows skipped because they are empty"
WORDS = "some words to learn"
ASKED = {"text": ["words"], "answer_start": [5]}


def fitting(number: int) -> dict[str, dict]:
    """A good row of every kind."""
    return {
        "causal-lm": {"text": f"{WORDS} {number}"},
        "causal-lm, completions": {"prompt": WORDS, "completion": f" n{number}"},
        "causal-lm, instructions": {"instruction": WORDS, "input": "a", "output": f" n{number}"},
        "masked-lm": {"text": f"{WORDS} {number}"},
        "text-classification": {"text": WORDS, "second": "more", "label": number % 2},
        "regression": {"text": WORDS, "second": "more", "label": number / 2},
        "multi-label": {"text": WORDS, "second": "more", "labels": [["x"], ["x", "y"]][number % 2]},
        "token-classification": {"tokens": ["a", "b"], "tags": ["x", "y"]},
        "question-answering": {"question": "what?", "context": WORDS, "answers": ASKED},
        "multiple-choice": {
            "question": "what?",
            "begin": "it is",
            "choices": ["a", "b"],
            "label": number % 2,
        },
        "multiple-choice, numbered": {
            "question": "what?",
            "ending0": "a",
            "ending1": "b",
            "label": number % 2,
        },
        "seq2seq": {"source": WORDS, "target": f"some {number}"},
        "embedding": {"query": WORDS, "document": f"some {number}", "negative": "a word"},
        "embedding, scores": {"sentence1": WORDS, "sentence2": "more", "score": number / 2},
    }


PAIR = "text_pair_column"
STRINGS = [
    "text_column must name a column of strings",
    "1 of 11 train rows have 5",
    "--text_column",
]
PROMPT = [
    "prompts, completions, instructions and outputs must be strings",
    "Fix or remove the row",
    "5",
]
LISTS = "labels must be lists of names"
PLACE = "answers must be in their contexts"


# kind: (column, what it holds in row WRONG, words of the error, or the line that counts the row). A
# missing column: test_data.py; all that labels, answers, choices and conversations can have wrong:
# the tests of data.
BAD: dict[str, list[tuple]] = {
    "causal-lm": [("text", 5, STRINGS), ("text", None, EMPTY)],
    "causal-lm, completions": [("completion", 5, PROMPT)],
    "causal-lm, instructions": [("input", None, ""), ("output", 5, PROMPT)],
    "masked-lm": [("text", None, EMPTY)],
    "text-classification": [
        ("text", None, ""),  # its pair has a second text
        (
            "second",
            [1],
            [f"{PAIR} must name a column of strings", "1 of 11 train rows have [1]", f"--{PAIR}"],
        ),
        ("label", -100, ["the label -100 marks targets that the loss ignores"]),
    ],
    "regression": [
        (
            "label",
            1e39,
            ["finite float32 numbers", "1 of 11 train rows have 1e+39", "--label_column"],
        )
    ],
    "multi-label": [
        ("labels", "x", [LISTS, "1 of 11 train rows have 'x'"]),
        ("labels", None, ""),
    ],  # none of the labels
    "token-classification": [
        (
            "tokens",
            "a b",
            ["a column of lists of strings", "1 of 11 train rows have 'a b'", "--text_column"],
        ),
        (
            "tokens",
            ["a", None],
            ["a column of lists of strings", "1 of 11 train rows have ['a', None]"],
        ),
    ],
    "question-answering": [
        ("question", 5, STRINGS),
        ("context", None, [PLACE, "(None, [('words', 5)])"]),
        (
            "answers",
            {"text": ["words"], "answer_start": [10**12]},
            [PLACE, "('words', 1000000000000)"],
        ),
        ("answers", None, ""),  # it has none
    ],
    "multiple-choice": [
        ("choices", "a, b", ["choices must be lists of strings", "'a, b'", "--choices_column"]),
    ],
    "multiple-choice, numbered": [
        ("ending0", 5, ["choices must be lists of strings"]),
        ("ending0", None, ""),
    ],  # it may be empty
    "seq2seq": [
        ("target", 5, ["target_column must name a column of strings", "1 of 11 train rows have 5"])
    ],
    "embedding": [
        ("query", 5, STRINGS),
        ("document", None, EMPTY),
        ("negative", 5, ["negative must name a column of strings", "rename the column"]),
        ("negative", None, ""),  # it has none
    ],
    "embedding, scores": [
        ("score", None, ["must be a finite number", "1 of 11 train rows have None"]),
        ("score", 1e39, ["must be a finite number", "1 of 11 train rows have 1e+39"]),
    ],
}
FLAGS = dict.fromkeys(("text-classification", "regression", "multi-label"), f"--{PAIR} second") | {
    "multiple-choice": f"--{PAIR} begin"
}
MODELS = {"causal-lm": "gpt", "seq2seq": "bart"}
CASES = [(kind, *case) for kind, cases in BAD.items() for case in cases]


def arguments(
    kind: str, files, output, file, flag: str = "--dataset_name", more: str = ""
) -> list[str]:
    task = kind.partition(",")[0]
    text = f"--task {task} {flag} {file} {FLAGS.get(kind, '')} {more}"
    if "--model_name_or_path" not in text:
        text += f" --model_name_or_path {{d}}/{MODELS.get(task, 'bert')}"
    return arguments_of(text, files, output)


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_wrong(kind: str, column: str, value: object) -> str:
    """Good rows, of which one is wrong."""
    rows = [fitting(number)[kind] for number in range(COUNT)]
    rows[WRONG] = {**rows[WRONG], column: value}
    return lines(rows)


def check(arguments: list[str], expected, capsys) -> None:
    """A list of words: refused with them. A text: the model is reached, and a line of the output
    holds it.
    """
    if isinstance(expected, list):
        assert cli.finetune_main(arguments) == 2
        assert_one_line(capsys.readouterr().err, expected)
        return
    with pytest.raises(AssertionError, match="was built before"):
        cli.finetune_main(arguments)
    assert expected in capsys.readouterr().out


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(("kind", "column", "value", "expected"), CASES)
def test_column(kind, column, value, expected, files, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(with_wrong(kind, column, value))
    check(arguments(kind, files, tmp_path / "out", tmp_path / "rows.jsonl"), expected, capsys)
    assert not (tmp_path / "out").exists()


def test_all_tasks_are_in_the_table():
    assert {kind.partition(",")[0] for kind in BAD} == set(TASKS)
    assert set(BAD) <= set(fitting(0))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("split", ["validation", "test"])
def test_other_files(split, files, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(with_wrong("masked-lm", "text", 3))
    flags = arguments(
        "masked-lm", files, tmp_path / "out", tmp_path / "rows.jsonl", f"--{split}_file"
    )
    check(flags, [f"1 of 12 {split} rows have 3"], capsys)


PREDICT = {
    "text-classification": ("text", 3, ["a column of strings", "1 of 12 predict rows have 3"]),
    "token-classification": ("tokens", ["a", None], ["1 of 12 predict rows have ['a', None]"]),
    "question-answering": (
        "question",
        "why " * 60,
        ["too short to respect the provided max_length"],
    ),
    "multiple-choice": ("choices", ["a"], ["the same number of choices"]),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("kind", PREDICT)
def test_file_to_predict(kind, files, tmp_path, capsys):
    column, value, words = PREDICT[kind]
    (tmp_path / "good.jsonl").write_text(lines(fitting(number)[kind] for number in range(COUNT)))
    (tmp_path / "rows.jsonl").write_text(with_wrong(kind, column, value))
    more = f"--max_new_tokens 8 --predict_file {tmp_path / 'rows.jsonl'}"
    check(
        arguments(kind, files, tmp_path / "out", tmp_path / "good.jsonl", more=more), words, capsys
    )


@pytest.mark.usefixtures("no_model")
def test_late_row_of_a_stream(tmp_path):
    rows = lines(
        {"text": f"{WORDS} {number}", "label": number % 2} for number in range(1500)
    ).encode()
    (tmp_path / "good.jsonl").write_bytes(rows)
    (tmp_path / "rows.jsonl").write_bytes(rows + b'{"text": "\xff", "label": 1}\n')
    streams = []
    for name in ("good", "rows"):
        files = {
            "dataset_name": str(tmp_path / f"{name}.jsonl"),
            "validation_file": str(tmp_path / "good.jsonl"),
        }
        config = FinetuneConfig(task="text-classification", streaming=True, max_steps=2, **files)
        streams.append(prepare_data(config, corpus.train_tokenizer([WORDS], 280)).stream)
    assert sum(1 for _ in streams[0]) == 1500
    with pytest.raises(hf_ga.DataError, match=r"rows\.jsonl: byte \d+ .* is not UTF-8"):
        list(streams[1])


def parquet(cut: int | None = None, **columns) -> bytes:
    written = io.BytesIO()
    pq.write_table(pa.table(columns or {"text": [WORDS] * 50}), written)
    return written.getvalue()[:cut]


def texts(count: int, bad: str | bytes) -> bytes:
    rows = [json.dumps({"text": f"{WORDS} {number}"}).encode() for number in range(count)]
    rows[WRONG] = bad if isinstance(bad, bytes) else bad.encode()
    return b"\n".join(rows)


UNDECODED = {
    "UTF-8 in JSON lines": (
        "jsonl",
        texts(9, b'{"text": "\xff"}'),
        ["rows.jsonl: byte 214 (0xff) is not UTF-8"],
    ),
    "UTF-8 in text": ("txt", b"one\ntwo\n\xff\n", ["rows.txt: byte 8 (0xff) is not UTF-8"]),
    "UTF-8 in CSV": (
        "csv",
        b"text,label\na,1\nb\xe9,1\n",
        ["rows.csv: byte 1 (0xe9) is not UTF-8"],
    ),
    "fields of a CSV": (
        "csv",
        b"text,label\na,1\nb,1,2\n",
        ["rows.csv", "Expected 2 fields in line 3, saw 3"],
    ),
    "half a line": (
        "jsonl",
        texts(9, '{"text": "some'),
        ["rows.jsonl: ArrowInvalid: JSON parse error", "in row"],
    ),
    "a list": (
        "jsonl",
        texts(9, "[1]"),
        ["rows.jsonl: ArrowInvalid: JSON parse error: Column() changed from object to"],
    ),
    "half of a gzip": (
        "jsonl.gz",
        gzip.compress(texts(900, "{}"))[:-9],
        ["rows.jsonl.gz: EOFError", "ended before"],
    ),
    "half a parquet": ("parquet", parquet(-9), ["rows.parquet", "Parquet"]),
    "bytes in a parquet": (
        "parquet",
        parquet(text=pa.array([b"a"] * 9)),
        ["a column of strings", "rows have b'a'"],
    ),
    "nothing but nulls": (
        "jsonl",
        lines([{"text": None}] * 9).encode(),
        ["all 8 train rows are empty or null"],
    ),
}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("name", UNDECODED)
def test_files_that_cannot_be_decoded(name, files, tmp_path, capsys):
    ending, content, words = UNDECODED[name]
    (tmp_path / f"rows.{ending}").write_bytes(content)
    check(
        arguments("causal-lm", files, tmp_path / "out", tmp_path / f"rows.{ending}"), words, capsys
    )


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "seq2seq"])
def test_tokens_beyond_the_vocabulary(task, files, tmp_path, capsys):
    """A tokenizer with one token more than the model, in whatever rows."""
    model = {"masked-lm": "bert", **MODELS}[task]
    tokenizer = tf.AutoTokenizer.from_pretrained(files / model)
    tf.AutoConfig.from_pretrained(files / model).save_pretrained(tmp_path / "model")
    last = len(tokenizer)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [fitting(number)[task] for number in range(COUNT)]
    (tmp_path / "rows.jsonl").write_text(lines(rows))
    more = f"--model_name_or_path {tmp_path / 'model'}"
    expected = [
        f"the tokenizer has {last + 1} tokens (the last, '<new>', has id {last}), but the model "
        f"has {last}"
    ]
    check(
        arguments(task, files, tmp_path / "out", tmp_path / "rows.jsonl", more=more),
        expected,
        capsys,
    )
