"""The embedded corpus: the docstrings of the running interpreter's standard library.

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

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_ga.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")
# Special tokens of the corpus's tokenizer, with the ids 0 to 5.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>")
# Folders without rows: installed packages, generated files, and tests of the library.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Minimum number of training rows for a package to be a label of text-classification.
MIN_ROWS_PER_LABEL = 100
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_rows(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the embedded corpus: one per docstring of the Python files below `folder`,
    always in the same order.

    Sources are parsed, never imported; files that do not parse are skipped. A row is

        {"name": "asyncio.queues.Queue.get", "package": "asyncio", "text": "Remove and return an
        item ..."}

    Duplicate texts are dropped, so that no text of one split occurs in another. Names may repeat (a
    property's getter and setter): the split follows the name, so such rows stay together.

    Args:
        folder: A folder of packages, such as the standard library.
    """
    seen_texts = set()
    for path in _source_files(folder):
        try:
            with warnings.catch_warnings():
                # The library's sources have invalid escapes.
                warnings.simplefilter("ignore")
                # Bytes, because the parser reads the encoding declaration.
                tree = ast.parse(path.read_bytes())
        # Early releases of Python 3.11 raise ValueError for null bytes.
        except (SyntaxError, ValueError):
            continue
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        package = module.partition(".")[0]
        for name, text in _docstrings(tree, module):
            if text not in seen_texts:
                seen_texts.add(text)
                yield {"name": name, "package": package, "text": text}


def split_of(name: str) -> str:
    """Assign a row of the corpus to a split by its dotted name: 80 % of the names to "train", 10 %
    to "validation" and 10 % to "test", the same on every platform.

    The last decimal digit of the name's hash (8-byte BLAKE2b of its UTF-8, a big-endian integer)
    decides: 0 to 7 is "train", 8 "validation", 9 "test".

    >>> split_of("asyncio.queues.Queue.get")
    'train'
    """
    digest = blake2b(name.encode(), digest_size=8).digest()
    last_digit = int.from_bytes(digest, "big") % 10
    return SPLITS[max(0, last_digit - 7)]


@cache
def load_stdlib() -> DatasetDict:
    """Return the docstrings of the standard library as a `DatasetDict`: the splits train,
    validation and test with the columns name, package and text; see `stdlib_rows`.

    Raises:
        DataError: If a split would have no rows, as with a Python without library sources.

    >>> load_stdlib()["train"].column_names
    ['name', 'package', 'text']
    """
    folder = sysconfig.get_path("stdlib")
    rows = list(stdlib_rows(Path(folder)))
    splits = {split: [row for row in rows if split_of(row["name"]) == split] for split in SPLITS}
    if not all(splits.values()):
        raise DataError(
            f"too few docstrings in {folder} for three splits: "
            "this Python seems to lack the sources of its library. Use a Python with them, or "
            "another dataset."
        )
    return DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()})


def load(task: str) -> DatasetDict:
    """Return the rows of the embedded corpus (`load_stdlib`) with the columns for a task.

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
        rows = rows.filter(
            lambda package: counts[package] >= MIN_ROWS_PER_LABEL, input_columns="package"
        )
        return rows.rename_column("package", "label").select_columns(["text", "label"])
    if task == "token-classification":
        return rows.map(truecasing_row, remove_columns=rows["train"].column_names)
    if task not in ("causal-lm", "masked-lm"):
        raise ConfigError(
            f"the embedded corpus has no data for {task}: name a dataset with --dataset_name."
        )
    return rows.select_columns(["text"])


def truecasing_row(row: dict[str, str]) -> dict[str, list[str]]:
    """Make a row of token classification from a text, to restore upper and lower case: the first
    64 words in lower case as `tokens`, and the case that each has in the text as `tags`.

    Tags are lower, Title, UPPER, Mixed or none. The other columns of the row are not returned.

    >>> truecasing_row({"text": "Return a TarFile."})
    {'tokens': ['return', 'a', 'tarfile', '.'], 'tags': ['Title', 'lower', 'Mixed', 'none']}
    """
    words = re.findall(r"\w+|[^\w\s]", row["text"])[:64]
    tokens = [word.lower() for word in words]
    return {"tokens": tokens, "tags": [_case_of(word) for word in words]}


def _case_of(word: str) -> str:
    """Return the tag of a word for truecasing, its upper or lower case: lower, Title, UPPER, Mixed,
    or "none" if it has no letters with a case. A single capital is Title.
    """
    if word.lower() == word.upper():
        return "none"
    cases = {"lower": word.islower(), "Title": word.istitle(), "UPPER": word.isupper()}
    return next((tag for tag, is_case in cases.items() if is_case), "Mixed")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, as for the embedded corpus; the same texts give the same
    tokenizer.

    `decode(encode(text))` returns the text unchanged: all 256 bytes are tokens, and there is no
    normaliser and no post-processor. The caller appends <eos> for a causal model and adds <cls> for
    a classifier. The vocabulary is smaller than `vocab_size` if the texts have no more pairs to
    merge, but always contains the special tokens and the bytes.

    Args:
        texts: The texts to train on.
        vocab_size: Maximum number of tokens in the vocabulary.
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
    """Train and return the tokenizer of the embedded corpus, on its train split.

    >>> load_stdlib_tokenizer().decode(load_stdlib_tokenizer()("Return the queue.")["input_ids"])
    'Return the queue.'
    """
    return train_tokenizer(load_stdlib()["train"]["text"])


def _source_files(folder: Path) -> list[Path]:
    """List the .py files below a folder, the sources of the embedded corpus, in the same order on
    every file system and platform.
    """
    paths = []
    for parent, folders, files in os.walk(folder):
        # In place, so that os.walk skips them: site-packages may be far larger than the library.
        folders[:] = [name for name in folders if name not in _EXCLUDED_FOLDERS]
        paths += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(paths, key=Path.as_posix)


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted name, docstring without indentation) of a module, class or function and of all
    definitions inside it, in source order, as rows of the embedded corpus.
    """
    if isinstance(node, ast.Module | _Definition):
        text = ast.get_docstring(node) or ""
        # A lone surrogate (an escape such as \ud800) has no UTF-8 form and could not be stored.
        text = text.encode("utf-8", "replace").decode()
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield from _docstrings(child, f"{name}.{child.name}")
        # Definitions can be nested in if, try, with, ..., but not in an expression.
        elif not isinstance(child, ast.expr):
            yield from _docstrings(child, name)
