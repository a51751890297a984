"""Rows that cannot be used, told by split and row number, from 0, and by line where they come from a file of lines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hf_ga.data.file_checks import lines_of_rows
from hf_ga.errors import DataError

NUM_SHOWN = 3


@dataclass(frozen=True)
class Origin:
    """Where the rows of a split were before validation rows were taken from the training rows.

    Attributes:
        split: the split that they were read as. file: what was read, where it is one file.
        numbers: of each row, among all that were read; None: its own.
    """

    split: str
    file: str | None = None
    numbers: np.ndarray | None = None

    def number(self, row: int) -> int:
        """The number of a row among all that were read."""
        return row if self.numbers is None else int(self.numbers[row])


class RowsError(DataError):
    """Rows of a split, by number.

    Args:
        numbers: of all wrong rows. total: how many were looked at. shown: what is wrong with the first of them, one phrase each.
        rule: what they break, and the remedy.
    """

    def __init__(self, split: str, numbers: Sequence[int], total: int, shown: Sequence[str], rule: str) -> None:
        self.split, self.numbers, self.total, self.shown, self.rule = split, list(numbers), total, list(shown[:NUM_SHOWN]), rule
        super().__init__(self.told(Origin(split)))

    def told(self, origin: Origin) -> str:
        """The message, with the numbers that the rows have in what was read."""
        numbers = [origin.number(number) for number in self.numbers[:NUM_SHOWN]]
        named = [f"row {number} of {origin.split} {what}" for number, what in zip(numbers, self.shown, strict=True)]
        count = f"{len(self.numbers)} of {self.total} {self.split} rows cannot be used, such as " if len(self.numbers) > 1 else ""
        lines = lines_of_rows(origin.file, numbers) if origin.file else []
        where = f" (line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))} of {Path(str(origin.file)).name})" if lines else ""
        return f"{count}{'; '.join(named)}{where}: {self.rule}"


class RowOfBatch(DataError):
    """One row of a batch: `number` is its place in it, `shown` what is wrong with it, `rule` what it breaks, and the remedy.

    The text is for those who know the batch only.
    """

    def __init__(self, number: int, shown: str, rule: str, text: str) -> None:
        self.number, self.shown, self.rule = number, shown, rule
        super().__init__(text)


@dataclass
class Complaints:
    """What was found wrong with the rows of a split; those that break the same rule are told together."""

    split: str
    by_rule: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def add(self, number: int, shown: str, rule: str) -> None:
        """A wrong row."""
        self.by_rule.setdefault(rule, []).append((number, shown))

    def refuse(self, total: int) -> None:
        """Raise RowsError for the first rule that was broken."""
        for rule, found in self.by_rule.items():
            raise RowsError(self.split, [number for number, _ in found], total, [shown for _, shown in found], rule)


@contextmanager
def located(origins: Mapping[str, Origin]) -> Iterator[None]:
    """Errors of rows tell the numbers that the rows have in what was read."""
    try:
        yield
    except RowsError as error:
        raise DataError(error.told(origins.get(error.split, Origin(error.split)))) from error


def numbers_told(numbers: Sequence[int]) -> str:
    """A few row numbers, for a line of text."""
    more = f" and {len(numbers) - NUM_SHOWN} more" if len(numbers) > NUM_SHOWN else ""
    return f"row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:NUM_SHOWN]))}{more}"


def with_row_numbers(
    tokenize: Callable[..., dict[str, list]], split: str
) -> Callable[[dict[str, list], list[int]], dict[str, list]]:
    """A tokenising function that gets the numbers of its rows, for its errors."""

    def numbered(rows: dict[str, list], numbers: list[int]) -> dict[str, list]:
        try:
            return tokenize(rows)
        except RowOfBatch as error:
            raise RowsError(split, [numbers[error.number]], 0, [error.shown], error.rule) from error

    return numbered
