"""The embedded corpus: its rows, splits, labels and tokenizer. One full build; the rest runs on
small folders.
"""

import os
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pytest

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.formats import corpus


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


def test_rows_leave_out_tests_installed_packages_and_repeated_texts(tmp_path):
    outside = [
        "site-packages/p.py",
        "dist-packages/p.py",
        "test/p.py",
        "a/tests/finetuning/data/p.py",
        "a/idle_test/p.py",
    ]
    write(tmp_path, {name: f'"""In {name}."""' for name in [*outside, "a/testing.py"]})
    write(tmp_path, {"b.py": '"""In a/testing.py."""'})  # a text that is there already
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
    write(
        tmp_path,
        {"a.py": '"""An invalid escape: \\d."""\nraise RuntimeError("this module was run")\n'},
    )
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


def test_splits_share_no_name_and_no_text(dataset):
    total = sum(dataset.num_rows.values())
    assert total > 5000
    assert 0.77 < dataset["train"].num_rows / total < 0.83
    for column in ("name", "text"):
        values = [set(split[column]) for split in dataset.values()]
        assert sum(map(len, values)) == len(set.union(*values))


def test_labels_are_the_packages_with_many_rows(dataset):
    counts = Counter(dataset["train"]["package"])
    rows = corpus.load("text-classification")
    assert set(rows["train"]["label"]) == {
        package for package, count in counts.items() if count >= 100
    }
    assert set(rows["test"]["label"]) <= set(rows["train"]["label"])
    assert "asyncio" in rows["train"]["label"]
    first = next(row for row in dataset["validation"] if counts[row["package"]] >= 100)
    assert rows["validation"][0] == {"label": first["package"], "text": first["text"]}


def test_tags_are_the_case_of_words(dataset):
    """By hand, and in the corpus."""
    assert corpus.truecasing_row({"text": "NULL: a TarFile, Or\n\t3 é."}) == {
        "tokens": ["null", ":", "a", "tarfile", ",", "or", "3", "é", "."],
        "tags": ["UPPER", "none", "lower", "Mixed", "none", "Title", "none", "lower", "none"],
    }
    assert len(corpus.truecasing_row({"text": "word " * 65})["tokens"]) == 64
    assert corpus.load("token-classification")["train"][0] == corpus.truecasing_row(
        dataset["train"][0]
    )


def test_other_tasks_need_a_dataset():
    for task in ("question-answering", "multiple-choice", "seq2seq", "regression", "multi-label"):
        with pytest.raises(
            ConfigError,
            match=rf"the embedded corpus has no data for {task}: name a dataset with "
            r"--dataset_name",
        ):
            corpus.load(task)


def test_tokenizer_special_tokens(tokenizer):
    ids = [
        getattr(tokenizer, f"{kind}_token_id")
        for kind in ("pad", "eos", "bos", "mask", "cls", "sep", "unk")
    ]
    assert len(tokenizer) == 4000
    assert ids == [0, 1, 1, 2, 3, 4, 5]
    assert tokenizer.encode("a<mask>b")[1] == tokenizer.mask_token_id


def test_library_without_sources_is_refused(monkeypatch):
    monkeypatch.setattr(corpus, "stdlib_rows", lambda folder: iter(()))
    with pytest.raises(DataError, match="lack the sources"):
        corpus.load_stdlib.__wrapped__()
