"""Rows that are tokenised while they are read: the samples are those of the rows that are read
first; labels; what is refused.
"""

from itertools import islice

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from test_data import letter_tokenizer, rows_for, write

from hf_ga import DataError, FinetuneConfig
from hf_ga.finetuning.data import sources, streamed
from hf_ga.finetuning.data.data import PreparedData, prepare_data

READ_AHEAD = 7


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(sources, "NUM_READ_AHEAD", READ_AHEAD)
    monkeypatch.setattr(streamed, "BATCH_SIZE", 4)


def prepared(file, is_streamed=True, known=None, **more) -> PreparedData:
    more = {"validation_file": None if "." not in str(file) else str(file), **more}
    config = FinetuneConfig(dataset_name=str(file), streaming=is_streamed, max_steps=5, **more)
    config.check()
    return prepare_data(config, letter_tokenizer(cls_token="<cls>", sep_token="<sep>"), known)


TEXTS = rows_for("text-classification")
NUMBERED = [{"text": row["text"], "label": i % 3} for i, row in enumerate(TEXTS)]
NAMED = Features({"text": Value("string"), "label": ClassLabel(names=["small", "middle", "large"])})
CHAT = [{"prompt": row["text"], "completion": " " + row["text"][::-1]} for row in TEXTS]
PAIRS = [
    {"sentence1": row["text"], "sentence2": TEXTS[i - 1]["text"], "label": row["label"]}
    for i, row in enumerate(TEXTS)
]
CASES = {
    "texts, of which some are empty": (
        "d.jsonl",
        [{"text": ""}, *TEXTS[:9], {"text": None}, *TEXTS[9:]],
        {},
    ),
    "cut at 4 tokens": ("d.jsonl.gz", TEXTS, {"max_length": 4}),
    "prompts and completions": ("d.jsonl", CHAT, {}),
    "another column": (
        "d.csv",
        [{"body": row["text"], "text": "a"} for row in TEXTS],
        {"text_column": "body"},
    ),
    "names of classes": ("d.jsonl", TEXTS, {"task": "text-classification"}),
    "numbers of classes": ("d.csv", NUMBERED, {"task": "text-classification"}),
    "classes that the dataset names": ("d.parquet", NUMBERED, {"task": "text-classification"}),
    "weights": (
        "d.jsonl",
        [row | {"w": f"{i}.5"} for i, row in enumerate(TEXTS)],
        {"task": "text-classification", "weight_column": "w"},
    ),
    "pairs": ("d.jsonl", PAIRS, {"task": "text-classification"}),
}


@pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*csv:pytest.PytestUnraisableExceptionWarning"
)  # `datasets` leaves it open
@pytest.mark.parametrize("name", CASES)
def test_samples_of_a_stream_are_those_of_the_rows(name, tmp_path):
    file, rows, more = CASES[name]
    path = write(tmp_path / file, rows, NAMED if file.endswith("parquet") else None)
    data = prepared(path, **more)
    expected = prepared(path, is_streamed=False, **more)
    samples = list(expected.splits["train"])
    assert list(data.stream) == samples
    assert len(samples) == len(TEXTS)
    assert list(data.stream) == samples  # again
    assert data.labels == expected.labels
    assert expected.stream is None
    assert list(data.splits["validation"]) == list(expected.splits["validation"])
    # What is read ahead stands for the training rows, and is no more than was said.
    ahead = list(data.splits["train"])
    assert READ_AHEAD - 1 <= len(ahead) <= READ_AHEAD
    assert ahead == samples[: len(ahead)]
    assert f"a stream, {READ_AHEAD} rows of it read ahead" in data.description
    collated = data.collate([next(iter(data.stream))])
    assert collated["input_ids"].tolist()[0] == samples[0]["input_ids"]


def test_the_embedded_corpus_is_a_stream_like_any_other():
    data = prepared("stdlib", max_eval_samples=2, max_predict_samples=2)
    samples = prepared("stdlib", is_streamed=False, max_train_samples=9).splits["train"]
    assert list(islice(data.stream, 9)) == list(samples)
    assert len(data.splits["validation"]) == 2


def test_facts_of_rows_that_were_read_ahead_say_so(tmp_path):
    data = prepared(write(tmp_path / "d.jsonl", TEXTS), max_length=4)
    assert f"train, read ahead: 4 of {READ_AHEAD} rows truncated to 4 tokens" in data.notes
    assert any(
        fact.startswith("validation: ") and "of 40 rows truncated" in fact for fact in data.notes
    )


def test_a_folder_with_splits(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for split, rows in {"train": TEXTS, "validation": TEXTS[:5], "test": TEXTS[5:9]}.items():
        write(folder / f"{split}.jsonl", rows)
    data = prepared(folder)
    assert len(list(data.stream)) == 40
    assert {k: len(v) for k, v in data.splits.items()} == {
        "train": READ_AHEAD,
        "validation": 5,
        "test": 4,
    }
    assert (
        len(prepared(folder, validation_file=str(folder / "train.jsonl")).splits["validation"])
        == 40
    )
    limited = prepared(folder, max_eval_samples=2, max_predict_samples=3)
    assert {k: len(v) for k, v in limited.splits.items()} == {
        "train": READ_AHEAD,
        "validation": 2,
        "test": 3,
    }


def late_label():
    """The third class comes behind the rows that are read ahead."""
    return [
        {"text": row["text"], "label": "late" if i > 20 else row["label"]}
        for i, row in enumerate(TEXTS)
    ]


def test_a_label_that_comes_late_is_refused_when_it_comes(tmp_path):
    path = write(tmp_path / "d.jsonl", late_label())
    data = prepared(
        path, task="text-classification", validation_file=write(tmp_path / "v.jsonl", TEXTS)
    )
    stream = iter(data.stream)
    assert [next(stream)["label"] for _ in range(12)] == [0, 1] * 6
    with pytest.raises(
        DataError,
        match=r"labels must be among the 2 of the training rows .*streamed rows have \['late'\]",
    ):
        list(stream)


def test_labels_that_the_model_or_the_dataset_knows_may_come_late(tmp_path):
    known = ["yes", "late", "no"]
    data = prepared(
        write(tmp_path / "d.jsonl", late_label()), task="text-classification", known=known
    )
    assert data.labels == known
    assert [known[sample["label"]] for sample in data.stream] == [
        row["label"] for row in late_label()
    ]
    rows = [{"text": row["text"], "label": 2 if i > 20 else i % 2} for i, row in enumerate(TEXTS)]
    data = prepared(write(tmp_path / "d.parquet", rows, NAMED), task="text-classification")
    assert data.labels == ["small", "middle", "large"]
    assert [sample["label"] for sample in data.stream] == [row["label"] for row in rows]


def test_a_saved_dataset(tmp_path):
    Dataset.from_list(TEXTS).save_to_disk(tmp_path / "saved")
    file = write(tmp_path / "d.jsonl", TEXTS)
    assert len(list(prepared(tmp_path / "saved", validation_file=file).stream)) == 40


def test_rows_that_cannot_be_streamed(tmp_path):
    file = write(tmp_path / "d.jsonl", TEXTS)
    only_test = tmp_path / "only"
    only_test.mkdir()
    write(only_test / "test.jsonl", TEXTS)
    for name, validation, message in [
        (file, None, "no validation rows, and a stream cannot be split"),
        (tmp_path / "none.jsonl", file, "none.jsonl does not exist"),
        (tmp_path / "none", file, "none does not exist"),
        (write(tmp_path / "e.jsonl", []), file, "is empty"),
        (only_test, file, r"no rows to train on \(splits: {'validation': 40, 'test': 40}\)"),
        (file, tmp_path / "missing.jsonl", "missing.jsonl does not exist"),
    ]:
        with pytest.raises(DataError, match=message):
            prepared(name, validation_file=validation and str(validation))


def test_a_label_that_is_null_is_no_class(tmp_path):
    """Also if a class is called None."""
    rows = [{"text": row["text"], "label": ("None", "yes")[i % 2]} for i, row in enumerate(TEXTS)]
    good = write(tmp_path / "v.jsonl", rows)
    rows[20] = {"text": "a", "label": None}
    data = prepared(
        write(tmp_path / "d.jsonl", rows), task="text-classification", validation_file=good
    )
    assert data.labels == ["None", "yes"]
    with pytest.raises(
        DataError, match="names or whole numbers, but 1 of 4 streamed rows have None"
    ):
        list(data.stream)
