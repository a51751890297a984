"""SQuAD's own files: one row per question, as the flattened dataset on the hub has them."""

import json

import pytest
from test_data import letter_tokenizer, write

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data.data import prepare_data, prepare_unlabelled
from hf_ga.finetuning.data.sources import load_rows

CLASSES = {"cls_token": "<cls>", "sep_token": "<sep>"}


def asked(i: int, text: str | None, start: int = 0, **more) -> dict:
    answers = [] if text is None else [{"text": text, "answer_start": start}]
    return {"id": str(i), "question": "a b", "answers": answers, **more}


ARTICLES = [
    {
        "title": "T",
        "paragraphs": [
            {"context": "c d e", "qas": [asked(0, "d", 2), asked(1, "c d")]},
            {"context": "f g", "qas": []},
        ],
    },
    {
        "title": "U",
        "paragraphs": [
            {
                "context": "h i",
                "qas": [
                    asked(2, None, is_impossible=True, plausible_answers=[{"text": "h"}]),
                    asked(3, "i", 2, is_impossible=False),
                ],
            }
        ],
    },
]
ROWS = [  # by hand
    ("0", "T", "a b", "c d e", ["d"], [2]),
    ("1", "T", "a b", "c d e", ["c d"], [0]),
    ("2", "U", "a b", "h i", [], []),
    ("3", "U", "a b", "h i", ["i"], [2]),
]
ROWS = [
    {
        "id": number,
        "title": title,
        "question": question,
        "context": context,
        "answers": {"text": texts, "answer_start": starts},
    }
    for number, title, question, context, texts, starts in ROWS
]
LISTED = [
    {
        **row,
        "answers": [
            {"text": text, "answer_start": start}
            for text, start in zip(*row["answers"].values(), strict=True)
        ],
    }
    for row in ROWS
]
FILES = {
    "squad.json": {"version": "v2.0", "data": ARTICLES},
    "articles.json": ARTICLES,
    "splits.json": {"train": ARTICLES, "validation": ARTICLES},
    "key.json": {"articles": ARTICLES, "number": 2},
}


def written(path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def config(file: str, **more) -> FinetuneConfig:
    return FinetuneConfig(task="question-answering", dataset_name=file, **more)


@pytest.mark.parametrize("name", [*FILES, "articles.jsonl"])
def test_questions_are_rows(name, tmp_path):
    file = tmp_path / name
    if name == "articles.jsonl":
        write(file, ARTICLES)
    else:
        written(file, FILES[name])
    rows, _ = load_rows(config(str(file), validation_file=str(file)))
    assert list(rows["train"]) == list(rows["validation"]) == LISTED
    rows, _ = load_rows(config(str(file), validation_file=str(file), max_train_samples=3))
    assert list(rows["train"]) == LISTED[:3]
    flat = write(tmp_path / "flat.jsonl", ROWS)
    for known in ({}, {"max_length": 7}):
        both = [
            prepare_data(
                config(str(f), validation_file=str(f), **known), letter_tokenizer(**CLASSES)
            )
            for f in (file, flat)
        ]
        assert list(both[0].splits["train"]) == list(both[1].splits["train"])
        assert both[0].identity == both[1].identity


def test_validation_rows_are_questions(tmp_path):
    """Two of eight questions, not one of two articles."""
    file = written(tmp_path / "d.json", {"data": ARTICLES * 2})
    rows, _ = load_rows(config(file, validation_split_percentage=25.0))
    assert rows.num_rows == {"train": 6, "validation": 2}


def test_lists_of_answers_in_flat_rows(tmp_path):
    """As a list of pairs or a pair of lists, answers are the same."""
    both = []
    for name, rows in {"pairs": LISTED, "lists": ROWS}.items():
        file = write(tmp_path / f"{name}.jsonl", rows)
        data = prepare_data(config(file, validation_file=file), letter_tokenizer(**CLASSES))
        both.append(list(data.splits["train"]))
    assert both[0] == both[1]
    assert [row["answers"] for row in both[0]][:2] == [["d"], ["c d"]]


def test_questions_without_answers(tmp_path):
    """They can be predicted, but not trained on as if they were unanswerable."""
    articles = json.loads(json.dumps(ARTICLES[:1]))
    for question in articles[0]["paragraphs"][0]["qas"]:
        del question["answers"]
    file = written(tmp_path / "d.json", {"data": articles})
    good = written(tmp_path / "good.json", {"data": ARTICLES})
    with pytest.raises(DataError, match="label_column 'answers' is not in the train rows"):
        prepare_data(config(file, validation_file=good), letter_tokenizer(**CLASSES))
    options = config(good, validation_file=good)
    data = prepare_data(options, letter_tokenizer(**CLASSES))
    options.predict_file = file
    rows, samples = prepare_unlabelled(data)
    assert [row["id"] for row in rows] == ["0", "1"]
    assert len(samples) == 2
    articles[0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "d"}]
    with pytest.raises(DataError, match="answer"):
        file = written(tmp_path / "e.json", {"data": articles})
        prepare_data(config(file, validation_file=good), letter_tokenizer(**CLASSES))


def test_other_paragraphs_are_no_articles(tmp_path):
    rows = [{**row, "paragraphs": ["a", "b"]} for row in ROWS]
    file = write(tmp_path / "d.jsonl", rows)
    assert list(load_rows(config(file, validation_file=file))[0]["train"]) == rows
