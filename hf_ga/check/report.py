"""What a check found: one row for each arm and layout, the reasons where they differ, as text, dict and HTML."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_ga.recovery.files import write_json

OURS = "hf_ga"


@dataclass(frozen=True)
class Cause:
    """Why an arm differs: `name` is one of `diagnosis.CAUSES`, `text` what is wrong, `seen` the figures that show it."""

    name: str
    text: str
    seen: str = ""


@dataclass
class Row:
    """One arm in one layout, against the truth of its window. All errors and limits are relative to the truth's norm.

    Attributes:
        micro_batches: samples of each. accumulation_steps: micro-batches of a full window.
        error, limit: of the gradient over all parameters together: ||g - g64|| / ||g64||.
        own_error: that of the full batch in the same precision.
        norm_ratio: ||g|| / ||g64||. cosine: of the angle between both.
        worst_parameter, worst_share: the parameter that is nearest to (or farthest above) its limit, and error / limit there.
        update_error: of what one optimizer step adds to the weights, relative to the right addition.
        parameter_errors, parameter_limits: L2 of the difference of each, relative to the norm over all.
        loss: as the arm reports it; None where it reports none. loss_error: relative difference.
        refused: the message of the error with which the arm refused to run. causes: why it differs.
    """

    arm: str
    layout: str
    micro_batches: list[int]
    accumulation_steps: int
    passed: bool = False
    refused: str | None = None
    error: float = float("inf")
    limit: float = 0.0
    own_error: float = 0.0
    cosine: float = float("nan")
    norm_ratio: float = float("nan")
    worst_parameter: str = ""
    worst_share: float = float("inf")
    update_error: float = float("nan")
    loss: float | None = None
    loss_error: float | None = None
    judged_by: str = "gradient"
    parameter_errors: dict[str, float] = field(default_factory=dict)
    parameter_limits: dict[str, float] = field(default_factory=dict)
    causes: list[Cause] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The error as a share of its limit: above 1 the row fails."""
        return max(self.error / self.limit if self.limit else float("inf"), self.worst_share)


@dataclass
class EquivalenceReport:
    """The result of `check_equivalence`.

    Attributes:
        rows: arm by arm, layout by layout. facts: how the check was made, in sentences.
        settings: precision, seed and the like. versions: of the libraries.

    Example:
        report = check_equivalence(model, samples, collate_fn)
        assert report.passed, report
        report.save("outputs/check")        # report.json and report.html
    """

    model: str
    rows: list[Row]
    facts: list[str]
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every arm passed in every layout."""
        return all(row.passed for row in self.rows)

    @property
    def arms(self) -> list[str]:
        """Names of the arms, in the order of the rows."""
        return list(dict.fromkeys(row.arm for row in self.rows))

    @property
    def max_error(self) -> float:
        """The largest relative error of a gradient over all parameters together; inf where an arm refused."""
        return max(row.error for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that is farthest above its limit, or nearest to it."""
        return max(self.rows, key=lambda row: (not row.passed, row.share))

    def arm(self, name: str) -> "EquivalenceReport":
        """The part of the report about one arm."""
        rows = [row for row in self.rows if row.arm == name]
        return EquivalenceReport(self.model, rows, self.facts, self.settings, self.versions)

    def causes(self, arm: str = OURS) -> list[Cause]:
        """Why an arm differs, each reason once; empty where it passed."""
        found: dict[tuple[str, str], Cause] = {}
        for row in self.rows:
            for cause in row.causes if row.arm == arm else ():
                found.setdefault((cause.name, cause.text), cause)
        return list(found.values())

    def verdict(self, arm: str) -> str:
        """One sentence about an arm."""
        part = self.arm(arm)
        failed = [row for row in part.rows if not row.passed]
        if not failed:
            return f"{arm}: passed, the full batch's gradient in all {len(part.rows)} layouts (largest error {part.max_error:.1e})"
        if refused := next((row.refused for row in failed if row.refused), None):
            return f"{arm}: refused: {refused}"
        return (
            f"{arm}: FAILED in {len(failed)} of {len(part.rows)} layouts: {part.worst.layout} is off by {part.worst.error:.1e}, "
            f"the limit is {part.worst.limit:.1e}"
        )

    def summary(self) -> str:
        """A line: which arms passed."""
        words = {arm: "passed" if self.arm(arm).passed else "FAILED" for arm in self.arms}
        words |= {row.arm: "refused" for row in self.rows if row.refused is not None}
        return f"{self.model}: " + ", ".join(f"{arm} {word}" for arm, word in words.items())

    def reasons(self, arm: str) -> list[str]:
        """Why it differs, one line a cause, with the layouts in which it was found."""
        lines = []
        for cause in self.causes(arm):
            same = [row.layout for row in self.rows if row.arm == arm and any(_same(c, cause) for c in row.causes)]
            lines.append(f"{cause.name}: {cause.text} ({'; '.join(filter(None, [', '.join(same), cause.seen]))})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON: numbers that are not finite are None."""
        rows = [_finite(asdict(row)) | {"share_of_limit": _finite(row.share)} for row in self.rows]
        return {
            "passed": self.passed,
            "max_error": _finite(self.max_error),
            "worst": {"arm": self.worst.arm, "layout": self.worst.layout},
            "verdicts": {arm: self.verdict(arm) for arm in self.arms},
            "reasons": {arm: self.reasons(arm) for arm in self.arms},
            "model": self.model,
            "settings": self.settings,
            "facts": self.facts,
            "versions": self.versions,
            "rows": rows,
        }

    def save(self, folder: str | Path) -> None:
        """Write report.json and report.html."""
        from hf_ga.check.html import full_page

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", self.to_dict())
        (folder / "report.html").write_text(full_page(self))

    def __str__(self) -> str:
        lines = [self.summary()]
        for arm in self.arms:
            lines += [self.verdict(arm), *(f"  because of {reason}" for reason in self.reasons(arm))]
        return "\n".join([*lines, "", *table_lines(self.rows), "", *self.facts])

    def _repr_html_(self) -> str:
        from hf_ga.check.html import fragment

        return fragment(self)


HEADER = ["arm", "layout", "micro-batches", "loss", "error", "limit", "cosine", "norm ratio", "worst parameter", "step", "verdict"]


def cells(row: Row) -> list[str]:
    """A row of the table, in words and rounded numbers."""
    if row.refused is not None:
        return [row.arm, row.layout, sizes_text(row.micro_batches), *["-"] * 7, "refused"]
    return [
        row.arm,
        row.layout,
        sizes_text(row.micro_batches),
        "-" if row.loss is None else f"{row.loss:.6f}",
        f"{row.error:.1e}",
        f"{row.limit:.1e}",
        f"{row.cosine:.6f}",
        f"{row.norm_ratio:.4f}",
        f"{row.worst_share:.2g} x limit",
        f"{row.update_error:.1e}",
        "passed" if row.passed else "FAILED",
    ]


def table_lines(rows: Sequence[Row]) -> list[str]:
    """An aligned table for a terminal."""
    table = [HEADER, *map(cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def sizes_text(sizes: Sequence[int]) -> str:
    """Sizes of micro-batches, equal ones together: `4 x 16`, `12 + 4`.

    >>> sizes_text([1, 1, 1]), sizes_text([12, 4])
    ('3 x 1', '12 + 4')
    """
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(map(str, sizes[:6])) + (" + ..." if len(sizes) > 6 else "")


def _same(cause: Cause, other: Cause) -> bool:
    return (cause.name, cause.text) == (other.name, other.text)


def _finite(value: Any) -> Any:
    """NaN and infinities are no JSON."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list) else value
