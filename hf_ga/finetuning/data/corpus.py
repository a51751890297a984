"""The embedded corpus: the documentation strings of the running interpreter's standard library.

Real text of very different lengths, available without network. It depends on the Python version, so
runs log that version. Reading the sources takes about four seconds, once per process.
"""

import ast
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_ga.errors import ConfigError, DataError

# The rows are text; only those who want a DatasetDict need datasets.
if TYPE_CHECKING:
    from datasets import DatasetDict

SPLITS = ("train", "validation", "test")
# Their ids are 0 to 5.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>")
# Installed packages, generated files, and tests of the library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# A package with fewer training rows is no label of text-classification.
FEWEST_ROWS = 100
_DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_rows(folder: Path | None = None) -> Iterator[dict[str, str]]:
    """Yield one row per documentation string below `folder` (default: the standard library), always
    in the same order.

    Sources are parsed, never imported; files that do not parse are skipped. A row is

        {"name": "asyncio.queues.Queue.get", "package": "asyncio", "text": "Remove and return an
        item ..."}

    Duplicate texts are dropped, so that no text of one split occurs in another. Names may repeat (a
    property's getter and setter): the split follows the name, so such rows stay together.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    seen = set()
    for path in _source_files(folder):
        tree = _parse(path)
        if tree is None:
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        package = module.partition(".")[0]
        for name, text in _documented(tree, module):
            if text not in seen:
                seen.add(text)
                yield {"name": name, "package": package, "text": text}


def split_of(name: str) -> str:
    """Return the split of a dotted name: 80 % "train", 10 % "validation", 10 % "test", the same on
    every platform.

    The 8-byte BLAKE2b hash of the UTF-8 name, read as a big-endian integer, modulo 10: 0 to 7, 8,
    9.

    >>> split_of("asyncio.queues.Queue.get")
    'train'
    """
    digest = blake2b(name.encode(), digest_size=8).digest()
    digit = int.from_bytes(digest, "big") % 10
    return SPLITS[max(0, digit - 7)]


@cache
def stdlib_splits() -> dict[str, list[dict[str, str]]]:
    """Return the rows of the splits train, validation and test. A row is one of `stdlib_rows`.

    Raises:
        DataError: If the library has no documentation strings (a Python without library sources).

    >>> [*stdlib_splits()]
    ['train', 'validation', 'test']
    """
    rows = list(stdlib_rows())
    splits = {split: [row for row in rows if split_of(row["name"]) == split] for split in SPLITS}
    if not all(splits.values()):
        raise DataError(
            f"too few documentation strings in {sysconfig.get_path('stdlib')} for three splits: "
            "this Python seems to lack the sources of its library. Use a Python with them, or "
            "another dataset."
        )
    return splits


@cache
def load_stdlib() -> "DatasetDict":
    """Return the corpus as splits train, validation and test with the columns name, package and
    text.

    Raises:
        DataError: See `stdlib_splits`.

    >>> load_stdlib()["train"].column_names
    ['name', 'package', 'text']
    """
    from datasets import Dataset, DatasetDict

    splits = stdlib_splits()
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def load(task: str) -> "DatasetDict":
    """Return the rows of `load_stdlib` with the columns for a task.

    - causal-lm, masked-lm: `text`.
    - text-classification: `text` and `label`, the package; packages with few rows are omitted.
    - token-classification (truecasing): `tokens`, words in lower case, and `tags`, their case in
      the source.

    Args:
        task: The name of a task.

    Raises:
        ConfigError: If the corpus has no data for the task.
    """
    rows = load_stdlib()
    if task == "text-classification":
        counts = Counter(rows["train"]["package"])
        rows = rows.filter(lambda package: counts[package] >= FEWEST_ROWS, input_columns="package")
        return rows.rename_column("package", "label").select_columns(["text", "label"])
    if task == "token-classification":
        return rows.map(truecasing_row, remove_columns=rows["train"].column_names)
    if task not in ("causal-lm", "masked-lm"):
        raise ConfigError(
            f"the embedded corpus has no data for {task}: name a dataset with --dataset_name."
        )
    return rows.select_columns(["text"])


def truecasing_row(row: dict[str, str]) -> dict[str, list[str]]:
    """Return the first 64 words of a text in lower case as `tokens`, and the case of each in the
    text as `tags`: lower, Title, UPPER, Mixed or none.

    >>> truecasing_row({"text": "Return a TarFile."})
    {'tokens': ['return', 'a', 'tarfile', '.'], 'tags': ['Title', 'lower', 'Mixed', 'none']}
    """
    words = re.findall(r"\w+|[^\w\s]", row["text"])[:64]
    tokens = [word.lower() for word in words]
    return {"tokens": tokens, "tags": [_case_of(word) for word in words]}


def _case_of(word: str) -> str:
    """Return lower, Title, UPPER, Mixed, or none for a word without letters that have a case."""
    if word.lower() == word.upper():
        return "none"
    if word.islower():
        return "lower"
    if word.istitle():
        return "Title"
    if word.isupper():
        return "UPPER"
    return "Mixed"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; the same texts give the same tokenizer.

    `decode(encode(text))` returns the text unchanged: all 256 bytes are tokens, and there is no
    normaliser and no post-processor. The caller appends <eos> for a causal model and adds <cls> for
    a classifier. The vocabulary is smaller than `vocab_size` if the texts have no more pairs to
    merge, but always contains the special tokens and the bytes.

    Args:
        texts: The texts to train on.
        vocab_size: Largest number of tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        # One token both ends a text and begins the next, as in GPT-2.
        bos_token="<eos>",
        eos_token="<eos>",
        mask_token="<mask>",
        cls_token="<cls>",
        sep_token="<sep>",
        unk_token="<unk>",
        # Without token_type_ids: GPT-2 embeds them with its word embeddings and would add <pad>'s
        # to every token.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def load_stdlib_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer trained on the corpus's train split.

    >>> load_stdlib_tokenizer().decode(load_stdlib_tokenizer()("Return the queue.")["input_ids"])
    'Return the queue.'
    """
    return train_tokenizer(row["text"] for row in stdlib_splits()["train"])


def _source_files(folder: Path) -> list[Path]:
    """List the library's .py files, in the same order on every file system and platform."""
    paths = []
    for parent, folders, files in os.walk(folder):
        # In place, so that os.walk skips them: site-packages may be far larger than the library.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(paths, key=Path.as_posix)


def _parse(path: Path) -> ast.Module | None:
    """Parse a source file. None: it is no valid Python."""
    # Bytes, because the parser reads the encoding declaration.
    source = path.read_bytes()
    try:
        with warnings.catch_warnings():
            # The library's sources have invalid escapes.
            warnings.simplefilter("ignore")
            return ast.parse(source)
    # Early releases of Python 3.11 raise ValueError for null bytes.
    except (SyntaxError, ValueError):
        return None


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield dotted name and cleaned documentation string of a definition and of nested ones, in
    source order.
    """
    if isinstance(node, ast.Module | _DEFINITION):
        text = ast.get_docstring(node) or ""
        # A lone surrogate (an escape such as \ud800) has no UTF-8 form and could not be stored.
        text = text.encode("utf-8", "replace").decode()
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITION):
            yield from _documented(child, f"{name}.{child.name}")
        # Definitions can be nested in if, try, with, ..., but not in an expression.
        elif not isinstance(child, ast.expr):
            yield from _documented(child, name)
