"""The three embedded corpora that are made of the library's sources: a small library by hand, and what Python's own gives."""

import ast
from collections import Counter

import datasets
import pytest

from hf_ga.data import corpus, stdlib_tasks
from hf_ga.data.stdlib_tasks import first_sentence, question_rows, sentence_rows

SOURCE = '''"""Tools. Return nothing; raise what you like."""
class Stack:
    """A stack."""
    def pop(self, *, default=None):
        """Remove and return the top.

        If the stack is empty, raise an IndexError instead; so look first.  Then go on.
        """
        if self.items:
            return self.items.pop()
        return default

    @property
    def size(self): "How many items\\nthere are"; return len(self.items)

    def push(self, item, /, *more, flag=1, **rest):
        """Put an item on top of the stack."""
    async def wait(self):
        # no comment is lost

        """Not documentation: it stands behind nothing.  But it is."""
        await self.ready  # done
def same(x):
    """Remove and return the top."""
    return x
'''


@pytest.fixture
def library(tmp_path):
    (tmp_path / "tools.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def test_questions_by_hand(library):
    rows = list(question_rows(library))
    found = [(row["name"], row["question"], row["answers"]["text"]) for row in rows]
    assert found == [
        ("tools", "What does it return?", ["nothing"]),
        ("tools.Stack.pop", "What does it return?", ["the top"]),
        ("tools.Stack.pop", "What does it raise?", ["IndexError"]),
        ("tools.Stack.pop", "On what condition?", ["the stack is empty"]),
        ("tools.same", "What does it return?", ["the top"]),
    ]
    for row in rows:
        (text,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
        assert row["context"][start : start + len(text)] == text and row["context"][start - 1] == " "


def test_sentences_by_hand(library):
    """Without documentation, as it stands, comments and all; nothing for a body of documentation only or on the line of `def`."""
    rows = {row["name"]: (row["source"], row["target"]) for row in sentence_rows(library)}
    pop = "def pop(self, *, default=None):\n    if self.items:\n        return self.items.pop()\n    return default"
    wait = "async def wait(self):\n    # no comment is lost\n\n    await self.ready  # done"
    assert rows == {
        "tools.Stack.pop": (pop, "Remove and return the top."),
        "tools.Stack.wait": (wait, "Not documentation: it stands behind nothing."),
    }
    for source, _ in rows.values():
        assert ast.get_docstring(ast.parse(source).body[0]) is None


def test_what_is_known_of_a_function(library):
    nodes = {name: node for name, node, _ in corpus.documented(library / "tools.py", "tools")}
    known = stdlib_tasks._known(nodes["tools.Stack.push"], "", "Put an item.")
    assert known == ["Put an item.", "(self, item, *more, flag, **rest)"]
    known = stdlib_tasks._known(nodes["tools.Stack.pop"], "def ...", "Remove it.\n\nMore.")
    assert known == ["Remove it.", "(self, default)", "if self.items:"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("One. Two.", "One."),
        ("One\n  line", "One line"),
        ("First paragraph\n\nsecond.", "First paragraph"),
        ("See sys.path, really? Yes.", "See sys.path, really?"),
        ("Version 3.11 is out", "Version 3.11 is out"),
        ("Go!", "Go!"),
        ("", ""),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


@pytest.fixture(scope="module")
def choices():
    return [row for split in stdlib_tasks.load_choices().values() for row in split]


def test_choices_of_the_library(choices):
    """Four different texts; the right one is the function's own sentence; all places alike; no sentence in two splits."""
    sentences = {row["name"]: row["target"] for split in stdlib_tasks.load_sentences().values() for row in split}
    known, own = 0, {split: set() for split in corpus.SPLITS}
    for row in choices:
        assert len(set(row["choices"])) == 4 and row["question"] == f"What does {row['name']} do?"
        known += row["choices"][row["label"]] == sentences.get(row["name"])
        own[corpus.split_of(row["name"])].add(row["choices"][row["label"]])
    assert known > 0.95 * len(choices)  # a name may come twice, and a body may be documentation only
    assert len(choices) > 3000 and max(Counter(row["label"] for row in choices).values()) < 0.28 * len(choices)
    assert sum(map(len, own.values())) == len(set().union(*own.values()))
    for row in choices:
        others = {text for i, text in enumerate(row["choices"]) if i != row["label"]}
        split = corpus.split_of(row["name"])
        assert not any(others & own[other] for other in corpus.SPLITS if other != split)


def test_who_only_knows_documentation_when_he_sees_it(choices):
    """As the docstring says: a documentation sentence, whosesoever, taken at random is right in three of five."""
    sentences = {row["choices"][row["label"]] for row in choices}
    chances = [1 / sum(text in sentences for text in row["choices"]) for row in choices]
    assert 0.55 < sum(chances) / len(chances) < 0.65


@pytest.mark.parametrize("load", [stdlib_tasks.load_questions, stdlib_tasks.load_choices, stdlib_tasks.load_sentences])
def test_corpora_are_kept(load, tmp_path, monkeypatch):
    """Built once, of 60 modules with two functions each; the splits go by names."""
    for number in range(60):
        code = f'def f{number}(a):\n    """Return the number {number}. Then end."""\n    return {number}\n'
        (tmp_path / f"module{number}.py").write_text(code + code.replace(f"f{number}", f"g{number}").replace("the", "another"))
    monkeypatch.setattr(corpus, "_stdlib_folder", lambda: tmp_path)
    first = load(tmp_path / "cache")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert load(tmp_path / "cache").num_rows == first.num_rows and sum(first.num_rows.values()) > 100
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
    for split in corpus.SPLITS:
        assert all(corpus.split_of(name) == split for name in first[split]["name"])
