"""The embedded corpus: its rows, splits, labels and tokenizer. One full build; the rest runs on small folders."""

import os
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from hf_ga.data import corpus
from hf_ga.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def dataset():
    return corpus.load_stdlib()


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.load_stdlib_tokenizer()


def write(folder, files):
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source if isinstance(source, bytes) else source.encode())


def names_and_texts(folder):
    return [(row["name"], row["text"]) for row in corpus.stdlib_rows(folder)]


def test_rows_name_every_kind_of_definition(tmp_path):
    source = '''"""Module."""
import sys
class A:
    """Class."""
    def f(self):
        """Method.

        Same margin.
            Indented.
        """
        def inner(): "Inner."
if sys.platform == "x":
    async def g(): "First."
else:
    async def g(): "Second."
def undocumented(): return "not documentation"
def blank(): """   """
'''
    write(tmp_path, {"a/__init__.py": '"""Package."""', "a/b.py": source})
    assert names_and_texts(tmp_path) == [
        ("a", "Package."),
        ("a.b", "Module."),
        ("a.b.A", "Class."),
        ("a.b.A.f", "Method.\n\nSame margin.\n    Indented."),
        ("a.b.A.f.inner", "Inner."),
        ("a.b.g", "First."),
        ("a.b.g", "Second."),
    ]
    assert {row["package"] for row in corpus.stdlib_rows(tmp_path)} == {"a"}


def test_rows_of_equal_text_keep_the_first(tmp_path):
    write(tmp_path, {"b.py": '"""Same."""', "a.py": '"""Same."""', "c.py": '"""Other."""'})
    assert names_and_texts(tmp_path) == [("a", "Same."), ("c", "Other.")]


def test_rows_leave_out_tests_and_installed_packages(tmp_path):
    outside = ["site-packages/p.py", "dist-packages/p.py", "test/p.py", "a/tests/data/p.py", "a/idle_test/p.py"]
    write(tmp_path, {name: f'"""In {name}."""' for name in [*outside, "a/testing.py"]})
    assert names_and_texts(tmp_path) == [("a.testing", "In a/testing.py.")]


def test_rows_skip_what_does_not_parse(tmp_path):
    files = {
        "broken.py": '"""Text."""\ndef f(:\n',
        "python2.py": '"""Text."""\nprint "hello"\n',
        "null.py": b'"""Text."""\n\x00\n',
        "undecodable.py": b'"""\xff\xfe"""\n',
        "latin.py": b'# -*- coding: latin-1 -*-\n"""Caf\xe9."""\n',
        "surrogate.py": '"""Half \\ud800."""',
    }
    write(tmp_path, files)
    assert names_and_texts(tmp_path) == [("latin", "Café."), ("surrogate", "Half ?.")]


def test_rows_are_read_without_running_or_warning(tmp_path):
    write(tmp_path, {"a.py": '"""An invalid escape: \\d."""\nraise RuntimeError("this module was run")\n'})
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        assert names_and_texts(tmp_path) == [("a", "An invalid escape: \\d.")]
    assert raised == []


def test_rows_do_not_depend_on_the_order_of_the_file_system(monkeypatch):
    folder = Path(sysconfig.get_path("stdlib"), "email")
    first = list(corpus.stdlib_rows(folder))
    walk = os.walk

    def backwards(top):
        for parent, folders, files in walk(top):
            folders.reverse()
            yield parent, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert len(first) > 100
    assert list(corpus.stdlib_rows(folder)) == first


def test_split_of_known_names():
    assert corpus.split_of("asyncio.queues.Queue.get") == "train"
    assert corpus.split_of("argparse") == "validation"
    assert corpus.split_of("email") == "test"


def test_corpus_is_of_plausible_size(dataset):
    assert list(dataset) == ["train", "validation", "test"]
    assert all(split.column_names == ["name", "package", "text"] for split in dataset.values())
    total = sum(dataset.num_rows.values())
    assert total > 5000
    assert 0.77 < dataset["train"].num_rows / total < 0.83
    assert 0.08 < dataset["validation"].num_rows / total < 0.12
    text = dict(zip(dataset["train"]["name"], dataset["train"]["text"], strict=True))["asyncio.queues.Queue.get"]
    assert text.startswith("Remove and return an item from the queue.\n\nIf queue is empty, ")


def test_splits_share_no_name_and_no_text(dataset):
    for column in ("name", "text"):
        values = [set(split[column]) for split in dataset.values()]
        assert sum(map(len, values)) == len(set.union(*values))


def test_labels_are_the_packages_with_many_rows(dataset):
    counts = Counter(dataset["train"]["package"])
    rows = corpus.load("text-classification")
    assert set(rows["train"]["label"]) == {package for package, count in counts.items() if count >= 100}
    assert set(rows["test"]["label"]) <= set(rows["train"]["label"]) and "asyncio" in rows["train"]["label"]
    first = next(row for row in dataset["validation"] if counts[row["package"]] >= 100)
    assert rows["validation"][0] == {"name": first["name"], "label": first["package"], "text": first["text"]}


def test_tags_are_the_case_of_words(dataset):
    """By hand; and the text's words can be written again from tokens and tags, but for those of mixed case."""
    assert corpus.truecasing_row({"text": "NULL: a TarFile, Or\n\t3 é."}) == {
        "tokens": ["null", ":", "a", "tarfile", ",", "or", "3", "é", "."],
        "tags": ["UPPER", "none", "lower", "Mixed", "none", "Title", "none", "lower", "none"],
    }
    write = {"UPPER": str.upper, "Title": str.title, "lower": str, "none": str}
    row = corpus.load("token-classification")["train"][0]
    words = [write[tag](token) if tag != "Mixed" else token for token, tag in zip(row["tokens"], row["tags"], strict=True)]
    text = dataset["train"][0]["text"]
    assert all(word in text or tag == "Mixed" for word, tag in zip(words, row["tags"], strict=True)) and len(words) <= 64


def test_other_tasks_need_a_dataset():
    for task in ("question-answering", "multiple-choice", "seq2seq", "regression", "multi-label"):
        with pytest.raises(ConfigError, match=rf"the embedded corpus has no data for {task}: name a dataset with --dataset_name"):
            corpus.load(task)


ODD = ["", " ", "x", "  two\n\n\tand\ttabs  \n", "it 's , don't .", "Käse, 東京 and 🦜\u200d", ">>> f(x)[0] != `y`\r\n", "\x00\x7f"]


def test_tokenizer_round_trip(tokenizer, dataset):
    texts = [*ODD, *dataset["validation"]["text"]]
    encoded = tokenizer(texts)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.batch_decode(encoded["input_ids"]) == texts
    # Trained on this kind of text: far fewer tokens than bytes, and no string is over the limit.
    lengths = np.array([len(ids) for ids in encoded["input_ids"]])
    assert lengths.sum() < sum(len(text.encode()) for text in texts) / 2.5
    assert lengths.max() <= tokenizer.model_max_length


def test_tokenizer_special_tokens(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == 4000
    assert tokenizer.model_max_length == corpus.MODEL_MAX_LENGTH
    assert tokenizer.convert_ids_to_tokens(range(6)) == ["<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>"]
    ids = [getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "eos", "bos", "mask", "cls", "sep", "unk")]
    assert ids == [0, 1, 1, 2, 3, 4, 5]
    assert tokenizer.encode("a<mask>b")[1] == tokenizer.mask_token_id
    assert tokenizer("a", padding="max_length", max_length=3)["attention_mask"] == [1, 0, 0]


def test_tokenizer_training_is_deterministic(dataset):
    texts = dataset["train"]["text"][:1000]
    first, second = (corpus.train_tokenizer(texts, 1000) for _ in range(2))
    assert len(first) == 1000
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_library_without_sources_is_refused(monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_rows", lambda: iter(()))
    with pytest.raises(DataError, match="lack the sources"):
        corpus.load_stdlib.__wrapped__()
