"""What a section says: figures, a table of them, and the bounds that they must keep."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bound:
    """What must show: `value` at least (or, if `at_most`, at most) `limit`. A missed aim fails nothing, but is told."""

    what: str
    value: float
    limit: float
    at_most: bool = False
    is_aim: bool = False

    @property
    def holds(self) -> bool:
        """False for a value that is not a number, too."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    @property
    def is_broken(self) -> bool:
        return not (self.holds or self.is_aim)

    def __str__(self) -> str:
        """
        >>> print(Bound("speed", 2.5, 3.0))
        BROKEN: speed: 2.5, must be at least 3
        >>> print(Bound("speed", 2.5, 3.0, is_aim=True))
        AIM MISSED: speed: 2.5, aimed at: at least 3
        """
        missed, verb = ("AIM MISSED", "aimed at:") if self.is_aim else ("BROKEN", "must be")
        kind = "at most" if self.at_most else "at least"
        return f"{'holds' if self.holds else missed}: {self.what}: {self.value:.4g}, {verb} {kind} {self.limit:.4g}"


@dataclass
class Section:
    """The result of one part of the benchmark.

    Attributes:
        title: of its table. notes: lines under it. figures: everything that was measured, for JSON.
    """

    title: str
    header: Sequence[str]
    rows: list[Sequence[Any]]
    bounds: list[Bound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def quoted(cls, title: str, text: str, exit_code: int) -> "Section":
        """What another script printed, and whether it was content."""
        bound = Bound(f"{title}: exit code", exit_code, 0, at_most=True)
        return cls(title, (), [], [bound], [text.strip()], {"printed": text, "exit_code": exit_code})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        bounds = [{**asdict(bound), "holds": bound.holds} for bound in self.bounds]
        return {"title": self.title, "bounds": bounds, "notes": self.notes, "figures": self.figures}

    def to_markdown(self) -> str:
        """Title, table, notes and bounds."""
        table = [*markdown_table(self.header, self.rows), ""] if self.rows else []
        lines = [f"## {self.title}", "", *table]
        lines += [f"{note}\n" for note in self.notes]
        return "\n".join([*lines, *[f"- {bound}" for bound in self.bounds], ""])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table: the first column is text, the others stand at the right.

    >>> markdown_table(["arm", "s"], [["a", 1.23456], ["b", None]])
    ['| arm | s |', '| --- | ---: |', '| a | 1.23 |', '| b |  |']
    """
    lines = [_line(header), _line(["---", *["---:"] * (len(header) - 1)])]
    return lines + [_line([_shown(cell) for cell in row]) for row in rows]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(cell: Any) -> str:
    """Three digits of a small number, whole large ones."""
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
