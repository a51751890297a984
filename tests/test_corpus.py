"""The embedded corpus: its rows, splits, tokenizer and cache. One full build; the rest runs on small folders."""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from datasets import DatasetDict
from transformers import PreTrainedTokenizerFast

from hf_ga.data import corpus
from hf_ga.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dataset(cache):
    return corpus.load_stdlib(cache)


@pytest.fixture(scope="module")
def tokenizer(cache, dataset):
    return corpus.load_stdlib_tokenizer(cache_dir=cache)


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A library of 60 short modules in place of Python's own."""
    folder = tmp_path / "library"
    folder.mkdir()
    for number in range(60):
        (folder / f"module{number}.py").write_text(f'"""Text number {number}."""\n')
    monkeypatch.setattr(corpus, "_stdlib_folder", lambda: folder)
    return folder


def write(folder, files):
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source if isinstance(source, bytes) else source.encode())


def names_and_texts(folder):
    return [(row["name"], row["text"]) for row in corpus.stdlib_rows(folder)]


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


# Rows


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
    folder = Path(corpus._stdlib_folder(), "email")
    first = list(corpus.stdlib_rows(folder))
    walk = os.walk

    def backwards(top):
        for parent, folders, files in walk(top):
            folders.reverse()
            yield parent, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert len(first) > 100
    assert list(corpus.stdlib_rows(folder)) == first


# Splits


def test_split_of_known_names():
    assert corpus.split_of("asyncio.queues.Queue.get") == "train"
    assert corpus.split_of("argparse") == "validation"
    assert corpus.split_of("email") == "test"


def test_split_of_has_its_stated_shares():
    names = [f"package.module{number}" for number in range(10_000)]
    splits = [corpus.split_of(name) for name in names]
    for split, share in {"train": 0.8, "validation": 0.1, "test": 0.1}.items():
        deviation = math.sqrt(len(names) * share * (1 - share))
        assert abs(splits.count(split) - share * len(names)) < 4 * deviation


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


def test_package_labels(dataset):
    labels = corpus.package_labels(dataset)
    assert len(labels) > 10
    assert "asyncio" in labels
    assert labels == sorted(labels)
    train = list(dataset["train"]["package"])
    assert min(train.count(label) for label in labels) >= 100
    # Exactly at the limit a package is in, one row more and it is out.
    rows = train.count("asyncio")
    assert "asyncio" in corpus.package_labels(dataset, minimum_rows=rows)
    assert "asyncio" not in corpus.package_labels(dataset, minimum_rows=rows + 1)


def test_describe_counts(small_library, tmp_path):
    write(small_library, {"module0.py": "", "module1.py": '"""One two  three\n\n    four."""'})
    line = corpus.describe(corpus.load_stdlib(tmp_path))
    version = ".".join(map(str, sys.version_info[:3]))
    # 58 modules of 3 words, one without documentation, one of 4 words.
    assert line.startswith(f"standard library of Python {version}")
    assert line.endswith(": 60 files, 59 documentation strings, 178 words")


# Tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "  two\n\n\tand\ttabs  \n",
        "it 's , don't .",
        "Käse, 東京 and 🦜\u200d",
        ">>> f(x)[0] != `y`\r\n",
        "\x00\x7f",
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_round_trip_on_the_corpus(tokenizer, dataset):
    texts = list(dataset["validation"]["text"])
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


def test_tokenizer_needs_room_for_all_bytes():
    assert len(corpus.train_tokenizer(["ab ab"], 262)) == 262
    with pytest.raises(ConfigError, match="262"):
        corpus.train_tokenizer(["ab ab"], 261)


# Entropy


def test_unigram_entropy_by_hand():
    assert corpus.unigram_entropy(np.array([7, 7, 7, 7])) == pytest.approx(math.log(4), rel=1e-15)
    # Shares 1/2, 1/4, 1/4: (1/2) log 2 + 2 (1/4) (2 log 2) = 1.5 log 2; the absent id adds nothing.
    assert corpus.unigram_entropy(np.array([2, 0, 1, 1])) == pytest.approx(1.5 * math.log(2), rel=1e-15)


def test_unigram_entropy_without_choice_is_zero():
    for counts in ([], [0, 0], [0, 9]):
        entropy = corpus.unigram_entropy(np.array(counts, dtype=np.int64))
        assert str(entropy) == "0.0"  # a plain float, and not -0.0
    with pytest.raises(ValueError, match="-1"):
        corpus.unigram_entropy(np.array([3, -1]))


# Cache


def test_second_load_only_reads(cache, dataset, tokenizer, monkeypatch):
    def never(*arguments):
        raise AssertionError("built again")

    monkeypatch.setattr(corpus, "stdlib_rows", never)
    monkeypatch.setattr(corpus, "train_tokenizer", never)
    before = modification_times(cache)
    again = corpus.load_stdlib(cache)
    assert {split: again[split].to_dict() for split in again} == {split: dataset[split].to_dict() for split in dataset}
    assert corpus.load_stdlib_tokenizer(cache_dir=cache).get_vocab() == tokenizer.get_vocab()
    assert modification_times(cache) == before


def test_default_cache_is_below_huggingface_home(small_library, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.constants, "HF_HOME", str(tmp_path / "home"))
    corpus.load_stdlib()
    (kept,) = Path(tmp_path, "home", "hf_ga").iterdir()
    assert DatasetDict.load_from_disk(kept).num_rows == corpus.load_stdlib().num_rows


def test_another_library_has_another_cache(small_library, tmp_path):
    first = corpus.load_stdlib(tmp_path / "cache")
    write(small_library, {"one_more.py": '"""One more."""'})
    second = corpus.load_stdlib(tmp_path / "cache")
    assert sum(second.num_rows.values()) == sum(first.num_rows.values()) + 1 == 61


def test_library_without_sources_is_refused(small_library, tmp_path):
    for path in small_library.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="without the sources"):
        corpus.load_stdlib(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half built is left


def test_the_slower_of_two_builders_keeps_the_first_result(tmp_path):
    folder = tmp_path / "kept"

    def build(new):
        new.mkdir()
        Path(new, "file").write_text("first")

    def build_slowly(new):
        new.mkdir()
        Path(new, "file").write_text("second")
        corpus._build_once(folder, build)  # another process comes by and is done first

    corpus._build_once(folder, build_slowly)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "file").read_text() == "first"


LOADER = """
import sys
from pathlib import Path
from hf_ga.data import corpus
library, cache = map(Path, sys.argv[1:])
corpus._stdlib_folder = lambda: library
print("ready", flush=True)
sys.stdin.readline()
tokenizer = corpus.load_stdlib_tokenizer(300, cache)
rows = {split: rows.to_dict() for split, rows in corpus.load_stdlib(cache).items()}
print(rows, sorted(tokenizer.get_vocab().items()))
"""


def test_two_processes_may_load_at_once(small_library, tmp_path):
    command = [sys.executable, "-c", LOADER, str(small_library), str(tmp_path / "cache")]
    processes = []
    for hash_seed in ("0", "1"):  # the order of a set would differ between the two
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(corpus.__file__).parents[1])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    assert [process.stdout.readline() for process in processes] == ["ready\n", "ready\n"]
    for process in processes:  # both have imported everything: go
        process.stdin.write("\n")
        process.stdin.flush()
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert "Text number 59." in first
    assert first == second
    names = [path.name.rsplit("-", 1)[1] for path in sorted((tmp_path / "cache").iterdir())]
    assert names == ["corpus", "300"]
