"""The corpus of source lines: its rows, splits and cache. One full build; the rest runs on small folders."""

import io
import math
import os
import re
import subprocess
import sys
import time
import tokenize
import warnings
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import pytest
from datasets import ClassLabel, DatasetDict, List, Value

from hf_ga.data import corpus, source_lines
from hf_ga.errors import DataError


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dataset(cache):
    start = time.process_time()
    dataset = source_lines.load_source_lines(cache)
    print(f"\nbuilt in {time.process_time() - start:.1f} s of one core")
    return dataset


@pytest.fixture(scope="module")
def rows(dataset):
    """All rows, tags by name."""
    names = dataset["train"].features["tags"].feature.names
    return [row | {"tags": [names[tag] for tag in row["tags"]]} for split in dataset.values() for row in split.to_list()]


@pytest.fixture
def every_line(monkeypatch):
    """No line is left out by its hash."""
    monkeypatch.setattr(source_lines, "_ONE_LINE_IN", 1)


@pytest.fixture
def small_library(tmp_path, monkeypatch):
    """A library of 60 modules of 20 lines in place of Python's own."""
    folder = tmp_path / "library"
    files = {f"module{number}.py": "".join(f"a{number} = b + {line}\n" for line in range(20)) for number in range(60)}
    write(folder, files)
    monkeypatch.setattr(corpus, "_stdlib_folder", lambda: folder)
    return folder


def write(folder, files):
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source if isinstance(source, bytes) else source.encode())


def lines(folder):
    """Name -> tokens, blank between two. (No token of these tests but comments and strings has a blank.)"""
    return {row["name"]: " ".join(row["tokens"]) for row in source_lines.source_line_rows(folder)}


def modification_times(folder):
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


# Rows


SOURCE = '''"""One line, one token."""
x = y = 1  # why not
TEXT = """first
x = 1 + 2
last""" + "tail" + z
def f(größe, π):
\treturn größe\t*  π **2
\f
class A(B): pass
total = (1.5e3 +
    0x_ff) \\
    + 1_000j - 7
# a comment of many words
class A( B ):pass
s = 'one \\
two' + s + s + s
x: "A" = f(*a, **b)@c != d
three = tokens
print "hello", x
'''


def test_rows_by_hand(tmp_path, every_line):
    write(tmp_path, {"a/__init__.py": "import os, sys", "a/b.py": SOURCE})
    known = [
        ("a:1", "import os , sys", "NAME NAME OP NAME"),
        ("a.b:2", "x = y = 1 # why not", "NAME OP NAME OP NUMBER COMMENT"),
        ("a.b:6", "def f ( größe , π ) :", "NAME NAME OP NAME OP NAME OP OP"),
        ("a.b:7", "return größe * π ** 2", "NAME NAME OP NAME OP NUMBER"),
        ("a.b:9", "class A ( B ) : pass", "NAME NAME OP NAME OP OP NAME"),
        ("a.b:10", "total = ( 1.5e3 +", "NAME OP OP NUMBER OP"),
        ("a.b:12", "+ 1_000j - 7", "OP NUMBER OP NUMBER"),
        ("a.b:17", 'x : "A" = f ( * a , ** b ) @ c != d', "NAME OP STRING OP NAME OP OP NAME OP OP NAME OP OP NAME OP NAME"),
        ("a.b:19", 'print "hello" , x', "NAME STRING OP NAME"),
    ]
    rows = list(source_lines.source_line_rows(tmp_path))
    assert [(row["name"], " ".join(row["tokens"]), " ".join(row["tags"])) for row in rows] == known
    assert rows[1]["tokens"] == ["x", "=", "y", "=", "1", "# why not"]
    assert all(list(row) == ["name", "tokens", "tags"] for row in rows)


def test_rows_of_f_strings(tmp_path, every_line):
    source = 'a = f"{b} {c!r:>{d}}{{x}}" + g\nh = f"""{i} + {j}\n{k} + {l} {m}\n{n} + {o}"""\np = q + r\n'
    write(tmp_path, {"a.py": source})
    first, second = source_lines.source_line_rows(tmp_path)
    assert (second["name"], second["tokens"]) == ("a:5", ["p", "=", "q", "+", "r"])
    assert all(token.strip() for token in first["tokens"])
    inside = list(zip(first["tokens"], first["tags"], strict=True))[2:-2]
    if sys.version_info < (3, 12):
        assert inside == [('f"{b} {c!r:>{d}}{{x}}"', "STRING")]
    else:
        assert (inside[0], inside[-1]) == (('f"', "FSTRING_START"), ('"', "FSTRING_END"))
        assert [token for token, tag in inside if tag == "NAME"] == ["b", "c", "r", "d"]


def test_rows_of_equal_tokens_keep_the_first(tmp_path, every_line):
    write(tmp_path, {"b.py": "x=1;y\n", "a.py": "x = 1; y\nx = 1;\ty\n", "c.py": "a = b #c\na = b # c\n"})
    assert lines(tmp_path) == {"a:1": "x = 1 ; y", "c:1": "a = b #c", "c:2": "a = b # c"}


def test_rows_of_any_encoding_and_line_end(tmp_path, every_line):
    files = {
        "bom.py": b"\xef\xbb\xbfa = b + 1\n",
        "crlf.py": b"a = b + 2\r\nc = '''x\r\ny'''\r\nd = e + f  # g\r\n",
        "feed.py": "a = '\f\v\x85\u2028' + 'one line'\n\f\nb = c + d\n",
        "latin.py": b"# -*- coding: latin-1 -*-\ncaf\xe9 = caf\xe9 + 1\n",
    }
    write(tmp_path, files)
    assert lines(tmp_path) == {
        "bom:1": "a = b + 1",
        "crlf:1": "a = b + 2",
        "crlf:4": "d = e + f # g",
        "feed:1": "a = '\f\v\x85\u2028' + 'one line'",
        "feed:3": "b = c + d",
        "latin:2": "café = café + 1",
    }


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a = b + 1\nc = '''never ends\n",
        "a = b + 1\nc = (d,\n",
        "if a:\n        b = c + 1\n    d = e + f\n",
        "a = b + 1\nc = d ? e : f\n",
        b"a = b + 1\n\x00\n",
        b"a = b + 1\nc = '\xff'\n",
        b"# coding: klingon\na = b + 1\n",
        b"# coding: hex\na = b + 1\n",
    ],
)
def test_rows_skip_files_that_are_no_tokens(tmp_path, every_line, source):
    write(tmp_path, {"a.py": source, "b.py": "a = b + 1\n"})
    assert lines(tmp_path) == {"b:1": "a = b + 1"}


def test_rows_leave_out_tests_and_what_is_the_machines_own(tmp_path, every_line):
    outside = ["site-packages/p.py", "test/p.py", "a/tests/data/p.py", "_sysconfigdata__linux_x86_64-linux-gnu.py"]
    write(tmp_path, {name: f"a = b + {number}" for number, name in enumerate([*outside, "sysconfig.py"])})
    assert lines(tmp_path) == {"sysconfig:1": "a = b + 4"}


def test_rows_are_read_without_running_or_warning(tmp_path, every_line):
    write(tmp_path, {"a.py": 'raise RuntimeError("\\d", f"\\{d}", 1or 2)\n'})
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        assert list(lines(tmp_path)) == ["a:1"]
    assert raised == []


def test_rows_do_not_depend_on_the_order_of_the_file_system(monkeypatch):
    folder = Path(corpus._stdlib_folder(), "email")
    first = list(source_lines.source_line_rows(folder))
    walk = os.walk

    def backwards(top):
        for parent, folders, files in walk(top):
            folders.reverse()
            yield parent, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert len(first) > 100
    assert list(source_lines.source_line_rows(folder)) == first


def test_rows_are_one_line_in_seven_by_the_hash_of_its_tokens(monkeypatch):
    folder = Path(corpus._stdlib_folder(), "email")
    chosen = list(source_lines.source_line_rows(folder))
    monkeypatch.setattr(source_lines, "_ONE_LINE_IN", 1)
    every = list(source_lines.source_line_rows(folder))
    digests = [blake2b("\n".join(row["tokens"]).encode(), digest_size=8).hexdigest() for row in every]
    assert chosen == [row for row, digest in zip(every, digests, strict=True) if int(digest, 16) % 7 == 0]
    assert abs(len(chosen) - len(every) / 7) < 4 * math.sqrt(len(every) * 1 / 7 * 6 / 7)


# The standard library


def test_corpus_is_of_plausible_size(dataset):
    assert list(dataset) == ["train", "validation", "test"]
    total = sum(dataset.num_rows.values())
    assert 12_000 <= total <= 20_000
    for name, split in dataset.items():
        assert split.column_names == ["name", "tokens", "tags"]
        counts = Counter(tag for tags in split["tags"] for tag in tags)
        label = split.features["tags"].feature
        shares = ", ".join(f"{label.int2str(tag)} {count / counts.total():.3f}" for tag, count in counts.most_common())
        print(f"{name}: {split.num_rows} rows, {counts.total()} tokens: {shares}")
        # Whole modules, and of very different sizes: the shares are not those of the modules to a percent.
        assert abs(split.num_rows / total - {"train": 0.8}.get(name, 0.1)) < 0.06


def test_features(dataset):
    for split in dataset.values():
        names = split.features["tags"].feature.names
        assert split.features["tokens"] == List(Value("string"))
        assert split.features["tags"] == List(ClassLabel(names=names))
        assert names == sorted(names)
        assert {"COMMENT", "NAME", "NUMBER", "OP", "STRING"} <= set(names) <= set(tokenize.tok_name.values())
        if sys.version_info < (3, 12):
            assert len(names) == 5


def test_rows_are_of_four_visible_tokens_or_more_and_all_different(rows):
    assert min(len(row["tokens"]) for row in rows) == 4
    assert all(len(row["tokens"]) == len(row["tags"]) for row in rows)
    assert all(token.strip() and "\n" not in token for row in rows for token in row["tokens"])
    assert len({tuple(row["tokens"]) for row in rows}) == len(rows)


def test_a_module_is_in_one_split(dataset):
    modules = {split: {name.partition(":")[0] for name in rows["name"]} for split, rows in dataset.items()}
    assert sum(map(len, modules.values())) == len(set.union(*modules.values())) > 300
    for split, names in modules.items():
        assert {corpus.split_of(name) for name in names} == {split}
    # The naive way, by the line's name, would tear them: a fifth of train's lines would be in the other splits.
    elsewhere = sum(corpus.split_of(name) != "train" for name in dataset["train"]["name"])
    assert 0.15 < elsewhere / dataset["train"].num_rows < 0.25


def test_rows_are_in_the_order_of_modules_and_lines(dataset):
    position = {name: number for number, (name, _) in enumerate(corpus.modules())}
    for split in dataset.values():
        parts = [name.split(":") for name in split["name"]]
        places = [(position[module], int(number)) for module, number in parts]
        assert places == sorted(set(places))


def test_tokens_are_the_lines_without_blanks(rows):
    """Oracle: the named line of the file, read as text. F-strings may write one brace of two, so their lines are not compared."""
    paths, texts = dict(corpus.modules()), {}
    compared = 0
    for row in rows:
        module, _, number = row["name"].partition(":")
        if module not in texts:
            with tokenize.open(paths[module]) as file:
                texts[module] = file.read().split("\n")
        line = texts[module][int(number) - 1].removesuffix("\\")
        if "FSTRING_MIDDLE" not in row["tags"]:
            assert "".join(" ".join(row["tokens"]).split()) == "".join(line.split())
            compared += 1
    assert compared > 0.9 * len(rows)


def kind(token):
    """Oracle of a tag: the characters at the ends of a token."""
    if token.startswith("#"):
        return "COMMENT"
    if token.endswith(("'", '"')):
        return "STRING"
    if token.isidentifier():
        return "NAME"
    return "NUMBER" if re.match(r"\.?\d", token) else "OP"


def test_tags_are_those_of_the_tokens_characters(rows):
    plain = [row for row in rows if not any(tag.startswith("FSTRING") for tag in row["tags"])]
    assert len(plain) > 0.9 * len(rows)
    counts = Counter(tag for row in plain for tag in row["tags"])
    assert counts == Counter(kind(token) for row in plain for token in row["tokens"])
    assert all(row["tags"] == [kind(token) for token in row["tokens"]] for row in plain)
    assert 0.4 < counts["OP"] / counts.total() < 0.55


def test_lines_alone_have_the_same_tokens(rows):
    """Oracle: each line alone, without its file. One that ends inside brackets, or closes some, may not be Python's tokens."""
    compared = 0
    for row in rows:
        try:
            alone = list(tokenize.generate_tokens(io.StringIO(" ".join(row["tokens"])).readline))
        except (tokenize.TokenError, SyntaxError):
            continue
        found = [(token.string, tokenize.tok_name[token.type]) for token in alone if token.string.strip()]
        if not any(tag.startswith("FSTRING") for tag in row["tags"]):  # the blanks that are added would be text of the f-string
            assert found == list(zip(row["tokens"], row["tags"], strict=True))
            compared += 1
    assert compared > 0.7 * len(rows)


def test_describe_counts(small_library, tmp_path, every_line):
    write(small_library, {"module0.py": "", "module1.py": "a = (b, c, d) + ('e', 1)\n"})
    line = source_lines.describe_source_lines(source_lines.load_source_lines(tmp_path))
    version = ".".join(map(str, sys.version_info[:3]))
    # 58 modules of 20 lines of 5 tokens (2 names, 2 operators, 1 number); one without lines; one line of 4 names, 9 operators,
    # a string and a number.
    assert line.startswith(f"standard library of Python {version}")
    assert line.endswith(f": 60 files, 1161 source lines, 5815 tokens, {100 * (2320 + 9) / 5815:.1f} % of them OP")


# Cache


def test_second_load_only_reads(cache, dataset, monkeypatch):
    def never(*arguments):
        raise AssertionError("built again")

    monkeypatch.setattr(source_lines, "source_line_rows", never)
    before = modification_times(cache)
    again = source_lines.load_source_lines(cache)
    assert {split: again[split].to_dict() for split in again} == {split: dataset[split].to_dict() for split in dataset}
    assert again["train"].features == dataset["train"].features
    assert modification_times(cache) == before


def test_default_cache_is_below_huggingface_home(small_library, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.constants, "HF_HOME", str(tmp_path / "home"))
    source_lines.load_source_lines()
    (kept,) = Path(tmp_path, "home", "hf_ga").iterdir()
    assert DatasetDict.load_from_disk(kept).num_rows == source_lines.load_source_lines().num_rows


def test_another_library_or_format_has_another_cache(small_library, tmp_path, every_line, monkeypatch):
    first = source_lines.load_source_lines(tmp_path / "cache")
    write(small_library, {"one_more.py": "one = more + line"})
    second = source_lines.load_source_lines(tmp_path / "cache")
    assert sum(second.num_rows.values()) == sum(first.num_rows.values()) + 1 == 1201
    monkeypatch.setattr(source_lines, "_ONE_LINE_IN", 7)  # a change that should come with a new format number
    assert source_lines.load_source_lines(tmp_path / "cache").num_rows == second.num_rows
    monkeypatch.setattr(source_lines, "_FORMAT", source_lines._FORMAT + 1)
    assert sum(source_lines.load_source_lines(tmp_path / "cache").num_rows.values()) < 300


def test_library_without_sources_is_refused(small_library, tmp_path):
    for path in small_library.iterdir():
        path.unlink()
    with pytest.raises(DataError, match="without the sources"):
        source_lines.load_source_lines(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half built is left


LOADER = """
import sys
from pathlib import Path
from hf_ga.data import corpus
from hf_ga.data import source_lines
library, cache = map(Path, sys.argv[1:])
corpus._stdlib_folder = lambda: library
print("ready", flush=True)
sys.stdin.readline()
dataset = source_lines.load_source_lines(cache)
print({split: (rows.features, rows.to_dict()) for split, rows in dataset.items()})
"""


@pytest.mark.full
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
    assert "module59:" in first
    assert first == second
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.name.endswith(f"-lines-v{source_lines._FORMAT}")
