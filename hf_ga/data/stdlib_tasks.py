"""Three more embedded corpora, made of the standard library's own sources: for question answering, multiple choice and seq2seq.

    questions   documentation strings --(a pattern for each question)--> question, context, answer as a span of it
    choices     a function, the first sentence of its documentation and three texts on others: sentences, arguments, code
    sentences   source of a function without its documentation -> the first sentence of that

Splits go by the hash of the name, as those of `corpus`; what is drawn is drawn by hashes of names, so all is the same everywhere.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from textwrap import dedent
from typing import Any

from datasets import DatasetDict, Features, List, Value, load_from_disk

from hf_ga.data import corpus

# Part of the cache key: raise it whenever the code below would build other rows.
_FORMAT = 3
_STRING = Value("string")
QUESTION_FEATURES = Features(
    {
        "name": _STRING,
        "question": _STRING,
        "context": _STRING,
        "answers": {"text": List(_STRING), "answer_start": List(Value("int64"))},
    }
)
CHOICE_FEATURES = Features({"name": _STRING, "question": _STRING, "choices": List(_STRING), "label": Value("int64")})
SENTENCE_FEATURES = Features({"name": _STRING, "source": _STRING, "target": _STRING})
NUM_CHOICES = 4
# What is asked, and how a documentation string answers it.
_ANSWERS = {
    "What does it return?": re.compile(r"\b[Rr]eturns?:? +([^;:]{3,160}?)(?=\.\s|[.;:]?$|[;:]|\n\n)"),
    "What does it raise?": re.compile(r"\b[Rr]aises?:? +(?:an? |the )?`*([A-Z]\w*(?:\.\w+)*)"),
    "On what condition?": re.compile(r"\b[Ii]f ([^,.;:]{3,120}?),"),
}
_FURTHEST = 300  # characters from the beginning at which an answer may begin: usual sample lengths should hold it
_FEWEST_WORDS = 3
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def question_rows(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield questions on the documentation strings below `folder` (default: the standard library), always in the same order.

        {"name": "bisect.bisect_left", "question": "What does it return?", "context": "Return the index where to ...",
         "answers": {"text": ["the index where to insert item x in list a, assuming a is sorted"], "answer_start": [7]}}

    The answer is what stands behind the first "return", "raise" or "if" of the text, to the end of the clause.
    """
    for row in corpus.stdlib_rows(folder):
        for question, pattern in _ANSWERS.items():
            found = pattern.search(row["text"])
            if found and found.start(1) < _FURTHEST:
                answers = {"text": [found.group(1).rstrip()], "answer_start": [found.start(1)]}
                yield {"name": row["name"], "question": question, "context": row["text"], "answers": answers}


def choice_rows(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield functions with four texts, of which one is the first sentence of their documentation, always in the same order.

        {"name": "heapq.heappush", "question": "What does heapq.heappush do?",
         "choices": ["Return the name.", "(heap, item)", "Push item onto heap, ...", "if x is None:"], "label": 2}

    The three others are drawn from what is known of any function of the same split: first sentences, arguments, first lines of
    code. So who only tells documentation from code is right in three of five.
    """
    by_split: dict[str, list[tuple[str, list[str]]]] = {split: [] for split in corpus.SPLITS}
    for name, node, source, text in _functions(folder):
        by_split[corpus.split_of(name)].append((name, _known(node, source, text)))
    for functions in by_split.values():
        for name, (sentence, *_) in functions:
            others = _others(name, sentence, [known for _, known in functions])
            if len(others) == NUM_CHOICES - 1:
                label = _hash(name, "place") % NUM_CHOICES
                choices = [*others[:label], sentence, *others[label:]]
                yield {"name": name, "question": f"What does {name} do?", "choices": choices, "label": label}


def sentence_rows(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield functions as source code without documentation and the first sentence of that, always in the same order.

    {"name": "heapq.heappush", "source": "def heappush(heap, item):\\n    heap.append(item)\\n    ...", "target": "Push item ..."}
    """
    for name, _, source, text in _functions(folder):
        if source:
            yield {"name": name, "source": source, "target": first_sentence(text)}


def load_questions(cache_dir: Path | None = None) -> DatasetDict:
    """Return the splits train, validation and test of `question_rows`; built once, then kept (see `corpus.load_stdlib`).

    >>> load_questions()["train"][0]["question"]
    'What does it return?'
    """
    return _kept(cache_dir, "questions", question_rows, QUESTION_FEATURES)


def load_choices(cache_dir: Path | None = None) -> DatasetDict:
    """Return the splits of `choice_rows`, as `load_questions` does."""
    return _kept(cache_dir, "choices", choice_rows, CHOICE_FEATURES)


def load_sentences(cache_dir: Path | None = None) -> DatasetDict:
    """Return the splits of `sentence_rows`, as `load_questions` does."""
    return _kept(cache_dir, "sentences", sentence_rows, SENTENCE_FEATURES)


def first_sentence(text: str) -> str:
    """The first sentence of a documentation string, on one line: to the first mark before a space, or to the end of a paragraph.

    >>> first_sentence("Push item onto heap, maintaining\\n the heap invariant.  More text.")
    'Push item onto heap, maintaining the heap invariant.'
    """
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.match(r".*?[.!?](?= |$)|.*", paragraph).group()  # type: ignore[union-attr]


def _kept(cache_dir: Path | None, content: str, rows: Any, features: Features) -> DatasetDict:
    def build(new: Path) -> None:
        corpus.split_rows(rows(), features).save_to_disk(new)

    return load_from_disk(corpus.kept_folder(cache_dir, f"{content}-v{_FORMAT}", build))


def _functions(folder: Path | None) -> Iterator[tuple[str, _Function, str, str]]:
    """Name, definition, source without documentation ("" if nothing is left) and documentation of all documented functions.

    Of equal first sentences only the first is taken: "Return the value." fits too many names.
    """
    seen = set()
    for module, path in corpus.modules(folder):
        lines: list[str] = []
        for name, node, text in corpus.documented(path, module):
            sentence = first_sentence(text)
            if not isinstance(node, _Function) or len(sentence.split()) < _FEWEST_WORDS or sentence in seen:
                continue
            seen.add(sentence)
            lines = lines or _source_lines(path)
            yield name, node, _without_documentation(node, lines), text


def _source_lines(path: Path) -> list[str]:
    """As Python counts them: a form feed ends none."""
    with tokenize.open(path) as file:
        return file.read().split("\n")


def _without_documentation(node: _Function, lines: list[str]) -> str:
    documentation, *rest = node.body
    if not rest or documentation.lineno == node.lineno or documentation.end_lineno == rest[0].lineno:
        return ""
    kept = lines[node.lineno - 1 : documentation.lineno - 1] + lines[documentation.end_lineno : node.end_lineno]
    return dedent("\n".join(kept)).encode("utf-8", "replace").decode()


def _known(node: _Function, source: str, text: str) -> list[str]:
    """First sentence, arguments, and the first line of the code, where there is more than documentation."""
    first_line = [ast.unparse(node.body[1]).partition("\n")[0]] if source else []
    return [first_sentence(text), f"({', '.join(_arguments(node))})", *first_line]


def _arguments(node: _Function) -> list[str]:
    given = node.args
    star = [f"*{given.vararg.arg}"] if given.vararg else []
    stars = [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [a.arg for a in [*given.posonlyargs, *given.args]] + star + [a.arg for a in given.kwonlyargs] + stars


def _others(name: str, sentence: str, known: list[list[str]]) -> list[str]:
    """Three more texts, all different, by the hash of the name; fewer where there are not so many."""
    found: list[str] = []
    for draw in range(100):
        of_function = known[_hash(name, f"function {draw}") % len(known)]
        other = of_function[_hash(name, f"text {draw}") % len(of_function)]
        if other != sentence and other not in found:
            found.append(other)
        if len(found) == NUM_CHOICES - 1:
            break
    return found


def _hash(name: str, what: str) -> int:
    return int.from_bytes(blake2b(f"{name}:{what}".encode(), digest_size=8).digest(), "big")
