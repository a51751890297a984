"""Where a file that cannot be read is broken, and on which lines of it rows stand. Read only when something is wrong."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any

MOST_LINES = 3
MOST_SCANNED = 1 << 30
_NULL_LINE, _NULL_FIRST = re.compile(rb"(?m)^[ \t\r]*null"), re.compile(rb"\A\s*null")


def broken_lines(file: str) -> str:
    """What is wrong with which lines of a file of lines, the first of them; empty where that is not known."""
    if not _is_lines(file):
        return ""
    wrong: list[str] = []
    others: list[str] = []  # as lines go, right, but of other types than the first ones
    kinds: dict[str, tuple[str, int]] = {}
    number = 0
    try:
        with _opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if reason := _wrong_with(line, file):
                    wrong.append(f"line {number}: {reason}")
                elif _ending(file) == ".jsonl" and line.strip():
                    others += _changed_kinds(json.loads(line), kinds, number)
    except (EOFError, OSError, zlib.error) as error:
        wrong.append(f"after line {number}: {error}")
    if number and len(wrong) == number and number > MOST_LINES:
        return f"none of its {number} lines is right, {wrong[0]}"
    wrong = wrong or others
    more = [f"{len(wrong) - MOST_LINES} more"] if len(wrong) > MOST_LINES else []
    return "; ".join([*wrong[:MOST_LINES], *more])


def first_null(file: str) -> int | None:
    """The first line of a file of JSON that begins with `null`, where its reader would crash the process (pyarrow 25).

    The first MOST_SCANNED bytes are looked at, of compressed files and of those that are no JSON lines the beginning.
    """
    pattern = _NULL_LINE if _ending(file) == ".jsonl" else _NULL_FIRST
    with _opened(file) as opened:
        if isinstance(opened, gzip.GzipFile) or pattern is _NULL_FIRST:
            text: bytes | mmap = _beginning(opened)
        else:
            size = min(MOST_SCANNED, Path(file).expanduser().stat().st_size)
            text = mmap(opened.fileno(), size, access=ACCESS_READ)
    found = pattern.search(text)
    return text[: found.end()].count(b"\n") + 1 if found else None


def _beginning(opened: IO[bytes]) -> bytes:
    try:
        return opened.read(1 << 20)
    except (EOFError, OSError, zlib.error):  # told by who reads it
        return b""


def lines_of_rows(file: str, numbers: Sequence[int]) -> list[int]:
    """The lines, from 1, on which rows stand; empty for files whose rows are no lines."""
    if not _is_lines(file):
        return []
    last = max(numbers, default=-1)
    try:
        lines = list(islice(_lines_of_records(file), last + 1))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error):
        return []
    return [lines[number] for number in numbers if number < len(lines)]


def _lines_of_records(file: str) -> Iterator[int]:
    kind = _ending(file)
    with _opened(file) as lines:
        if kind == ".csv":
            yield from _lines_of_csv(lines)
        for number, line in enumerate(lines, 1):
            if kind != ".jsonl" or line.strip():
                yield number


def _lines_of_csv(lines: IO[bytes]) -> Iterator[int]:
    reader = csv.reader(line.decode("utf-8", "replace") for line in lines)
    next(reader, None)  # the names of the columns
    before = reader.line_num
    for row in reader:
        if row:
            yield before + 1
        before = reader.line_num


def _wrong_with(line: bytes, file: str) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} (0x{line[error.start]:02x}) is no UTF-8"
    if _ending(file) != ".jsonl" or not text.strip():
        return ""
    try:
        value: Any = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair, which is no character"
    except (ValueError, RecursionError) as error:
        return f"no JSON ({' '.join(str(error).split())[:100]})"
    return "" if isinstance(value, dict) else f"holds {type(value).__name__}, not an object"


def _changed_kinds(row: dict[str, Any], kinds: dict[str, tuple[str, int]], number: int) -> list[str]:
    """Columns that hold something else than before; `kinds` keeps what they held first, and on which line."""
    changed = []
    for name, value in row.items():
        if value is None:
            continue
        kind = "a number" if isinstance(value, int | float) and not isinstance(value, bool) else f"a {type(value).__name__}"
        first, line = kinds.setdefault(name, (kind, number))
        if kind != first:
            changed.append(f"line {number}: {name!r} holds {kind}, on line {line} {first}")
    return changed


def _opened(file: str) -> IO[bytes]:
    path = Path(file).expanduser()
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _is_lines(file: str) -> bool:
    return _ending(file) in (".jsonl", ".csv", ".txt", ".text")


def _ending(file: str) -> str:
    return next(iter([s.lower() for s in reversed(Path(file).suffixes) if s != ".gz"]), "")
