"""The second embedded corpus: source lines of the running interpreter's standard library, a tag for every token.

For token classification, on every machine and without network. Tokens and tags are those of Python's own `tokenize`.

    lines of the library's sources --(hash of the line)--> a share of them --(hash of the module)--> train, validation, test
"""

import platform
import tokenize
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import ClassLabel, DatasetDict, Features, List, Value, load_from_disk

from hf_ga.data import corpus

# Part of the cache key: raise it whenever the code below would build other rows.
_FORMAT = 1
# How this Python was built, paths of that machine included: left out, so that the same release has the same lines anywhere.
_BUILD_TABLE = "_sysconfigdata_"
_FEWEST_TOKENS = 4
_ONE_LINE_IN = 7  # 14,480 of the 102,127 different lines of Python 3.11.7


def source_line_rows(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield one row per chosen source line below `folder` (default: the standard library), always in the same order.

    Sources are read, never imported; one that is not Python's tokens throughout is skipped. A row is

        {"name": "asyncio.queues:99", "tokens": ["def", "full", "(", "self", ")", ":"], "tags": ["NAME", "NAME", "OP", ...]}

    where the name is module and number of the line, and a tag is the name that `tokenize` has for the token's kind.
    Line ends, indentation and whatever else shows no character are no tokens here. Left out are lines

    - on which a token ends or begins that has several lines (a documentation string), with all between them;
    - of fewer than 4 tokens;
    - whose tokens were those of an earlier line, so that no line of one split is repeated in another;
    - but for one in 7, chosen by the hash of the tokens.
    """
    seen = set()
    for module, path in corpus.modules(folder):
        if module.startswith(_BUILD_TABLE):
            continue
        for number, tokens in _lines(_tokens(path)).items():
            strings = [token.string for token in tokens]
            text = "\n".join(strings)  # one text per list: a token of one line has no line end
            if len(tokens) >= _FEWEST_TOKENS and _is_chosen(text) and text not in seen:
                seen.add(text)
                yield {"name": f"{module}:{number}", "tokens": strings, "tags": [tokenize.tok_name[token.type] for token in tokens]}


def load_source_lines(cache_dir: Path | None = None) -> DatasetDict:
    """Return the corpus as splits train, validation and test with the columns name, tokens and tags (class labels).

    All lines of a module are in one split. The first call builds it (some seconds) and keeps it beside the other corpus
    (see `corpus.load_stdlib`); later calls only read. Concurrent processes may call it.
    Raises DataError for a Python that ships without the sources of its library.

    >>> load_source_lines()["train"].features["tags"].feature.names  # Python 3.12 and later: kinds for f-strings, too
    ['COMMENT', 'NAME', 'NUMBER', 'OP', 'STRING']
    """

    def build(new: Path) -> None:
        rows = list(source_line_rows())
        names = sorted({tag for row in rows for tag in row["tags"]})
        tags = List(ClassLabel(names=names))
        features = Features({"name": Value("string"), "tokens": List(Value("string")), "tags": tags})
        corpus.split_rows(rows, features).save_to_disk(new)

    return load_from_disk(corpus.kept_folder(cache_dir, f"lines-v{_FORMAT}", build))


def describe_source_lines(dataset: DatasetDict) -> str:
    """Return one line on a corpus that `load_source_lines` returned, for a run's log and its summary.

    The share of the most frequent tag is the accuracy of a model that always answers with it.

    >>> describe_source_lines(load_source_lines())
    'standard library of Python 3.11.7: 734 files, 14480 source lines, 119988 tokens, 48.2 % of them OP'
    """
    counts = Counter(chain.from_iterable(tags for split in dataset.values() for tags in split["tags"]))
    files = sum(1 for _ in corpus.modules())
    lines = sum(dataset.num_rows.values())
    ((tag, most),) = counts.most_common(1)
    name = dataset["train"].features["tags"].feature.int2str(tag)
    return (
        f"standard library of Python {platform.python_version()}: {files} files, {lines} source lines, "
        f"{counts.total()} tokens, {100 * most / counts.total():.1f} % of them {name}"
    )


def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    """The tokens of a file, none where it is not Python's tokens throughout."""
    try:
        with warnings.catch_warnings(), tokenize.open(path) as file:  # in the encoding that the file states
            warnings.simplefilter("ignore")  # what Python 3.12's tokenizer finds odd in someone else's source
            tokens = list(tokenize.generate_tokens(file.readline))
    except (tokenize.TokenError, SyntaxError, ValueError, LookupError):  # the last two: bytes or encodings that are no text
        return []
    # What is no token ("$") does not raise: it is an ERRORTOKEN in Python 3.11, an operator without a name of its own later.
    return [] if any(token.exact_type in (tokenize.ERRORTOKEN, tokenize.OP) for token in tokens) else tokens


def _lines(tokens: list[tokenize.TokenInfo]) -> dict[int, list[tokenize.TokenInfo]]:
    """Number of a line -> its tokens, in the source's order, without the lines of a token that has several."""
    lines, spanned = defaultdict(list), set()
    for token in tokens:
        (first, _), (last, _) = token.start, token.end
        if first < last:
            spanned.update(range(first, last + 1))
        elif token.string.strip():  # not NEWLINE, NL, INDENT, DEDENT, ENDMARKER; nor blanks between two fields of an f-string
            lines[first].append(token)
    return {number: line for number, line in lines.items() if number not in spanned}


def _is_chosen(text: str) -> bool:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % _ONE_LINE_IN == 0
