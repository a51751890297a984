"""Datasets of all kinds -> tokenised samples; what is counted on the way; batches by hand."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ga import DataError, FinetuneConfig
from hf_ga.embedding.losses import InfoNCE
from hf_ga.finetuning.data import tasks
from hf_ga.finetuning.data.data import prepare_data, prepare_unlabelled
from hf_ga.finetuning.data.encoding.collation import collate_causal, collate_samples
from hf_ga.finetuning.data.formats import corpus
from hf_ga.finetuning.data.sources import load_rows
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.model.models import complete_config, load_model
from hf_ga.finetuning.run.run import Setup

LETTERS = "abcdefghij"
TEXTS = [" ".join(LETTERS[: 1 + i % 7]) for i in range(40)]
ROWS = [{"text": text, "label": ("no", "yes")[i % 2]} for i, text in enumerate(TEXTS)]


def letter_tokenizer(**special) -> PreTrainedTokenizerFast:
    """<pad> 0, <eos> 1, <unk> 2, a 3, b 4, ...: one token a letter, and no token is added."""
    words = ["<pad>", "<eos>", "<unk>", *LETTERS, "<cls>", "<sep>", "<mask>"]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{k: v for k, v in special.items() if v}
    )


def write(path, rows, features=None) -> str:
    """A file of the kind that its name ends with."""
    if ".csv" in path.suffixes:
        pd.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".parquet":
        Dataset.from_list(rows, features=features).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".txt":
        path.write_text("".join(row["text"] + "\n" for row in rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return str(path)


def prepared(dataset, tokenizer=None, **more):
    return prepare_data(
        FinetuneConfig(dataset_name=str(dataset), **more), tokenizer or letter_tokenizer()
    )


def rows_for(task: str) -> list[dict]:
    """The same 40 texts with labels that fit the task."""
    makers = {
        "regression": lambda i, text: {"text": text, "label": i / 4},
        "multi-label": lambda i, text: {"text": text, "labels": ["all", "odd"][: 1 + i % 2]},
        "token-classification": lambda i, text: {
            "tokens": text.split(),
            "tags": ["V" if w in "aei" else "C" for w in text.split()],
        },
        "question-answering": lambda i, text: {
            "question": "a b"[: 1 + i % 3],
            "context": text,
            "answers": {"text": [text[-1]], "answer_start": [len(text) - 1]},
        },
        "multiple-choice": lambda i, text: {
            "text": "a",
            "choices": ["b", text, "c d"],
            "label": i % 3,
        },
        "seq2seq": lambda i, text: {"source": text, "target": text[::-1]},
        "embedding": lambda i, text: {"anchor": text, "positive": text[::-1]},
    }
    make = makers.get(task, lambda i, text: {"text": text, "label": ("no", "yes")[i % 2]})
    return [make(i, text) for i, text in enumerate(TEXTS)]


def ids_of(text: str) -> list[int]:
    return [3 + LETTERS.index(letter) for letter in text.split()]


# Where rows come from


@pytest.mark.parametrize(
    "name",
    [
        "d.json",
        "d.jsonl",
        "d.csv",
        "d.txt",
        "d.parquet",
        "d.jsonl.gz",
        "d.csv.gz",
        "saved",
        "files",
    ],
)
def test_sources(name, tmp_path):
    """Every kind gives the same rows, in the same order, and the same 4 of 40 (10 %) to validate
    on.
    """
    if name == "saved":
        Dataset.from_list(ROWS).save_to_disk(tmp_path / name)
    elif name == "files":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", ROWS)
    else:
        write(tmp_path / name, ROWS)
    rows = load_rows(
        FinetuneConfig(dataset_name=str(tmp_path / name), validation_split_percentage=10.0)
    )[0]
    assert rows.num_rows == {"train": 36, "validation": 4}
    reference = load_rows(
        FinetuneConfig(
            dataset_name=write(tmp_path / "r.jsonl", ROWS), validation_split_percentage=10.0
        )
    )[0]
    for split in rows:
        assert list(rows[split]["text"]) == list(reference[split]["text"])
    assert Counter([*rows["train"]["text"], *rows["validation"]["text"]]) == Counter(TEXTS)


def test_saved_splits_are_used_as_they_are(tmp_path):
    splits = {
        "train": ROWS[:20],
        "validation": ROWS[20:23],
        "test": ROWS[23:30],
        "unlabelled": [{"body": "x"}],
    }
    DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
        tmp_path / "saved"
    )
    data = prepared(tmp_path / "saved")
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 20,
        "validation": 3,
        "test": 7,
    }
    assert [list(ids) for ids in data.splits["validation"]["input_ids"]] == [
        [*ids_of(row["text"]), 1] for row in ROWS[20:23]
    ]


def test_files_win_over_splits(tmp_path):
    DatasetDict(train=Dataset.from_list(ROWS), validation=Dataset.from_list(ROWS[:2])).save_to_disk(
        tmp_path / "saved"
    )
    files = {
        "validation_file": write(tmp_path / "v.jsonl", ROWS[5:8]),
        "test_file": write(tmp_path / "t.csv", ROWS),
    }
    rows = load_rows(FinetuneConfig(dataset_name=str(tmp_path / "saved"), **files))[0]
    assert rows.num_rows == {"train": 40, "validation": 3, "test": 40}
    assert list(rows["validation"]["text"]) == TEXTS[5:8]


def test_folder_without_training_rows(tmp_path):
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no rows to train on \(splits: {'test': 40}\)"):
        load_rows(FinetuneConfig(dataset_name=str(tmp_path / "saved")))


def test_validation_rows_are_chosen_by_a_fixed_seed(tmp_path):
    """Not by the run's: runs of different seeds are compared on the same rows. None is in both,
    none is lost.
    """
    file = write(tmp_path / "d.jsonl", [{"text": f"row {i}"} for i in range(200)])
    chosen = []
    for seed in (0, 1):
        rows = load_rows(FinetuneConfig(dataset_name=file, seed=seed))[0]
        train = set(rows["train"]["text"])
        validation = set(rows["validation"]["text"])
        assert not train & validation
        assert len(train | validation) == 200
        assert len(validation) == 10
        chosen.append(sorted(validation))
    assert chosen[0] == chosen[1] != [f"row {i}" for i in range(10)]


def test_several_files_and_patterns(tmp_path):
    """In the given order, a pattern's files by path; a stream reads the same rows."""
    (tmp_path / "part-9.jsonl").mkdir()
    for name, start in {"part-2.jsonl": 0, "part-10.jsonl": 7, "more.jsonl.gz": 30}.items():
        write(tmp_path / name, ROWS[start : start + 7])
    names = [tmp_path / "more.jsonl.gz", tmp_path / "part-*.jsonl"]
    expected = TEXTS[30:37] + TEXTS[7:14] + TEXTS[:7]
    config = FinetuneConfig(dataset_name=names, validation_file=names[1:], test_file=names)
    rows = load_rows(config)[0]
    assert (list(rows["train"]["text"]), list(rows["test"]["text"])) == (expected, expected)
    assert config.validation_file == str(names[1])
    assert list(rows["validation"]["text"]) == expected[7:]
    splits, stream = load_rows(replace(config, streaming=True))
    assert [row["text"] for row in stream] == list(splits["train"]["text"]) == expected


@pytest.mark.parametrize("fewer", ["f.jsonl", "f.parquet"])
def test_files_that_lack_a_column(fewer, tmp_path):
    """`datasets` fills it with None."""
    path = Path(fewer)
    files = [write(tmp_path / f"all{path.suffix}", ROWS), write(tmp_path / fewer, [{"text": "a"}])]
    with pytest.raises(
        DataError, match=rf"all{path.suffix} has label, text; \S+{fewer} has text\. Give all"
    ):
        load_rows(FinetuneConfig(dataset_name=files))


def test_weights_mix_datasets_up_to_the_end_of_one(tmp_path):
    """The library draws sources by `default_rng(0).choice` in blocks of 1000; it stops at the last
    row of one of them.
    """
    texts = [
        [f"{name}{i}" for i in range(count)]
        for name, count in {"a": 700, "b": 100, "c": 90}.items()
    ]
    rows = [[{"text": text} for text in of_one] for of_one in texts]
    folders = [tmp_path / "saved", tmp_path / "folder"]
    DatasetDict(train=Dataset.from_list(rows[0]), test=Dataset.from_list(rows[0][:3])).save_to_disk(
        folders[0]
    )
    folders[1].mkdir()
    for split, of_split in {
        "train": rows[1],
        "test": rows[1][:2],
        "validation": rows[1][:4],
    }.items():
        write(folders[1] / f"{split}.jsonl", of_split)
    (tmp_path / "c.csv").write_text("\n".join(["text", *texts[2]]))
    config = FinetuneConfig(
        dataset_name=[*folders, str(tmp_path / "c.csv")], dataset_weights=[7, 2, 1], seed=1
    )
    mixed = []
    remaining = [iter(of_one) for of_one in texts]
    for source in np.random.default_rng(0).choice(3, size=1000, p=[0.7, 0.2, 0.1]):
        mixed.append(next(remaining[source]))
        if mixed[-1] in ("a699", "b99", "c89"):
            break
    loaded = load_rows(config)[0]
    assert list(loaded["train"]["text"]) == mixed
    assert len(mixed) < 800
    assert mixed[-1] == "b99"
    shares = [sum(text[0] == name for text in mixed) / len(mixed) for name in "abc"]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.08)
    assert (list(loaded["test"]["text"]), list(loaded["validation"]["text"])) == (
        texts[0][:3] + texts[1][:2],
        texts[1][:4],
    )
    config.dataset_name = [str(folders[1]), str(write(tmp_path / "c.jsonl", rows[2]))]
    config.dataset_weights = [2, 1]
    mixed = list(load_rows(config)[0]["train"]["text"])
    epochs = []
    for epoch in (0, 1, 1):
        _, stream = load_rows(replace(config, streaming=True))
        stream.set_epoch(epoch)  # other draws in each
        epochs.append([row["text"] for row in stream])
    assert epochs[0] == mixed != epochs[1] == epochs[2]
    assert {"b0", "c0"} < set(epochs[1])
    config.dataset_weights = None
    _, stream = load_rows(replace(config, streaming=True))
    assert (
        list(load_rows(config)[0]["train"]["text"])
        == texts[1] + texts[2]
        == [row["text"] for row in stream]
    )


def test_a_weight_without_training_rows(tmp_path):
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    names = [write(tmp_path / "d.jsonl", ROWS), tmp_path / "saved"]
    assert load_rows(FinetuneConfig(dataset_name=names))[0].num_rows == {
        "train": 38,
        "validation": 2,
        "test": 40,
    }
    with pytest.raises(DataError, match="saved has no training rows to mix"):
        load_rows(FinetuneConfig(dataset_name=names, dataset_weights=[1, 1]))


# Columns and labels


def test_chosen_columns_win_over_default_names(tmp_path):
    """Columns called `text` and `label` are there, but others are asked for, even with the names
    exchanged.
    """
    rows = [
        {"text": "yes", "label": "a b", "body": "c d e", "class": "x"},
        {"text": "no", "label": "a", "body": "c", "class": "y"},
    ]
    file = write(tmp_path / "d.jsonl", rows * 2)
    more = {"task": "text-classification"}
    more["validation_file"] = file
    data = prepared(file, text_column="body", label_column="class", **more)
    assert (data.labels, data.splits["train"][0]["input_ids"]) == (["x", "y"], [5, 6, 7])
    data = prepared(file, text_column="label", label_column="text", **more)
    assert (
        data.labels,
        data.splits["train"][0]["input_ids"],
        data.splits["train"][0]["label"],
    ) == (["no", "yes"], [3, 4], 1)


def test_rows_are_counted_and_said(tmp_path):
    """Max length 4: by hand 2 of 7 rows are cut, 2 empty ones are left out, 1 has no target."""
    texts = ["a b", "a b c", "a b c d", "a b c d e f", "", None, "<eos>"]
    file = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    other = write(tmp_path / "v.jsonl", [{"text": "a b"}])
    data = prepared(file, validation_file=other, max_length=4)
    assert data.splits["train"]["input_ids"][:] == [
        [3, 4, 1],
        [3, 4, 5, 1],
        [3, 4, 5, 6],
        [3, 4, 5, 6],
        [1],
    ]
    assert data.splits["train"]["num_targets"][:] == [2, 3, 3, 3, 0]
    assert data.notes == [
        "train: 2 of 7 rows truncated to 4 tokens",
        "train: 2 of 7 rows skipped because they are empty or null",
        "train: 1 of 7 rows without a target (they do not contribute to the loss)",
    ]


def test_tokenizer_without_padding_token_pads_with_the_end(tmp_path):
    """Padding is ignored by its place, not by its id: the real end-of-text token stays a target."""
    data = prepared(write(tmp_path / "d.jsonl", ROWS), letter_tokenizer(pad_token=None))
    batch = data.collate([{"input_ids": [3, 4, 1]}, {"input_ids": [3, 1]}])
    assert batch["input_ids"].tolist() == [[3, 4, 1], [3, 1, 1]]
    assert batch["labels"].tolist() == [[3, 4, 1], [3, 1, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("name", TASKS)
def test_second_preparation_reads_the_cache(name, tmp_path, monkeypatch):
    """Also with a tokenizer that was used in between; another max_length tokenises again (the
    control).
    """
    calls = tmp_path / "calls"

    def tokenize(rows, tokenizer, max_length):
        with calls.open("a") as file:
            file.write("x")
        return task.tokenize(rows, tokenizer, max_length)

    task = TASKS[name]
    special = {"cls_token": "<cls>", "sep_token": "<sep>"}
    monkeypatch.setitem(TASKS, name, tasks.Task(**{**task.__dict__, "tokenize": tokenize}))
    file = write(tmp_path / "d.jsonl", rows_for(name))
    tokenizer = letter_tokenizer(**special)
    first = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"  # train and validation
    tokenizer(["a b", "c"], padding=True, truncation=True, max_length=1)
    second = prepared(file, letter_tokenizer(**special), task=name)
    third = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"
    assert (
        first.splits["train"]["input_ids"][:]
        == second.splits["train"]["input_ids"][:]
        == third.splits["train"]["input_ids"][:]
    )
    prepared(file, tokenizer, task=name, max_length=7)
    assert calls.read_text() == "xxxx"


SPECIAL = {"cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ ('a ' if m['role'] == 'user' else 'b ') + m['content'] + ' <eos> ' "
    "}}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'b ' }}{% endif %}"
)


def test_regression(tmp_path):
    """Test rows that are all -1 are unlabelled; if only some are, -1 is a number."""

    def numbers(name, *labels):
        return write(
            tmp_path / f"{name}.jsonl", [{"text": "a", "label": label} for label in labels]
        )

    flags = {"task": "regression", "validation_file": numbers("v", 1.0, 7.0)}
    data = prepared(numbers("d", 1, 2, 3), **flags, test_file=numbers("t", -1.0, -1.0))
    assert data.splits["train"]["label"][:] == [1.0, 2.0, 3.0]
    assert data.labels == []
    assert data.notes == [
        "skipped the test rows: all their labels are -1 or empty, which means unlabelled"
    ]
    assert data.collate([data.splits["train"][1]])["labels"].tolist() == [2.0]
    assert prepared(numbers("d", 1, 2, 3), **flags, test_file=numbers("u", -1, 3)).splits["test"][
        "label"
    ][:] == [-1.0, 3.0]


def test_multi_label(tmp_path):
    """Rows without any label are rows too, also if no other row of the split has one."""
    train = write(
        tmp_path / "d.jsonl",
        [{"text": "a", "labels": labels} for labels in (["x", "y"], [], ["z"])],
    )
    none = write(tmp_path / "n.jsonl", [{"text": "a", "labels": []}] * 2)
    data = prepared(train, task="multi-label", validation_file=none, test_file=none)
    assert data.splits["train"]["label"][:] == [[0, 1], [], [2]]
    assert data.labels == ["x", "y", "z"]
    assert data.splits["validation"]["label"][:] == data.splits["test"]["label"][:] == [[], []]
    assert data.notes == []
    assert data.collate([data.splits["train"][i] for i in range(3)])["labels"].tolist() == [
        [1, 1, 0],
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_blocks(tmp_path):
    """By hand: 3 + 2 + 4 tokens with their ends, cut every 4; the empty row is left out, nothing is
    cut off.
    """
    texts = ["a b", "c", "", "d e f"]
    file = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    data = prepared(file, validation_file=file, block_size=4, max_length=2)
    assert data.splits["train"]["input_ids"][:] == [[3, 4, 1, 5], [1, 6, 7, 8], [1]]
    assert [fact for fact in data.notes if fact.startswith("train")] == [
        "train: 1 of 4 rows skipped because they are empty or null",
        "train: 3 rows, 9 tokens, concatenated and split into 3 blocks of 4 tokens (the last has 1)",
    ]
    again = prepared(file, validation_file=file, block_size=4, max_length=99)
    assert (
        again.content_hash
        == data.content_hash
        != prepared(file, validation_file=file, block_size=3).content_hash
    )


HASHED = {
    "masked-lm": [{"text": "a b"}, {"text": "c"}],
    "causal-lm": [{"prompt": "a b", "completion": " c"}, {"prompt": "a b", "completion": " d"}],
    "text-classification": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
    "regression": [{"text": "a", "label": 0.25}, {"text": "b", "label": 1.0}],
    "multi-label": [{"text": "a", "labels": ["x"]}, {"text": "a", "labels": ["y", "x"]}],
    "token-classification": [
        {"tokens": ["a", "b"], "tags": ["x", "y"]},
        {"tokens": ["c"], "tags": ["y"]},
    ],
    "question-answering": [
        {"question": "a", "context": "b c", "answers": {"text": ["b"], "answer_start": [0]}}
    ]
    * 2,
    "seq2seq": [{"source": "a", "target": "b"}, {"source": "a", "target": "c"}],
}
CHANGED = [  # most have the same ids in `input_ids`
    ("causal-lm", [{"prompt": "a", "completion": " b c"}, {"prompt": "a b", "completion": " d"}]),
    ("text-classification", [{"text": "a", "label": "y"}, {"text": "b", "label": "x"}]),
    (
        "text-classification",
        [{"text": "b", "label": "y"}, {"text": "a", "label": "x"}],
    ),  # another order
    (
        "text-classification",
        [{"text": "a", "label": "x!"}, {"text": "b", "label": "y"}],
    ),  # another name
    (
        "text-classification",
        [*HASHED["text-classification"], {"text": "b", "label": "y"}],
    ),  # one more
    ("regression", [{"text": "a", "label": 0.25}, {"text": "b", "label": 1.0000001}]),
    (
        "multi-label",
        [{"text": "a", "labels": ["x", "y"]}, {"text": "a", "labels": ["x"]}],
    ),  # flat the same: x y x
    (
        "question-answering",
        [{"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [2]}}] * 2,
    ),
    ("seq2seq", [{"source": "a", "target": "c"}, {"source": "a", "target": "b"}]),
]


@pytest.mark.parametrize(("name", "changed"), CHANGED, ids=str)
def test_content_hash_sees_rows_and_labels_but_no_paths(name, changed, tmp_path):
    files = [
        write(tmp_path / f"{i}.jsonl", rows)
        for i, rows in enumerate((HASHED[name], HASHED[name], changed))
    ]
    data = [
        prepared(file, letter_tokenizer(**SPECIAL), task=name, validation_file=file)
        for file in files
    ]
    assert data[0].content_hash == data[1].content_hash != data[2].content_hash
    if name == "causal-lm":
        assert data[0].splits["train"]["input_ids"][:] == data[2].splits["train"]["input_ids"][:]


def test_cache_of_completions_knows_the_template(tmp_path):
    """Another template is another preparation."""
    file = write(tmp_path / "d.jsonl", [{"prompt": "c", "completion": "d"}])
    tokenizer = letter_tokenizer()
    plain = prepared(file, tokenizer, validation_file=file)
    tokenizer.chat_template = CHAT_TEMPLATE
    first = prepared(file, tokenizer, validation_file=file)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'a '", "'j '")
    second = prepared(file, tokenizer, validation_file=file)
    ids = [data.splits["train"]["input_ids"][0] for data in (plain, first, second)]
    assert ids == [
        [2, 1],
        [3, 5, 1, 4, 6, 1],
        [12, 5, 1, 4, 6, 1],
    ]  # without a space `cd` is one unknown word


def test_cache_knows_the_side_that_is_cut(tmp_path):
    file = write(tmp_path / "d.jsonl", HASHED["text-classification"])
    more = {"task": "text-classification", "max_length": 3}
    long = write(tmp_path / "v.jsonl", [{"text": "a b c", "label": "x"}])
    kept = []
    for side in ("right", "left"):
        data = prepared(
            file, letter_tokenizer(**SPECIAL, truncation_side=side), validation_file=long, **more
        )
        kept.append(data.splits["validation"]["input_ids"][0])
    assert kept == [[13, 3, 14], [13, 5, 14]]


def test_evaluation_of_given_files_reads_nothing_else(tmp_path, monkeypatch):
    """Not the embedded corpus, which is the default dataset; no training rows are needed."""
    monkeypatch.setattr(corpus, "load", lambda *_: pytest.fail("the embedded corpus was read"))
    other = write(
        tmp_path / "v.jsonl", [{"text": "a b", "label": "pos"}, {"text": "c", "label": "pos"}]
    )
    test = write(tmp_path / "t.jsonl", [{"text": "d", "label": "neg"}])
    more = {"validation_file": other, "test_file": test, "max_eval_samples": 1}
    config = FinetuneConfig(
        eval_only=True, model_name_or_path="m", task="text-classification", **more
    )
    data = prepare_data(config, letter_tokenizer(), model_labels=["pos", "neg"])
    assert {split: dataset["label"][:] for split, dataset in data.splits.items()} == {
        "validation": [0],
        "test": [1],
    }
    assert data.labels == ["pos", "neg"]
    assert data.notes == []
    assert data.content_hash == ""
    assert data.description == f"{other}, {test}: 1 validation, 1 test rows"
    config.validation_file = None
    assert set(prepare_data(config, letter_tokenizer(), model_labels=["pos", "neg"]).splits) == {
        "test"
    }
    config.test_file = write(tmp_path / "u.jsonl", [{"text": "d", "label": -1}])
    with pytest.raises(DataError, match="all labels of the test rows are -1"):
        prepare_data(config, letter_tokenizer(), model_labels=["pos", "neg"])


def test_evaluation_of_a_dataset_takes_its_own_splits(tmp_path):
    """Named datasets are read; of a file the rows that training would have validated on; training
    rows are not tokenised.
    """
    file = write(tmp_path / "d.jsonl", ROWS)
    config = FinetuneConfig(
        dataset_name=file, model_name_or_path="m", test_file=write(tmp_path / "t.jsonl", ROWS[:3])
    )
    trained = prepare_data(config, letter_tokenizer())
    config.eval_only = True
    data = prepare_data(config, letter_tokenizer())
    assert set(data.splits) == {"validation", "test"}
    assert len(data.splits["test"]) == 3
    assert data.splits["validation"]["input_ids"][:] == trained.splits["validation"]["input_ids"][:]
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    config = FinetuneConfig(
        dataset_name=str(tmp_path / "saved"), model_name_or_path="m", eval_only=True
    )
    assert set(prepare_data(config, letter_tokenizer()).splits) == {"test"}
    DatasetDict(other=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "none")
    config.dataset_name = str(tmp_path / "none")
    with pytest.raises(DataError, match="no rows to evaluate"):
        prepare_data(config, letter_tokenizer())


# Rows to predict


def to_predict(task, rows, train, tmp_path, tokenizer=None, known=None, **more):
    """After training rows were read, or (None) alone, as an evaluation does."""
    file = write(tmp_path / "p.jsonl", rows)
    if train is None:
        config = FinetuneConfig(
            task=task, eval_only=True, model_name_or_path="m", predict_file=file, **more
        )
    else:
        config = FinetuneConfig(
            task=task, dataset_name=write(tmp_path / "d.jsonl", train), predict_file=file, **more
        )
        config.validation_file = config.dataset_name
    data = prepare_data(config, tokenizer or letter_tokenizer(**SPECIAL), known)
    return data, *prepare_unlabelled(data)


PREDICTED = {
    "masked-lm": ([{"id": 5, "text": "a <mask>"}, {"id": 6, "text": None}], [[13, 3, 15, 14], []]),
    "text-classification": (
        [{"id": 5, "text": "a b"}, {"id": 6, "text": ""}, {"id": 7, "text": "c"}],
        [[13, 3, 4, 14], [], [13, 5, 14]],
    ),
    "regression": ([{"text": "a", "label": "whatever"}], [[13, 3, 14]]),
    "multi-label": ([{"text": "a", "labels": None}], [[13, 3, 14]]),
    "token-classification": (
        [{"tokens": ["a", "b c", "<gone>"]}, {"tokens": []}],
        [[13, 3, 4, 5, 2, 14], []],
    ),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", PREDICTED)
def test_rows_to_predict(name, alone, tmp_path):
    """One sample a row, empty where the row is; labels are not needed; the rows come back as they
    are.
    """
    rows, ids = PREDICTED[name]
    train = None if alone else HASHED[name]
    data, as_they_are, samples = to_predict(name, rows, train, tmp_path, known=["x", "y"])
    assert samples["input_ids"][:] == ids
    assert samples["length"][:] == [len(row) for row in ids]
    assert as_they_are.to_list() == rows
    if name == "token-classification":
        assert samples["label"][:] == [[-100, 0, 1, -100, 2, -100], []]
    else:
        assert "label" not in samples.column_names
    assert data.labels == ([] if name in ("masked-lm", "regression") else ["x", "y"])


def test_pairs_to_predict(tmp_path):
    """Under the columns of training, whatever they are called, and cut as in training."""
    train = [{"one": "a", "two": "b", "y": 1}, {"one": "c", "two": "d", "y": 2}]
    flags = {"text_column": "one", "text_pair_column": "two", "label_column": "y"}
    rows = [{"two": "d d", "one": "a b c", "text": "j"}, {"two": None, "one": None, "text": "j"}]
    _, _, samples = to_predict("regression", rows, train, tmp_path, **flags, max_length=6)
    assert samples["input_ids"][:] == [[13, 3, 4, 14, 6, 14], []]
    with pytest.raises(
        DataError, match="text_pair_column 'two' is not in the predict rows, which have: one"
    ):
        to_predict("regression", [{"one": "a"}], train, tmp_path, **flags)


@pytest.mark.parametrize(
    ("collate", "own", "labels"),
    [
        (
            collate_causal,
            [{"label": 1}] * 2,
            [[5, 0, 1], [7, -100, -100]],
        ),  # a real token with the padding's id stays a target
        (collate_samples, [{"label": 2}, {"label": 0}], [2, 0]),
    ],
)
def test_batches_by_hand(collate, own, labels):
    batch = collate(
        [
            {"input_ids": [5, 0, 1], "length": 3, **own[0]},
            {"input_ids": [7], "length": 1, **own[1]},
        ],
        0,
    )
    assert batch["input_ids"].tolist() == [[5, 0, 1], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == labels
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert all(v.dtype == torch.int64 for v in batch.values())


def test_translations_are_flattened(tmp_path):
    """In training and in a file to predict, whose rows keep their shape."""
    rows = [{"translation": {"de": text, "en": text[::-1]}} for text in TEXTS]
    file = write(tmp_path / "d.jsonl", rows)
    data = prepared(file, letter_tokenizer(), task="seq2seq")
    assert data.columns == {"text": "translation.de", "target": "translation.en"}
    sample = data.splits["train"][1]
    assert sample["target"] == sample["target"][::-1][::-1]
    assert sample["labels"] == [
        *ids_of(sample["target"]),
        1,
    ]
    predicted = write(tmp_path / "p.jsonl", [{"translation": {"de": "a b"}}])
    data.options.predict_file = predicted
    kept, samples = prepare_unlabelled(data)
    assert kept[0] == {"translation": {"de": "a b"}}
    assert samples["input_ids"][:] == [[3, 4]]


def test_facts_of_answers(tmp_path):
    """Five rows of which one has no answer, and one loses it at 7 tokens."""
    answers = [
        ("c d e f", "c", 0),
        ("c d e f", "c", 0),
        ("d e f g", "d", 0),
        ("c d e f", "f", 6),
        ("c d", None, None),
    ]
    rows = [
        {
            "question": "a",
            "context": context,
            "answers": {"text": [text] * bool(text), "answer_start": [start] * bool(text)},
        }
        for context, text, start in answers
    ]
    file = write(tmp_path / "d.jsonl", rows)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="question-answering", validation_file=file, max_length=7)
    assert data.notes[:2] == [
        "train: 4 of 5 rows truncated to 7 tokens",
        "train: 1 of 5 rows trained as unanswerable, as no sample of max_length has their whole answer",
    ]
    assert not {"context", "answers", "starts", "ends", "no_answer", "answer_is_lost"} & set(
        data.samples("train").column_names
    )
    assert data.labels == []


@pytest.mark.parametrize("label", [-1, "", None])
def test_unlabelled_test_rows_of_choices_are_left_out(label, tmp_path):
    rows = [{"text": "a", "choices": ["b", "c"], "label": str(i % 2)} for i in range(6)]
    file = write(tmp_path / "d.jsonl", rows)
    test = write(
        tmp_path / "test.jsonl", [{"text": "a", "choices": ["b", "c"], "label": label}] * 3
    )
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="multiple-choice", validation_file=file, test_file=test)
    assert "test" not in data.splits
    assert any("skipped the test rows" in fact for fact in data.notes)


@pytest.mark.parametrize("name", TASKS)
def test_small_models_take_the_samples(name, tmp_path):
    """The model that is built where none is named: positions for a max_length beyond the usual, a
    finite loss with a gradient.
    """
    file = write(tmp_path / "d.jsonl", rows_for(name))
    config = FinetuneConfig(dataset_name=file, validation_file=file, task=name, max_length=300)
    tokenizer = letter_tokenizer(
        cls_token="<cls>", sep_token="<sep>", mask_token="<mask>", bos_token="<eos>"
    )
    data = prepare_data(config, tokenizer)
    model_config = complete_config(None, config, data)
    accelerator = SimpleNamespace(mixed_precision="no")
    model, new = load_model(
        Setup(config=config, accelerator=accelerator, data=data, model_config=model_config)
    )
    assert new == []
    assert model_config.max_position_embeddings >= 300
    assert sum(p.numel() for p in model.parameters()) < 2e6
    samples = data.samples("train")
    np.random.seed(
        0
        # as a loader does: masks are drawn from it, and other states may leave these three samples
        # without a target
    )
    batch = data.collate([samples[i] for i in (0, 5, 9)])
    outputs = model(**batch)
    loss = InfoNCE()(outputs, batch) if name == "embedding" else outputs.loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    longest = torch.full((1, 1, 300) if name == "multiple-choice" else (1, 300), 3)
    encoder = model.encoder if name == "embedding" else model
    encoder(input_ids=longest, **({"decoder_input_ids": longest} if name == "seq2seq" else {}))


def test_only_the_first_rows(tmp_path):
    """Validation rows are split off before: the limit does not change them."""
    rows = [{"text": f"row {i}", "label": i % 2} for i in range(40)]
    files = {name: write(tmp_path / f"{name}.jsonl", rows[:20]) for name in ("validation", "test")}
    limits = {"max_train_samples": 7, "max_eval_samples": 50, "max_predict_samples": 3}
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    options = {"task": "text-classification", **limits}
    file = write(tmp_path / "train.jsonl", rows)
    both = {"validation_file": files["validation"], "test_file": files["test"]}
    data = prepared(file, tokenizer, **options, **both)
    whole = prepared(file, tokenizer, task="text-classification", **both)
    assert {split: len(samples) for split, samples in data.splits.items()} == {
        "train": 7,
        "validation": 20,
        "test": 3,
    }
    assert data.splits["train"]["input_ids"][:] == whole.splits["train"]["input_ids"][:7]
    data.options.predict_file = files["test"]
    assert [len(part) for part in prepare_unlabelled(data)] == [3, 3]
    split = prepared(file, tokenizer, **options, validation_split_percentage=25)
    assert len(split.splits["validation"]) == 10
    assert len(split.splits["train"]) == 7
