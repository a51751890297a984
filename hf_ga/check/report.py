"""The results of a check: verdicts, reasons and figures, as text, dict and HTML."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from hf_ga.check.rows import OURS, Cause, Row
from hf_ga.errors import MissingPackage
from hf_ga.recovery.files import write_json, write_text

HEAD = (
    '<meta charset="utf-8"><meta name="color-scheme" content="light"><title>Equivalence '
    "report</title>"
)
COLORS = ("#1a7f4b", "#c0392b", "#d98200", "#6a4fb3", "#2471a3", "#7f8c8d")  # of the arms, in order
# The range of the plot.
SMALLEST = 1e-9
LARGEST = 1e3


@dataclass(repr=False)
class EquivalenceReport:
    """The result of `check_equivalence`.

    Attributes:
        model: Name of the model's class.
        rows: Arm by arm, layout by layout.
        facts: Sentences on how the check was run.
        settings: Precision, seed and the like.
        versions: Of the libraries.

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
        """The largest relative error of a gradient over all parameters together; inf if an arm is
        unsupported.
        """
        return max(row.error for row in self.rows)

    @property
    def worst(self) -> Row:
        """The row that is farthest above its limit, or nearest to it."""
        return max(self.rows, key=lambda row: (not row.passed, row.share))

    def arm(self, name: str) -> "EquivalenceReport":
        """Return the report of one arm."""
        return replace(self, rows=[row for row in self.rows if row.arm == name])

    def causes(self, arm: str = OURS) -> dict[Cause, list[str]]:
        """Return why an arm differs -> the layouts with this cause; empty if it passed."""
        found: dict[Cause, list[str]] = {}
        for row in self.arm(arm).rows:
            for cause in row.causes:
                found.setdefault(cause, []).append(row.layout)
        return found

    def verdict(self, arm: str) -> str:
        """Describe an arm's result in one sentence."""
        part = self.arm(arm)
        failed = [row for row in part.rows if not row.passed]
        if not failed:
            error = f"largest relative error {part.max_error:.1e}"
            return (
                f"passed, same gradient as the full batch in all {len(part.rows)} layouts ({error})"
            )
        for row in failed:
            if row.refused:
                return f"refused: {row.refused}"
        worst = part.worst
        return (
            f"FAILED in {len(failed)} of {len(part.rows)} layouts: {worst.layout} has a relative "
            f"error of {worst.error:.1e}, the limit is {worst.limit:.1e}"
        )

    def reasons(self, arm: str) -> list[str]:
        """Describe why an arm differs, one line per cause, with its layouts."""
        lines = []
        for cause, layouts in self.causes(arm).items():
            where = ", ".join(layouts)
            seen = f"; {cause.seen}" if cause.seen else ""
            lines.append(f"{cause.name}: {cause.text} ({where}{seen})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, ready for JSON: numbers that are not finite are None."""
        values = {
            "passed": self.passed,
            "max_error": self.max_error,
            "worst": {"arm": self.worst.arm, "layout": self.worst.layout},
            "verdicts": {arm: self.verdict(arm) for arm in self.arms},
            "reasons": {arm: self.reasons(arm) for arm in self.arms},
            **asdict(self),
            "rows": [asdict(row) | {"share_of_limit": row.share} for row in self.rows],
        }
        return json.loads(json.dumps(values), parse_constant=lambda name: None)

    def save(self, folder: str | Path) -> None:
        """Write report.json and report.html."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", self.to_dict())
        page = (
            "<!DOCTYPE html><html "
            f'lang="en"><head>{HEAD}</head><body>{self._repr_html_()}</body></html>\n'
        )
        write_text(folder / "report.html", page)

    def __repr__(self) -> str:
        lines = [self.model]
        for arm in self.arms:
            lines += [
                f"{arm}: {self.verdict(arm)}",
                *(f"  cause: {reason}" for reason in self.reasons(arm)),
            ]
        return "\n".join([*lines, "", *table_lines(self.rows), "", *self.facts])

    def _repr_html_(self) -> str:
        plot = ""
        if any(row.refused is None for row in self.rows):
            try:
                plot = f'<img alt="relative error by layout" src="{_plot(self.rows)}">'
            except MissingPackage as error:  # the figures are worth reading without it
                plot = f"<p>{escape(str(error))}</p>"
        return (
            '<div style="color: black; background: white; overflow-x: '
            f'auto"><pre>{escape(str(self))}</pre>{plot}</div>'
        )


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Align the rows in a table for a terminal."""
    table = [list(rows[0].cells()), *(list(row.cells().values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _plot(rows: Sequence[Row]) -> str:
    """Plot of the relative error of every arm in every layout, with the limits, as a data URL.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    # Imported late: it takes 0.7 s, and most processes draw nothing.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingPackage(
            'the plot of this report needs matplotlib: pip install "hf_ga[finetune]".'
        ) from error

    layouts = list(dict.fromkeys(row.layout for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows))
    figure = Figure(figsize=(9.2, 1.1 + 0.52 * len(layouts)), layout="constrained")
    axes = figure.subplots()
    for index, arm in enumerate(arms):
        own = [row for row in rows if row.arm == arm and row.refused is None]
        heights = [layouts.index(row.layout) + 0.16 * (index - (len(arms) - 1) / 2) for row in own]
        # A logarithmic axis cannot show 0 and non-finite values.
        errors = np.clip(np.nan_to_num([row.error for row in own], nan=LARGEST), SMALLEST, LARGEST)
        label = arm if own else f"{arm} (refused)"
        axes.scatter(
            errors, heights, s=58, color=COLORS[index % len(COLORS)], label=label, zorder=3
        )
    for height, layout in enumerate(layouts):
        limits = [row.limit for row in rows if row.layout == layout and row.refused is None]
        if limits:
            label = "limit" if height == 0 else None
            axes.vlines(
                max(limits), height - 0.4, height + 0.4, color="black", linewidth=2, label=label
            )
    axes.set(
        xscale="log",
        xlabel="relative error of the gradient (right of the black line: differs from the full "
        "batch)",
    )
    axes.set_yticks(range(len(layouts)), layouts)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="major")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
