"""Datasets of all kinds -> tokenised samples; what is counted on the way; batches by hand."""

import csv
import gzip
import json
import math
from collections import Counter

import datasets
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ga import DataError, FinetuneConfig, corpus, tasks
from hf_ga.data import load_rows, prepare_data
from hf_ga.tasks import TASKS, pad

LETTERS = "abcdefghij"
TEXTS = [" ".join(LETTERS[: 1 + i % 7]) for i in range(40)]
ROWS = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def letter_tokenizer(**special) -> PreTrainedTokenizerFast:
    """<pad> 0, <eos> 1, <unk> 2, a 3, b 4, ...: one token a letter, and no token is added."""
    words = ["<pad>", "<eos>", "<unk>", *LETTERS, "<cls>", "<sep>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in special.items() if v})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(dataset, tokenizer=None, **more):
    return prepare_data(FinetuneConfig(dataset_name=str(dataset), **more), tokenizer or letter_tokenizer())


def ids_of(text: str) -> list[int]:
    return [3 + LETTERS.index(letter) for letter in text.split()]


# Where rows come from


def make_json(folder):
    (folder / "d.json").write_text(json.dumps(ROWS))
    return folder / "d.json"


def make_jsonl(folder):
    return write(folder / "d.jsonl", ROWS)


def make_json_lines(folder):
    make_jsonl(folder)
    return folder / "d.jsonl"


def make_csv(folder):
    with (folder / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(ROWS)
    return folder / "d.csv"


def make_text(folder):
    (folder / "d.txt").write_text("\n".join(TEXTS) + "\n")
    return folder / "d.txt"


def make_parquet(folder):
    Dataset.from_list(ROWS).to_parquet(folder / "d.parquet")
    return folder / "d.parquet"


def make_gzip(folder):
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(make_json_lines(folder).read_bytes()))
    return folder / "d.jsonl.gz"


def make_gzip_csv(folder):
    (folder / "d.csv.gz").write_bytes(gzip.compress(make_csv(folder).read_bytes()))
    return folder / "d.csv.gz"


def make_saved(folder):
    Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def make_folder_of_files(folder):
    (folder / "files").mkdir()
    write(folder / "files" / "train.jsonl", ROWS)
    return folder / "files"


SOURCES = [make_json, make_jsonl, make_csv, make_text, make_parquet, make_gzip, make_gzip_csv, make_saved, make_folder_of_files]


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__[5:])
def test_sources(make, tmp_path):
    """Every kind gives the same rows, in the same order, and the same 4 of 40 (10 %) to validate on."""
    rows = load_rows(FinetuneConfig(dataset_name=str(make(tmp_path)), validation_split_percentage=10.0))
    assert rows.num_rows == {"train": 36, "validation": 4}
    reference = load_rows(FinetuneConfig(dataset_name=make_jsonl(tmp_path), validation_split_percentage=10.0))
    for split in rows:
        assert list(rows[split]["text"]) == list(reference[split]["text"])
    assert Counter([*rows["train"]["text"], *rows["validation"]["text"]]) == Counter(TEXTS)


def test_saved_splits_are_used_as_they_are(tmp_path):
    splits = {"train": ROWS[:20], "validation": ROWS[20:23], "test": ROWS[23:30], "unlabelled": [{"body": "x"}]}
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(tmp_path / "saved")
    data = prepared(tmp_path / "saved")
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 20, "validation": 3, "test": 7}
    assert [list(ids) for ids in data.splits["validation"]["input_ids"]] == [[*ids_of(row["text"]), 1] for row in ROWS[20:23]]


def test_files_win_over_splits(tmp_path):
    DatasetDict(train=Dataset.from_list(ROWS), validation=Dataset.from_list(ROWS[:2])).save_to_disk(tmp_path / "saved")
    files = {"validation_file": write(tmp_path / "v.jsonl", ROWS[5:8]), "test_file": str(make_csv(tmp_path))}
    rows = load_rows(FinetuneConfig(dataset_name=str(tmp_path / "saved"), **files))
    assert rows.num_rows == {"train": 40, "validation": 3, "test": 40}
    assert list(rows["validation"]["text"]) == TEXTS[5:8]


def test_folder_without_training_rows(tmp_path):
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no training rows \(splits: {'test': 40}\)"):
        load_rows(FinetuneConfig(dataset_name=str(tmp_path / "saved")))


def test_validation_rows_are_chosen_by_a_fixed_seed(tmp_path):
    """Not by the run's: runs of different seeds are compared on the same rows. None is in both, none is lost."""
    file = write(tmp_path / "d.jsonl", [{"text": f"row {i}"} for i in range(200)])
    chosen = []
    for seed in (0, 1):
        rows = load_rows(FinetuneConfig(dataset_name=file, seed=seed))
        train, validation = set(rows["train"]["text"]), set(rows["validation"]["text"])
        assert not train & validation and len(train | validation) == 200 and len(validation) == 10
        chosen.append(sorted(validation))
    assert chosen[0] == chosen[1] != [f"row {i}" for i in range(10)]


def test_stdlib():
    """The embedded corpus, without a cache of its own here: for both tasks, with its own splits."""
    config = FinetuneConfig(task="text-classification", max_length=32)
    data = prepare_data(config, corpus.load_stdlib_tokenizer())
    packages = Counter(corpus.load_stdlib()["train"]["package"])
    assert data.labels == sorted(name for name, count in packages.items() if count >= 100) and len(data.labels) > 5
    assert len(data.splits["train"]) == sum(packages[name] for name in data.labels)
    assert set(data.splits) == {"train", "validation", "test"} and "standard library of Python" in data.description
    sample, row = data.splits["train"][0], next(r for r in corpus.load_stdlib()["train"] if r["package"] in data.labels)
    assert data.labels[sample["label"]] == row["package"]
    tokenizer = data.tokenizer
    assert (sample["input_ids"][0], sample["input_ids"][-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert max(data.splits["train"]["length"]) == 32
    assert any("left out" in fact and "fewer than 100" in fact for fact in data.facts)


# Columns and labels


def test_only_column_of_strings_is_the_text(tmp_path):
    file = write(tmp_path / "d.jsonl", [{"number": i, "body": text} for i, text in enumerate(TEXTS)])
    assert sorted(map(len, prepared(file).splits["train"]["input_ids"]))[0] == 2


def test_chosen_columns_win_over_default_names(tmp_path):
    """Columns called `text` and `label` are there, but others are asked for, even with the names exchanged."""
    rows = [{"text": "yes", "label": "a b", "body": "c d e", "class": "x"}, {"text": "no", "label": "a", "body": "c", "class": "y"}]
    file, more = write(tmp_path / "d.jsonl", rows * 2), {"task": "text-classification"}
    more["validation_file"] = file
    data = prepared(file, text_column="body", label_column="class", **more)
    assert (data.labels, data.splits["train"][0]["input_ids"]) == (["x", "y"], [5, 6, 7])
    data = prepared(file, text_column="label", label_column="text", **more)
    assert (data.labels, data.splits["train"][0]["input_ids"], data.splits["train"][0]["label"]) == (["no", "yes"], [3, 4], 1)


@pytest.mark.parametrize(
    ("labels", "names", "ids"),
    [
        (["pos", "neg", "pos", "zero"], ["neg", "pos", "zero"], [1, 0, 1, 2]),
        ([7, 3, 7, 10], ["3", "7", "10"], [1, 0, 1, 2]),  # by number, not by digit
        ([True, False, True, True], ["False", "True"], [1, 0, 1, 1]),
    ],
    ids=["strings", "integers", "truth values"],
)
def test_labels_become_ids_in_the_order_of_their_values(labels, names, ids, tmp_path):
    file = write(tmp_path / "d.jsonl", [{"text": "a b", "labels": label} for label in labels])
    data = prepared(file, task="text-classification", validation_file=file)
    assert (data.labels, list(data.splits["train"]["label"])) == (names, ids)
    assert list(data.splits["validation"]["label"]) == ids


def class_labels(values, names=("zebra", "ant", "unused")):
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
    return Dataset.from_dict({"text": ["a b"] * len(values), "label": values}, features=features)


def test_class_labels_keep_their_order_and_unused_names(tmp_path):
    class_labels([1, 0, 1, 1]).save_to_disk(tmp_path / "saved")
    data = prepared(tmp_path / "saved", task="text-classification", validation_split_percentage=25.0)
    assert data.labels == ["zebra", "ant", "unused"]
    assert sorted([*data.splits["train"]["label"], *data.splits["validation"]["label"]]) == [0, 1, 1, 1]


def test_names_in_a_file_are_read_by_class_labels(tmp_path):
    """Training rows have ClassLabels, the validation file strings."""
    class_labels([1, 0, 1, 1]).save_to_disk(tmp_path / "saved")
    file = write(tmp_path / "v.jsonl", [{"text": "a", "label": "ant"}, {"text": "b", "label": "zebra"}])
    data = prepared(tmp_path / "saved", task="text-classification", validation_file=file)
    assert list(data.splits["validation"]["label"]) == [1, 0]


@pytest.mark.parametrize("labels", [["bee"], [3], [-1]], ids=str)
def test_values_beyond_class_labels_are_refused(labels, tmp_path):
    """-1 is how hub datasets mark rows whose label is kept secret."""
    class_labels([1, 0, 1, 1]).save_to_disk(tmp_path / "saved")
    file = write(tmp_path / "v.jsonl", [{"text": "a", "label": label} for label in labels])
    with pytest.raises(DataError, match=f"labels of the validation rows.*{labels[0]}"):
        prepared(tmp_path / "saved", task="text-classification", validation_file=file)


# Samples


def test_end_of_text_is_appended_once(tmp_path):
    file = write(tmp_path / "d.jsonl", [{"text": "a b"}, {"text": "a b <eos>"}, {"text": "a <eos> b"}])
    data = prepared(file, validation_file=file)
    assert data.splits["train"]["input_ids"][:] == [[3, 4, 1], [3, 4, 1], [3, 1, 4, 1]]
    assert data.splits["train"]["num_targets"][:] == [2, 2, 3]


def test_rows_are_counted_and_said(tmp_path):
    """Max length 4: by hand 2 of 7 rows are cut, 2 empty ones are left out, 1 has no target."""
    texts = ["a b", "a b c", "a b c d", "a b c d e f", "", None, "<eos>"]
    file = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    other = write(tmp_path / "v.jsonl", [{"text": "a b"}])
    data = prepared(file, validation_file=other, max_length=4)
    assert data.splits["train"]["input_ids"][:] == [[3, 4, 1], [3, 4, 5, 1], [3, 4, 5, 6], [3, 4, 5, 6], [1]]
    assert data.splits["train"]["length"][:] == [3, 4, 4, 4, 1]
    assert data.splits["train"]["num_targets"][:] == [2, 3, 3, 3, 0]
    assert data.facts == [
        "train: 2 of 7 rows cut at 4 tokens",
        "train: 2 of 7 rows left out because they are empty",
        "train: 1 of 7 rows kept although they have no target (they add nothing)",
    ]


def test_classification_rows_are_cut_between_their_special_tokens(tmp_path):
    """<cls> is 13, <sep> is 14; a row of 5 letters is cut to 2, and an empty row is left out although it has a label."""
    rows = [{"text": "a b c d e", "label": 0}, {"text": "a b", "label": 1}, {"text": "", "label": 1}]
    file = write(tmp_path / "d.jsonl", rows)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="text-classification", validation_file=file, max_length=4)
    assert data.splits["train"]["input_ids"][:] == [[13, 3, 4, 14], [13, 3, 4, 14]]
    assert data.splits["train"]["num_targets"][:] == [1, 1] and data.splits["train"]["label"][:] == [0, 1]
    assert [fact for fact in data.facts if fact.startswith("train")] == [
        "train: 1 of 3 rows cut at 4 tokens",
        "train: 1 of 3 rows left out because they are empty",
    ]


def test_unigram_entropy_is_that_of_the_training_tokens(tmp_path):
    train, other = write(tmp_path / "d.jsonl", [{"text": "a a b"}, {"text": "a"}]), write(tmp_path / "v.jsonl", [{"text": "j j"}])
    counts = [3, 1, 2]  # a, b and the end of the two rows
    expected = -sum(c / 6 * math.log(c / 6) for c in counts)
    assert prepared(train, validation_file=other).unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_tokenizer_without_padding_token_pads_with_the_end(tmp_path):
    """Padding is ignored by its place, not by its id: the real end-of-text token stays a target."""
    data = prepared(make_jsonl(tmp_path), letter_tokenizer(pad_token=None))
    batch = data.collate([{"input_ids": [3, 4, 1]}, {"input_ids": [3, 1]}])
    assert batch["input_ids"].tolist() == [[3, 4, 1], [3, 1, 1]]
    assert batch["labels"].tolist() == [[3, 4, 1], [3, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("name", TASKS)
def test_second_preparation_reads_the_cache(name, tmp_path, monkeypatch):
    """Also with a tokenizer that was used in between; another max_length tokenises again (the control)."""
    calls = tmp_path / "calls"

    def tokenize(rows, tokenizer, max_length):
        with calls.open("a") as file:
            file.write("x")
        return task.tokenize(rows, tokenizer, max_length)

    task, special = TASKS[name], {"cls_token": "<cls>", "sep_token": "<sep>"}
    monkeypatch.setitem(TASKS, name, tasks.Task(**{**task.__dict__, "tokenize": tokenize}))
    file, tokenizer = make_jsonl(tmp_path), letter_tokenizer(**special)
    first = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"  # train and validation
    tokenizer(["a b", "c"], padding=True, truncation=True, max_length=1)
    second = prepared(file, letter_tokenizer(**special), task=name)
    third = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"
    assert first.splits["train"]["input_ids"][:] == second.splits["train"]["input_ids"][:] == third.splits["train"]["input_ids"][:]
    prepared(file, tokenizer, task=name, max_length=3)
    assert calls.read_text() == "xxxx"


def test_content_hash_sees_rows_and_labels_but_no_paths(tmp_path):
    more = {"task": "text-classification"}
    rows = [{"text": row["text"], "label": row["label"]} for row in ROWS]
    reference = prepared(write(tmp_path / "a.jsonl", rows), **more).content_hash
    assert prepared(write(tmp_path / "b.jsonl", rows), **more).content_hash == reference
    swapped = [rows[1], rows[0], *rows[2:]]
    relabelled = [{**row, "label": "yes" if i == 4 else row["label"]} for i, row in enumerate(rows)]
    renamed = [{**row, "label": row["label"] + "!"} for row in rows]
    for number, changed in enumerate((swapped, relabelled, renamed, rows[:-1])):
        assert prepared(write(tmp_path / f"c{number}.jsonl", changed), **more).content_hash != reference


# Batches


def test_causal_batch_by_hand():
    batch = TASKS["causal-lm"].collate([{"input_ids": [5, 0, 1], "length": 3}, {"input_ids": [7]}], 0)
    assert batch["input_ids"].tolist() == [[5, 0, 1], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, 1], [7, -100, -100]]  # a real token with the padding's id stays a target
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and all(v.dtype == torch.int64 for v in batch.values())


def test_classification_batch_by_hand():
    samples = [{"input_ids": [5, 6], "label": 2}, {"input_ids": [7], "label": 0}, {"input_ids": [8, 9, 3], "label": 1}]
    batch = TASKS["text-classification"].collate(samples, 4)
    assert batch["input_ids"].tolist() == [[5, 6, 4], [7, 4, 4], [8, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [2, 0, 1]
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and all(v.dtype == torch.int64 for v in batch.values())


def test_pad():
    assert pad([[], [1, 2]], 9).tolist() == [[9, 9], [1, 2]]
    assert pad([], 0).shape == (0, 0)
