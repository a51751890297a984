"""Datasets of all kinds -> tokenised samples; what is counted on the way; batches by hand."""

import csv
import gzip
import json
from collections import Counter

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ga import ConfigError, DataError, FinetuneConfig
from hf_ga.data import corpus, tasks
from hf_ga.data.collation import collate_causal, collate_labels, pad
from hf_ga.data.columns import choose_columns
from hf_ga.data.data import prepare_data, prepare_unlabelled
from hf_ga.data.sources import load_rows
from hf_ga.data.tasks import TASKS
from hf_ga.run.models import complete_config, load_model

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
    words = ["<pad>", "<eos>", "<unk>", *LETTERS, "<cls>", "<sep>", "<mask>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{k: v for k, v in special.items() if v})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(dataset, tokenizer=None, **more):
    return prepare_data(FinetuneConfig(dataset_name=str(dataset), **more), tokenizer or letter_tokenizer())


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
        "multiple-choice": lambda i, text: {"text": "a", "choices": ["b", text, "c d"], "label": i % 3},
        "seq2seq": lambda i, text: {"source": text, "target": text[::-1]},
    }
    make = makers.get(task, lambda i, text: {"text": text, "label": ("no", "yes")[i % 2]})
    return [make(i, text) for i, text in enumerate(TEXTS)]


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
    """The embedded corpus with its own splits: packages as labels, the case of words as tags."""
    data = prepare_data(FinetuneConfig(task="text-classification", max_length=32), corpus.load_stdlib_tokenizer())
    assert len(data.labels) > 5 and data.labels == sorted(data.labels)
    assert set(data.splits) == {"train", "validation", "test"} and "standard library of Python" in data.description
    sample, row = data.splits["train"][0], corpus.load("text-classification")["train"][0]
    assert data.labels[sample["label"]] == row["label"]
    tokenizer = data.tokenizer
    assert (sample["input_ids"][0], sample["input_ids"][-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert max(data.splits["train"]["length"]) == 32
    data = prepare_data(FinetuneConfig(task="token-classification"), corpus.load_stdlib_tokenizer())
    assert data.labels == ["Mixed", "Title", "UPPER", "lower", "none"]
    with pytest.raises(ConfigError, match=r"no data for seq2seq.*--dataset_name"):
        prepare_data(FinetuneConfig(task="seq2seq"), corpus.load_stdlib_tokenizer())


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
    with pytest.raises(DataError, match=f"unknown labels in the validation rows.*{labels[0]}"):
        prepared(tmp_path / "saved", task="text-classification", validation_file=file)


# Which columns

TASK_COLUMNS = {  # task: columns of a dataset (L: of lists, M: of messages, i: of numbers, others: strings), flags, what is chosen
    "text": ("causal-lm", "text label", {}, {"text": "text"}),
    "only strings": ("causal-lm", "i_n body", {}, {"text": "body"}),
    "strings beside the label": ("text-classification", "label body", {}, {"text": "body", "label": "label"}),
    "strings beside a named label": (
        "text-classification",
        "kind body",
        {"label_column": "kind"},
        {"text": "body", "label": "kind"},
    ),
    "strings beside a named second text": (
        "regression",
        "body more label",
        {"text_pair_column": "more"},
        {"text": "body", "text_pair": "more", "label": "label"},
    ),
    "named text wins over conversations": ("causal-lm", "prompt completion", {"text_column": "prompt"}, {"text": "prompt"}),
    "conversation wins over text": ("causal-lm", "text M_messages", {}, {"M_messages": "M_messages"}),
    "prompts": ("causal-lm", "text prompt completion", {}, {"prompt": "prompt", "completion": "completion"}),
    "masked-lm reads no conversations": ("masked-lm", "text prompt completion", {}, {"text": "text"}),
    "labels": ("text-classification", "text labels", {}, {"text": "text", "label": "labels"}),
    "label before labels": ("text-classification", "text labels label", {}, {"text": "text", "label": "label"}),
    "labels before label": ("multi-label", "text label L_labels labels", {}, {"text": "text", "label": "labels"}),
    "score": ("regression", "text i_n score", {}, {"text": "text", "label": "score"}),
    "ner_tags": ("token-classification", "words L_x pos_tags ner_tags", {}, {"tokens": "words", "label": "ner_tags"}),
    "tags": ("token-classification", "words tokens tags ner_tags", {}, {"tokens": "tokens", "label": "tags"}),
    "words by flag": (
        "token-classification",
        "tokens tags mine more",
        {"text_column": "mine", "label_column": "more"},
        {"tokens": "mine", "label": "more"},
    ),
    "a text alone": (
        "text-classification",
        "sentence1 sentence2 label",
        {"text_column": "sentence1"},
        {"text": "sentence1", "label": "label"},
    ),
    "a pair by flags": (
        "regression",
        "a b score",
        {"text_column": "a", "text_pair_column": "b"},
        {"text": "a", "text_pair": "b", "label": "score"},
    ),
    "a second text by flag": (
        "regression",
        "text b score",
        {"text_pair_column": "b"},
        {"text": "text", "text_pair": "b", "label": "score"},
    ),
    "SQuAD": (
        "question-answering",
        "id title context question A_answers",
        {},
        {"question": "question", "context": "context", "A_answers": "A_answers"},
    ),
    "answers by flags": (
        "question-answering",
        "q passage A_found question",
        {"text_column": "q", "text_pair_column": "passage", "label_column": "found"},
        {"question": "q", "context": "passage", "A_answers": "A_found"},
    ),
    "SWAG": (
        "multiple-choice",
        "sent1 sent2 ending1 ending0 label",
        {},
        {"text": "sent1", "text_pair": "sent2", "choice0": "ending0", "choice1": "ending1", "label": "label"},
    ),
    "choices by flag": (
        "multiple-choice",
        "question L_choices L_mine answer",
        {"choices_column": "L_mine"},
        {"text": "question", "choices": "L_mine", "label": "answer"},
    ),
    "source and target": ("seq2seq", "target source text", {}, {"text": "source", "target": "target"}),
    "summaries": ("seq2seq", "id document summary", {}, {"text": "document", "target": "summary"}),
    "news": ("seq2seq", "article highlights id", {}, {"text": "article", "target": "highlights"}),
    "target by flag": ("seq2seq", "document summary title", {"target_column": "title"}, {"text": "document", "target": "title"}),
    "translations": (
        "seq2seq",
        "translation.de translation.en",
        {},
        {"text": "translation.de", "target": "translation.en"},
    ),
    "translations the other way": (
        "seq2seq",
        "translation.de translation.en",
        {"text_column": "translation.en"},
        {"text": "translation.en", "target": "translation.de"},
    ),
}
for first, second in [
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
]:
    for name in ("text-classification", "multi-label", "regression"):
        TASK_COLUMNS[f"{first}, {name}"] = (
            name,
            f"{second} text {first} label",
            {},
            {"text": first, "text_pair": second, "label": "label"},
        )
    alone = {"label_column": "i_label"}
    TASK_COLUMNS[f"{first} without {second}"] = ("regression", f"{first} i_label", alone, {"text": first, "label": "i_label"})
    TASK_COLUMNS[f"{first} alone"] = ("regression", f"text {first} label", {}, {"text": "text", "label": "label"})


def plain(name: str) -> str:
    return name.removeprefix("M_").removeprefix("A_")


def empty_splits(columns: str, *splits: str) -> DatasetDict:
    kinds = {"L": List(Value("string")), "M": List({"role": Value("string"), "content": Value("string")}), "i": Value("int64")}
    kinds["A"] = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
    features = {plain(name): kinds.get(name[0] if name[1:2] == "_" else "", Value("string")) for name in columns.split()}
    return DatasetDict({s: Dataset.from_dict({c: [] for c in features}, Features(features)) for s in splits or ("train",)})


@pytest.mark.parametrize("case", TASK_COLUMNS)
def test_columns(case):
    name, columns, flags, chosen = TASK_COLUMNS[case]
    found = choose_columns(empty_splits(columns), FinetuneConfig(dataset_name="x", task=name, **flags), TASKS[name])
    assert found == {plain(role): plain(column) for role, column in chosen.items()}


MISSING = {
    "text": ("causal-lm", "body title", {}, "text_column 'text' is not in the train rows.*body, title.*--text_column"),
    "several strings beside the label": (
        "text-classification",
        "title body label",
        {},
        "text_column 'text' is not in.*--text_column",
    ),
    "strings of the label alone": ("regression", "i_n label", {}, "text_column 'text' is not in.*i_n, label.*--text_column"),
    "named text": ("masked-lm", "text", {"text_column": "b"}, "text_column 'b' is not in.*--text_column"),
    "label": ("regression", "text", {}, "label_column 'label' is not in.*--label_column"),
    "sets": ("multi-label", "text tags", {}, "label_column 'labels' is not in.*--label_column"),
    "named label": ("text-classification", "text label", {"label_column": "y"}, "label_column 'y' is not in.*--label_column"),
    "pair": (
        "text-classification",
        "text label",
        {"text_pair_column": "text_pair"},
        "text_pair_column 'text_pair' is not in.*--text_pair_column",
    ),
    "words": ("token-classification", "text tags", {}, "text_column 'tokens' is not in.*--text_column"),
    "tags": ("token-classification", "tokens", {}, "label_column 'tags' is not in.*--label_column"),
    "one column twice": (
        "regression",
        "text label",
        {"label_column": "text"},
        "text_column and label_column must be different columns",
    ),
    "words that are the tags": (
        "token-classification",
        "tags",
        {"text_column": "tags"},
        "^text_column and label_column must be different",
    ),
    "questions": ("question-answering", "query context A_answers", {}, "text_column 'question' is not in.*--text_column"),
    "contexts": ("question-answering", "question text A_answers", {}, "text_pair_column 'context' is not.*--text_pair_column"),
    "answers": ("question-answering", "question context", {}, "label_column 'answers' is not in.*--label_column"),
    "choices": ("multiple-choice", "question label", {}, "choices_column 'choices' is not in.*--choices_column"),
    "named choices": ("multiple-choice", "question label", {"choices_column": "x"}, "choices_column 'x' is not in"),
    "right choice": (
        "multiple-choice",
        "question L_c",
        {"choices_column": "L_c"},
        "label_column 'label' is not in.*--label_column",
    ),
    "sources": ("seq2seq", "body target", {}, "text_column 'source' is not in.*--text_column"),
    "targets": ("seq2seq", "source body", {}, "target_column 'target' is not in.*--target_column"),
    "blocks of conversations": (
        "causal-lm",
        "prompt completion",
        {"block_size": 8},
        "block_size concatenates plain texts, but the columns prompt, completion are.*--text_column",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_columns_that_are_missing(case):
    name, columns, flags, message = MISSING[case]
    with pytest.raises(DataError, match=message):
        choose_columns(empty_splits(columns), FinetuneConfig(dataset_name="x", task=name, **flags), TASKS[name])


def test_columns_that_one_split_lacks():
    """Those of conversations have no flag, so none is named."""
    config = FinetuneConfig(dataset_name="x")
    rows = DatasetDict(train=empty_splits("instruction output input")["train"], test=empty_splits("instruction output")["train"])
    with pytest.raises(DataError, match=r"column 'input' is not in the test rows.*Add it, or rename a column") as error:
        choose_columns(rows, config, TASKS["causal-lm"])
    assert "--" not in str(error.value)
    rows = DatasetDict(train=empty_splits("text")["train"], validation=empty_splits("body")["train"])
    with pytest.raises(DataError, match="text_column 'text' is not in the validation rows, which have: body"):
        choose_columns(rows, config, TASKS["causal-lm"])


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
        "train: 2 of 7 rows truncated to 4 tokens",
        "train: 2 of 7 rows skipped because they are empty",
        "train: 1 of 7 rows without a target (they do not contribute to the loss)",
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
        "train: 1 of 3 rows truncated to 4 tokens",
        "train: 1 of 3 rows skipped because they are empty",
    ]


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
    file, tokenizer = write(tmp_path / "d.jsonl", rows_for(name)), letter_tokenizer(**special)
    first = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"  # train and validation
    tokenizer(["a b", "c"], padding=True, truncation=True, max_length=1)
    second = prepared(file, letter_tokenizer(**special), task=name)
    third = prepared(file, tokenizer, task=name)
    assert calls.read_text() == "xx"
    assert first.splits["train"]["input_ids"][:] == second.splits["train"]["input_ids"][:] == third.splits["train"]["input_ids"][:]
    prepared(file, tokenizer, task=name, max_length=7)
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


# All tasks

SPECIAL = {"cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ ('a ' if m['role'] == 'user' else 'b ') + m['content'] + ' <eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'b ' }}{% endif %}"
)


def test_completions(tmp_path):
    """`a b` asks, `c <eos>` answers; cut at 4 the second row keeps no target."""
    rows = [{"prompt": "a b", "completion": " c"}, {"prompt": "a b c d", "completion": " e"}, {"prompt": "", "completion": ""}]
    file = write(tmp_path / "d.jsonl", [*rows, {"prompt": "a", "completion": " c c"}])
    data = prepared(file, validation_file=file, max_length=4)
    assert data.splits["train"]["input_ids"][:] == [[3, 4, 5, 1], [3, 4, 5, 6], [3, 5, 5, 1]]
    assert data.splits["train"]["labels"][:] == [[-100, -100, 5, 1], [-100] * 4, [-100, 5, 5, 1]]
    assert data.splits["train"]["num_targets"][:] == [2, 0, 3]
    assert [fact for fact in data.facts if fact.startswith("train")] == [
        "train: 1 of 4 rows truncated to 4 tokens",
        "train: 1 of 4 rows skipped because they are empty",
        "train: 1 of 4 rows without a target (they do not contribute to the loss)",
    ]
    batch = data.collate([data.splits["train"][0], data.splits["train"][2]])
    assert batch["labels"].tolist() == [[-100, -100, 5, 1], [-100, 5, 5, 1]]
    with pytest.raises(DataError, match=r"none of the 3 train rows has a target.*a completion within max_length"):
        prepared(write(tmp_path / "e.jsonl", [rows[1]] * 3), validation_file=file, max_length=3)


def test_conversations_with_a_template(tmp_path):
    tokenizer = letter_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    turns = [{"role": role, "content": content} for role, content in [("user", "c"), ("assistant", "d e"), ("user", "f")]]
    file = write(tmp_path / "d.jsonl", [{"messages": [*turns, {"role": "assistant", "content": "g"}]}, {"messages": turns}])
    data = prepared(file, tokenizer, validation_file=file)
    whole = [3, 5, 1, 4, 6, 7, 1, 3, 8, 1, 4, 9, 1]
    assert data.splits["train"]["input_ids"][:] == [whole, whole[:10]]
    targets = [-100, -100, -100, -100, 6, 7, 1, -100, -100, -100, -100, 9, 1]
    assert data.splits["train"]["labels"][:] == [targets, targets[:10]]
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        prepared(file, tokenizer, validation_file=file)


def test_masked_lm(tmp_path):
    file = write(tmp_path / "d.jsonl", [{"text": "a b c"}, {"text": ""}, {"text": "<unk> a"}])
    data = prepared(file, letter_tokenizer(**SPECIAL), task="masked-lm", validation_file=file)
    cls, sep = (data.tokenizer.convert_tokens_to_ids(token) for token in ("<cls>", "<sep>"))
    assert data.splits["train"]["input_ids"][:] == [[cls, 3, 4, 5, sep], [cls, 2, 3, sep]]
    assert data.splits["train"]["num_targets"][:] == [3, 1] and not data.labels
    assert set(data.samples("train")[0]) > {"mask_key", "input_ids"}
    nothing = write(tmp_path / "n.jsonl", [{"text": "<unk>"}])
    with pytest.raises(DataError, match="none of the 1 train rows has a target"):
        prepared(nothing, letter_tokenizer(**SPECIAL), task="masked-lm", validation_file=file)


def test_pairs(tmp_path):
    rows = [{"premise": "a", "hypothesis": "b c", "label": "y"}, {"premise": "d", "hypothesis": "", "label": "x"}]
    file = write(tmp_path / "d.jsonl", [*rows, {"premise": "", "hypothesis": None, "label": "x"}])
    data = prepared(file, letter_tokenizer(**SPECIAL), task="text-classification", validation_file=file)
    assert data.splits["train"]["input_ids"][:] == [[13, 3, 14, 4, 5, 14], [13, 6, 14, 14]]
    assert data.splits["train"]["label"][:] == [1, 0] and data.labels == ["x", "y"]
    assert "train: 1 of 3 rows skipped because they are empty" in data.facts


def test_regression(tmp_path):
    """Test rows that are all -1 are unlabelled; if only some are, -1 is a number."""
    train = write(tmp_path / "d.jsonl", [{"text": "a", "label": n} for n in (1, 2, 3)])
    other = write(tmp_path / "v.jsonl", [{"text": "a", "label": n} for n in (1.0, 7.0)])
    unlabelled = write(tmp_path / "t.jsonl", [{"text": "a", "label": -1.0}] * 3)
    data = prepared(train, task="regression", validation_file=other, test_file=unlabelled)
    assert data.splits["train"]["label"][:] == [1.0, 2.0, 3.0] and data.labels == []
    assert data.facts == ["skipped the test rows: all their labels are -1, which means unlabelled"]
    assert data.collate([data.splits["train"][1]])["labels"].tolist() == [2.0]
    data = prepared(
        train,
        task="regression",
        validation_file=other,
        test_file=write(tmp_path / "u.jsonl", [{"text": "a", "label": -1}, {"text": "b", "label": 3}]),
    )
    assert data.splits["test"]["label"][:] == [-1.0, 3.0]  # the control


def test_multi_label(tmp_path):
    """Rows without any label are rows too."""
    train = write(tmp_path / "d.jsonl", [{"text": "a", "labels": labels} for labels in (["x", "y"], [], ["z"])])
    other = write(tmp_path / "v.jsonl", [{"text": "a", "labels": labels} for labels in ([], ["x"], ["x", "z"], [])])
    data = prepared(train, task="multi-label", validation_file=other)
    assert data.splits["train"]["label"][:] == [[0, 1], [], [2]] and data.labels == ["x", "y", "z"]
    assert data.splits["validation"]["label"][:] == [[], [0], [0, 2], []]
    assert data.collate([data.splits["train"][i] for i in range(3)])["labels"].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    none = write(tmp_path / "n.jsonl", [{"text": "a", "labels": []}] * 2)
    assert prepared(train, task="multi-label", validation_file=other, test_file=none).splits["test"]["label"][:] == [[], []]
    assert prepared(train, task="multi-label", validation_file=none).facts == []


def test_token_classification(tmp_path):
    rows = [{"tokens": ["a", "b c", "d"], "tags": ["N", "V", "N"]}, {"tokens": [], "tags": []}]
    file = write(tmp_path / "d.jsonl", rows)
    data = prepared(file, letter_tokenizer(**SPECIAL), task="token-classification", validation_file=file, max_length=5)
    assert data.splits["train"]["input_ids"][:] == [[13, 3, 4, 5, 14]]
    assert data.splits["train"]["label"][:] == [[-100, 0, 1, -100, -100]] and data.labels == ["N", "V"]
    assert data.facts == [
        "train: 1 of 2 rows truncated to 5 tokens",
        "train: 1 of 2 rows skipped because they are empty",
        "validation: 1 of 2 rows truncated to 5 tokens",
        "validation: 1 of 2 rows skipped because they are empty",
    ]


@pytest.mark.parametrize("words", ["ab", [1, 2], [["a"], ["b"]]], ids=str)
def test_words_that_are_no_strings(words, tmp_path):
    file = write(tmp_path / "d.jsonl", [{"tokens": words, "tags": ["N", "V"]}])
    with pytest.raises(DataError, match=r"text_column must name a column of lists of strings.*train rows.*--text_column"):
        prepared(file, task="token-classification", validation_file=file)


def test_blocks(tmp_path):
    """By hand: 3 + 2 + 4 tokens with their ends, cut every 4; the empty row is left out, nothing is cut off."""
    texts = ["a b", "c", "", "d e f"]
    file = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    data = prepared(file, validation_file=file, block_size=4, max_length=2)
    assert data.splits["train"]["input_ids"][:] == [[3, 4, 1, 5], [1, 6, 7, 8], [1]]
    assert [fact for fact in data.facts if fact.startswith("train")] == [
        "train: 1 of 4 rows skipped because they are empty",
        "train: 3 rows, 9 tokens, concatenated and cut into 3 blocks of 4 tokens (the last has 1)",
    ]
    again = prepared(file, validation_file=file, block_size=4, max_length=99)
    assert again.content_hash == data.content_hash != prepared(file, validation_file=file, block_size=3).content_hash


HASHED = {
    "masked-lm": [{"text": "a b"}, {"text": "c"}],
    "causal-lm": [{"prompt": "a b", "completion": " c"}, {"prompt": "a b", "completion": " d"}],
    "text-classification": [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}],
    "regression": [{"text": "a", "label": 0.25}, {"text": "b", "label": 1.0}],
    "multi-label": [{"text": "a", "labels": ["x"]}, {"text": "a", "labels": ["y", "x"]}],
    "token-classification": [{"tokens": ["a", "b"], "tags": ["x", "y"]}, {"tokens": ["c"], "tags": ["y"]}],
    "question-answering": [{"question": "a", "context": "b c", "answers": {"text": ["b"], "answer_start": [0]}}] * 2,
    "multiple-choice": [{"text": "a", "choices": ["b", "c"], "label": 0}] * 2,
    "seq2seq": [{"source": "a", "target": "b"}, {"source": "a", "target": "c"}],
}
CHANGED = {  # the same ids in `input_ids`, but for masked-lm, which has nothing else
    "masked-lm": [{"text": "a"}, {"text": "b c"}],
    "causal-lm": [{"prompt": "a", "completion": " b c"}, {"prompt": "a b", "completion": " d"}],
    "text-classification": [{"text": "a", "label": "y"}, {"text": "b", "label": "x"}],
    "regression": [{"text": "a", "label": 0.25}, {"text": "b", "label": 1.0000001}],
    "multi-label": [{"text": "a", "labels": ["x", "y"]}, {"text": "a", "labels": ["x"]}],  # flat the same: x y x
    "token-classification": [{"tokens": ["a", "b"], "tags": ["y", "x"]}, {"tokens": ["c"], "tags": ["y"]}],
    "question-answering": [{"question": "a", "context": "b c", "answers": {"text": ["c"], "answer_start": [2]}}] * 2,
    "multiple-choice": [{"text": "a", "choices": ["b", "c"], "label": 1}] * 2,
    "seq2seq": [{"source": "a", "target": "c"}, {"source": "a", "target": "b"}],
}


@pytest.mark.parametrize("name", TASKS)
def test_content_hash_sees_labels_tags_and_completions(name, tmp_path):
    files = [write(tmp_path / f"{i}.jsonl", rows) for i, rows in enumerate((HASHED[name], HASHED[name], CHANGED[name]))]
    data = [prepared(file, letter_tokenizer(**SPECIAL), task=name, validation_file=files[0]) for file in files]
    assert data[0].content_hash == data[1].content_hash != data[2].content_hash
    if name == "causal-lm":
        assert data[0].splits["train"]["input_ids"][:] == data[2].splits["train"]["input_ids"][:]


def test_content_hash_sees_whose_labels_they_are(tmp_path):
    """[[x], [y, x]] and [[x, y], [x]] are the same numbers one after the other, here with the same names too."""
    hashes = set()
    for number, labels in enumerate(([["x"], ["y", "x"]], [["x", "y"], ["x"]], [["x", "y", "x"], []])):
        file = write(tmp_path / f"{number}.jsonl", [{"text": "a", "labels": row} for row in labels])
        hashes.add(prepared(file, task="multi-label", validation_file=file).content_hash)
    assert len(hashes) == 3


def test_cache_of_completions_knows_the_template(tmp_path):
    """Another template is another preparation."""
    file, tokenizer = write(tmp_path / "d.jsonl", [{"prompt": "c", "completion": "d"}]), letter_tokenizer()
    plain = prepared(file, tokenizer, validation_file=file)
    tokenizer.chat_template = CHAT_TEMPLATE
    first = prepared(file, tokenizer, validation_file=file)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'a '", "'j '")
    second = prepared(file, tokenizer, validation_file=file)
    ids = [data.splits["train"]["input_ids"][0] for data in (plain, first, second)]
    assert ids == [[2, 1], [3, 5, 1, 4, 6, 1], [12, 5, 1, 4, 6, 1]]  # without a space `cd` is one unknown word


def test_cache_knows_the_side_that_is_cut(tmp_path):
    file, more = write(tmp_path / "d.jsonl", HASHED["text-classification"]), {"task": "text-classification", "max_length": 3}
    long = write(tmp_path / "v.jsonl", [{"text": "a b c", "label": "x"}])
    kept = []
    for side in ("right", "left"):
        data = prepared(file, letter_tokenizer(**SPECIAL, truncation_side=side), validation_file=long, **more)
        kept.append(data.splits["validation"]["input_ids"][0])
    assert kept == [[13, 3, 14], [13, 5, 14]]


# Evaluation alone


def test_evaluation_of_given_files_reads_nothing_else(tmp_path, monkeypatch):
    """Not the embedded corpus, which is the default dataset; no training rows are needed."""
    monkeypatch.setattr(corpus, "load", lambda *_: pytest.fail("the embedded corpus was read"))
    other = write(tmp_path / "v.jsonl", [{"text": "a b", "label": "pos"}, {"text": "c", "label": "pos"}])
    test = write(tmp_path / "t.jsonl", [{"text": "d", "label": "neg"}])
    config = FinetuneConfig(
        eval_only=True, model_name_or_path="m", task="text-classification", validation_file=other, test_file=test
    )
    data = prepare_data(config, letter_tokenizer(), known=["pos", "neg"])
    assert {split: dataset["label"][:] for split, dataset in data.splits.items()} == {"validation": [0, 0], "test": [1]}
    assert data.labels == ["pos", "neg"] and data.facts == [] and data.content_hash == ""
    assert data.description == f"{other}, {test}: 2 validation, 1 test rows"
    config.validation_file = None
    assert set(prepare_data(config, letter_tokenizer(), known=["pos", "neg"]).splits) == {"test"}
    config.test_file = write(tmp_path / "u.jsonl", [{"text": "d", "label": -1}])
    with pytest.raises(DataError, match="all labels of the test rows are -1"):
        prepare_data(config, letter_tokenizer(), known=["pos", "neg"])


def test_evaluation_of_a_dataset_takes_its_own_splits(tmp_path):
    """Named datasets are read; of a file the rows that training would have validated on; training rows are not tokenised."""
    file = make_jsonl(tmp_path)
    config = FinetuneConfig(dataset_name=file, model_name_or_path="m", test_file=write(tmp_path / "t.jsonl", ROWS[:3]))
    trained = prepare_data(config, letter_tokenizer())
    config.eval_only = True
    data = prepare_data(config, letter_tokenizer())
    assert set(data.splits) == {"validation", "test"} and len(data.splits["test"]) == 3
    assert data.splits["validation"]["input_ids"][:] == trained.splits["validation"]["input_ids"][:]
    DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    config = FinetuneConfig(dataset_name=str(tmp_path / "saved"), model_name_or_path="m", eval_only=True)
    assert set(prepare_data(config, letter_tokenizer()).splits) == {"test"}
    DatasetDict(other=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "none")
    config.dataset_name = str(tmp_path / "none")
    with pytest.raises(DataError, match="there is nothing to evaluate"):
        prepare_data(config, letter_tokenizer())


# Rows to predict


def to_predict(task, rows, train, tmp_path, tokenizer=None, known=None, **more):
    """After training rows were read, or (None) alone, as an evaluation does."""
    file = write(tmp_path / "p.jsonl", rows)
    if train is None:
        config = FinetuneConfig(task=task, eval_only=True, model_name_or_path="m", predict_file=file, **more)
    else:
        config = FinetuneConfig(task=task, dataset_name=write(tmp_path / "d.jsonl", train), predict_file=file, **more)
        config.validation_file = config.dataset_name
    data = prepare_data(config, tokenizer or letter_tokenizer(**SPECIAL), known)
    return data, *prepare_unlabelled(config, data, file)


PREDICTED = {
    "masked-lm": ([{"id": 5, "text": "a <mask>"}, {"id": 6, "text": None}], [[13, 3, 15, 14], []]),
    "text-classification": (
        [{"id": 5, "text": "a b"}, {"id": 6, "text": ""}, {"id": 7, "text": "c"}],
        [[13, 3, 4, 14], [], [13, 5, 14]],
    ),
    "regression": ([{"text": "a", "label": "whatever"}], [[13, 3, 14]]),
    "multi-label": ([{"text": "a", "labels": None}], [[13, 3, 14]]),
    "token-classification": ([{"tokens": ["a", "b c", "<gone>"]}, {"tokens": []}], [[13, 3, 4, 5, 2, 14], []]),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", PREDICTED)
def test_rows_to_predict(name, alone, tmp_path):
    """One sample a row, empty where the row is; labels are not needed; the rows come back as they are."""
    rows, ids = PREDICTED[name]
    train = None if alone else HASHED[name]
    data, as_they_are, named, samples = to_predict(name, rows, train, tmp_path, known=["x", "y"])
    assert samples["input_ids"][:] == ids and samples["length"][:] == [len(row) for row in ids]
    assert as_they_are.to_list() == rows and len(named) == len(rows)
    if name == "token-classification":
        assert samples["label"][:] == [[-100, 0, 1, -100, 2, -100], []]
        assert named["tokens"][:] == [row["tokens"] for row in rows]
    else:
        assert set(named.column_names) == {"text"} and "label" not in samples.column_names
    assert data.labels == ([] if name in ("masked-lm", "regression") else ["x", "y"])


def test_pairs_to_predict(tmp_path):
    """Under the columns of training, whatever they are called, and cut as in training."""
    train = [{"one": "a", "two": "b", "y": 1}, {"one": "c", "two": "d", "y": 2}]
    flags = {"text_column": "one", "text_pair_column": "two", "label_column": "y"}
    rows = [{"two": "d d", "one": "a b c", "text": "j"}, {"two": None, "one": None, "text": "j"}]
    _, _, named, samples = to_predict("regression", rows, train, tmp_path, **flags, max_length=6)
    assert samples["input_ids"][:] == [[13, 3, 4, 14, 6, 14], []]
    assert named.to_list() == [{"text": "a b c", "text_pair": "d d"}, {"text": None, "text_pair": None}]
    with pytest.raises(DataError, match="text_pair_column 'two' is not in the predict rows, which have: one"):
        to_predict("regression", [{"one": "a"}], train, tmp_path, **flags)


# Batches


def test_causal_batch_by_hand():
    batch = collate_causal([{"input_ids": [5, 0, 1], "length": 3}, {"input_ids": [7]}], 0)
    assert batch["input_ids"].tolist() == [[5, 0, 1], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, 1], [7, -100, -100]]  # a real token with the padding's id stays a target
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and all(v.dtype == torch.int64 for v in batch.values())


def test_classification_batch_by_hand():
    samples = [{"input_ids": [5, 6], "label": 2}, {"input_ids": [7], "label": 0}, {"input_ids": [8, 9, 3], "label": 1}]
    batch = collate_labels(samples, 4)
    assert batch["input_ids"].tolist() == [[5, 6, 4], [7, 4, 4], [8, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [2, 0, 1]
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and all(v.dtype == torch.int64 for v in batch.values())


def test_pad():
    assert pad([[], [1, 2]], 9).tolist() == [[9, 9], [1, 2]]


# Answers, choices and targets


def test_translations_are_flattened(tmp_path):
    """In training and in a file to predict, whose rows keep their shape."""
    rows = [{"translation": {"de": text, "en": text[::-1]}} for text in TEXTS]
    file = write(tmp_path / "d.jsonl", rows)
    data = prepared(file, letter_tokenizer(), task="seq2seq")
    assert data.columns == {"text": "translation.de", "target": "translation.en"}
    sample = data.splits["train"][1]
    assert sample["target"] == sample["target"][::-1][::-1] and sample["labels"] == [*ids_of(sample["target"]), 1]
    predicted = write(tmp_path / "p.jsonl", [{"translation": {"de": "a b"}}])
    kept, named, samples = prepare_unlabelled(FinetuneConfig(task="seq2seq", dataset_name=file), data, predicted)
    assert kept[0] == {"translation": {"de": "a b"}} and named[0] == {"text": "a b"} and samples["input_ids"][:] == [[3, 4]]


def test_facts_of_answers(tmp_path):
    """Five rows of which one has no answer, and one loses it at 7 tokens."""
    answers = [("c d e f", "c", 0), ("c d e f", "c", 0), ("d e f g", "d", 0), ("c d e f", "f", 6), ("c d", None, None)]
    rows = [
        {"question": "a", "context": context, "answers": {"text": [text] * bool(text), "answer_start": [start] * bool(text)}}
        for context, text, start in answers
    ]
    file = write(tmp_path / "d.jsonl", rows)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="question-answering", validation_file=file, max_length=7)
    assert data.facts[:2] == [
        "train: 4 of 5 rows truncated to 7 tokens",
        "train: 1 of 5 rows trained as unanswerable, as max_length truncates their answer",
    ]
    assert not {"context", "answers", "starts", "ends", "no_answer", "answer_is_lost"} & set(data.samples("train").column_names)
    assert data.labels == []


@pytest.mark.parametrize("label", [-1, "", None])
def test_unlabelled_test_rows_of_choices_are_left_out(label, tmp_path):
    rows = [{"text": "a", "choices": ["b", "c"], "label": str(i % 2)} for i in range(6)]
    file = write(tmp_path / "d.jsonl", rows)
    test = write(tmp_path / "test.jsonl", [{"text": "a", "choices": ["b", "c"], "label": label}] * 3)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>")
    data = prepared(file, tokenizer, task="multiple-choice", validation_file=file, test_file=test)
    assert "test" not in data.splits and any("skipped the test rows" in fact for fact in data.facts)


@pytest.mark.parametrize("name", TASKS)
def test_small_models_take_the_samples(name, tmp_path):
    """The model that is built where none is named: positions for a max_length beyond the usual, a finite loss with a gradient."""
    file = write(tmp_path / "d.jsonl", rows_for(name))
    config = FinetuneConfig(dataset_name=file, validation_file=file, task=name, max_length=300)
    tokenizer = letter_tokenizer(cls_token="<cls>", sep_token="<sep>", mask_token="<mask>", bos_token="<eos>")
    data = prepare_data(config, tokenizer)
    model_config = complete_config(None, config, data)
    model, new = load_model(config, model_config, data)
    assert new == [] and model_config.max_position_embeddings >= 300 and sum(p.numel() for p in model.parameters()) < 2e6
    samples = data.samples("train")
    np.random.seed(0)  # as a loader does: masks are drawn from it, and other states may leave these three samples without a target
    loss = model(**data.collate([samples[i] for i in (0, 5, 9)])).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    longest = torch.full((1, 1, 300) if name == "multiple-choice" else (1, 300), 3)
    model(input_ids=longest, **({"decoder_input_ids": longest} if name == "seq2seq" else {}))
