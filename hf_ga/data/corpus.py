"""The embedded corpus: the documentation strings of the running interpreter's standard library.

Real text, of very ragged lengths, on every machine and without network. Another Python has another library, so a
run's log should hold the line of `describe`.

    rows of the library's sources --(hash of the name)--> train, validation, test --> kept on disk, read from there
"""

import ast
import os
import platform
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value, load_from_disk
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_ga.errors import ConfigError, DataError

SPLITS = ("train", "validation", "test")
FEATURES = Features({"name": Value("string"), "package": Value("string"), "text": Value("string")})
SPECIAL_TOKENS = ("<pad>", "<eos>", "<mask>", "<cls>", "<sep>", "<unk>")  # ids 0 to 5
# Tokens, the tokenizer's default limit for truncation=True: above the longest string (1,567 tokens in Python 3.11), as
# transformers logs a warning for a longer one. How long a sample may be is the model's to say, by max_length.
MODEL_MAX_LENGTH = 2048

# Part of the cache key: raise it whenever the code below would build other rows, splits or tokens.
_FORMAT = 1
# What is installed, generated or only tests the library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_DEFINITION = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_rows(folder: Path | None = None) -> Iterator[dict[str, str]]:
    """Yield one row per documentation string below `folder` (default: the standard library), always in the same order.

    Sources are parsed, never imported; one that does not parse is skipped. A row is

        {"name": "asyncio.queues.Queue.get", "package": "asyncio", "text": "Remove and return an item ..."}

    Of equal texts only the first is yielded, so that no text of one split is repeated in another. A name may come more
    than once (a property's getter and setter, definitions under `if` and `else`): the split follows the name, so
    such rows stay together.
    """
    seen = set()
    for module, path in modules(folder):
        for name, _, text in documented(path, module):
            if text not in seen:
                seen.add(text)
                yield {"name": name, "package": module.partition(".")[0], "text": text}


def modules(folder: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield dotted name and path of every module below `folder` (default: the standard library), always in the same order.

    >>> [name for name, path in modules()][:3]
    ['__future__', '__hello__', '__phello__']
    """
    folder = folder or _stdlib_folder()
    for path in _source_files(folder):
        yield ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"), path


def documented(path: Path, module: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield dotted name, definition and cleaned documentation string of all that a source file documents; nothing if it is no
    Python.
    """
    tree = _parse(path)
    yield from _documented(tree, module) if tree else ()


def split_of(name: str) -> str:
    """Return the split of a dotted name: 80 % "train", 10 % "validation", 10 % "test", the same on every platform.

    The 8-byte BLAKE2b hash of the UTF-8 name, read as a big-endian integer, modulo 10: 0 to 7, 8, 9.

    >>> split_of("asyncio.queues.Queue.get")
    'train'
    """
    digit = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % 10
    return SPLITS[max(0, digit - 7)]


def load_stdlib(cache_dir: Path | None = None) -> DatasetDict:
    """Return the corpus as splits train, validation and test with the columns name, package and text.

    The first call builds it (some seconds) and keeps it in `cache_dir`, by default `hf_ga` in HuggingFace's cache home
    (environment variable HF_HOME); later calls only read. Concurrent processes may call it.
    Raises DataError where the library has no documentation strings (a Python that ships without its sources).

    >>> load_stdlib()["train"].column_names
    ['name', 'package', 'text']
    """
    return load_from_disk(kept_folder(cache_dir, "corpus", lambda new: split_rows(stdlib_rows(), FEATURES).save_to_disk(new)))


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4000) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens on `texts`; equal texts give an equal tokenizer.

    Every text survives `decode(encode(text))` unchanged: all 256 bytes are tokens, nothing is normalised, and there is
    no post-processor, so no token is added either. A causal model's <eos> is the caller's to append, and a classifier
    that reads a <cls> the caller's to give. Fewer tokens come out where the texts have no more pairs to merge.
    Raises ConfigError where `vocab_size` cannot hold the special tokens and the bytes.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if vocab_size < smallest:
        raise ConfigError(f"a byte-level vocabulary has at least {smallest} tokens, not {vocab_size}: raise vocab_size")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def load_stdlib_tokenizer(vocab_size: int = 4000, cache_dir: Path | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer trained on the corpus's train split: trained once, then kept beside the corpus.

    >>> load_stdlib_tokenizer().decode(load_stdlib_tokenizer()("Return the queue.")["input_ids"])
    'Return the queue.'
    """

    def build(new: Path) -> None:
        train_tokenizer(load_stdlib(cache_dir)["train"]["text"], vocab_size).save_pretrained(new)

    return AutoTokenizer.from_pretrained(kept_folder(cache_dir, f"tokenizer-{vocab_size}", build))


def split_rows(rows: Iterable[dict[str, Any]], features: Features) -> DatasetDict:
    """Return `rows` as splits train, validation and test, by `split_of` of a row's name.

    Of a name such as "asyncio.queues:99", a line, only the module counts: what stands before the colon.
    Raises DataError where a split would have no row.
    """
    by_split = {split: [] for split in SPLITS}
    for row in rows:
        by_split[split_of(row["name"].partition(":")[0])].append(row)
    if not all(by_split.values()):
        raise DataError(
            f"too few rows in {_stdlib_folder()} for three splits: this Python seems to come without "
            "the sources of its library; use one that has them, or another dataset"
        )
    return DatasetDict({split: Dataset.from_list(rows, features=features) for split, rows in by_split.items()})


def kept_folder(cache_dir: Path | None, content: str, build: Callable[[Path], None]) -> Path:
    """Return the folder in `cache_dir` that keeps `content` of this library; where it is missing, `build` writes it first.

    `build` gets the path to write to. Concurrent processes may call it.
    """
    folder = _cache_folder(cache_dir, content)
    _build_once(folder, build)
    return folder


def package_labels(dataset: DatasetDict, minimum_rows: int = 100) -> list[str]:
    """Return, sorted, the packages with at least `minimum_rows` rows in the train split: the labels for classification.

    Rows of other packages are the caller's to leave out, in every split.
    """
    rows = Counter(dataset["train"]["package"])
    return sorted(package for package, count in rows.items() if count >= minimum_rows)


def unigram_entropy(ids_counts: np.ndarray) -> float:
    """Return the entropy, in nats per token, of the unigram distribution with these counts (shape: (vocab_size,)).

    H = sum over ids i of (c_i / N) log(N / c_i), N = sum of the c_i; an id that never occurs adds nothing. It is the
    lowest loss of a language model that ignores the context: a trained one must come below it. No tokens, or one
    kind of token: 0. Raises ValueError for a negative count.

    >>> unigram_entropy(np.array([2, 1, 1]))  # 1/2 log 2 + 2 (1/4 log 4) = 1.5 log 2
    1.0397207708399179
    """
    if np.any(ids_counts < 0):
        raise ValueError(f"counts are at least 0, but the smallest is {ids_counts.min()}")
    counts = ids_counts[ids_counts > 0].astype(np.float64)
    total = counts.sum()
    return float((counts / total * np.log(total / counts)).sum())


def describe(dataset: DatasetDict) -> str:
    """Return one line on a corpus that `load_stdlib` returned, for a run's log and its summary.

    >>> describe(load_stdlib())
    'standard library of Python 3.11.7: 734 files, 8255 documentation strings, 268723 words'
    """
    files = len(_source_files(_stdlib_folder()))
    strings = sum(dataset.num_rows.values())
    words = sum(len(" ".join(split["text"]).split()) for split in dataset.values())
    return f"standard library of Python {platform.python_version()}: {files} files, {strings} documentation strings, {words} words"


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _source_files(folder: Path) -> list[Path]:
    """The library's .py files, in an order that no file system or platform changes."""
    paths = []
    for parent, folders, files in os.walk(folder):
        # In place: os.walk then stays out of them, and site-packages may be far larger than the library.
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        paths += [Path(parent, name) for name in files if name.endswith(".py")]
    return sorted(paths, key=Path.as_posix)


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in someone else's source is not ours to report
            return ast.parse(path.read_bytes())  # bytes: the parser reads the file's own encoding line
    except (SyntaxError, ValueError):  # ValueError: null bytes, in early releases of Python 3.11
        return None


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Of a definition and of those inside it, in the source's order."""
    if isinstance(node, ast.Module | _DEFINITION):
        # A lone surrogate (an escape such as \ud800) has no UTF-8 form and could not be stored.
        text = (ast.get_docstring(node) or "").encode("utf-8", "replace").decode()
        if text:
            yield name, node, text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _DEFINITION):
            yield from _documented(child, f"{name}.{child.name}")
        elif not isinstance(child, ast.expr):  # definitions stand under if, try, with, ..., never in an expression
            yield from _documented(child, name)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<eos>",  # one token both ends a text and begins the next, as in GPT-2
        eos_token="<eos>",
        mask_token="<mask>",
        cls_token="<cls>",
        sep_token="<sep>",
        unk_token="<unk>",
        model_max_length=MODEL_MAX_LENGTH,
        # Without token_type_ids: GPT-2 would look them up among its words and add the vector of <pad> to every token.
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _cache_folder(cache_dir: Path | None, content: str) -> Path:
    """The folder that keeps `content`. Another Python, another library or another format has another one."""
    root = _stdlib_folder()
    files = [f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in _source_files(root)]
    digest = blake2b("\n".join(files).encode(), digest_size=6).hexdigest()
    cache_dir = Path(cache_dir or Path(constants.HF_HOME, "hf_ga"))
    return cache_dir / f"stdlib-{platform.python_version()}-v{_FORMAT}-{digest}-{content}"


def _build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Where `folder` is missing, let `build` write it elsewhere and rename it: no process ever sees half of it."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as beside:  # renames stay on one disk
        new = Path(beside, "new")
        build(new)
        try:
            new.rename(folder)
        except OSError:  # another process was first, and wrote the same
            if not folder.is_dir():
                raise
