"""The results of a check: verdicts, reasons and figures, as text, dict and HTML."""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hf_ga.check.verdict.rows import OURS, Cause, ReportRow
from hf_ga.recovery.files import write_json, write_text

HTML_HEAD = (
    '<meta charset="utf-8"><meta name="color-scheme" content="light"><title>Equivalence '
    "report</title>"
)
# Relative errors outside this range are drawn at its ends.
PLOT_MIN_ERROR = 1e-9
PLOT_MAX_ERROR = 1e3


@dataclass(repr=False)
class EquivalenceReport:
    """The result of `check_equivalence`: whether the gradient of each arm (training step under
    test) equals the full batch's in each layout, and why not.

    Attributes:
        model: Name of the model's class.
        rows: One row for each arm and layout, ordered by arm.
        facts: Sentences that describe how the check was run.
        settings: The check's precision, seed, max_grad_norm and num_samples.
        versions: Versions of the libraries by name.

    Example:
        report = check_equivalence(model, samples, collate_fn)
        assert report.passed, report
        report.save("outputs/check")        # report.json and report.html
    """

    model: str
    rows: list[ReportRow]
    facts: list[str]
    settings: dict[str, Any]
    versions: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether every arm (training step under test) passed in every layout."""
        return all(row.passed for row in self.rows)

    @property
    def arms(self) -> list[str]:
        """Names of the arms (training steps under test), in the order of the rows."""
        return list(dict.fromkeys(row.arm for row in self.rows))

    @property
    def max_error(self) -> float:
        """The largest relative error of a gradient, over all parameters together; inf if an arm
        (training step under test) was refused.
        """
        return max(row.error for row in self.rows)

    @property
    def worst(self) -> ReportRow:
        """Of the failed rows, or else of all, the one with the largest error by its limit."""
        return max(self.rows, key=lambda row: (not row.passed, row.share))

    def arm(self, name: str) -> "EquivalenceReport":
        """Return a report with the rows of one arm (training step under test) only."""
        return replace(self, rows=[row for row in self.rows if row.arm == name])

    def causes(self, arm: str = OURS) -> dict[Cause, list[str]]:
        """Return why an arm's gradient differs from the full batch's, with the layouts in which
        each cause was found.

        Args:
            arm: Name of the training step under test.

        Returns:
            Cause -> names of the layouts; empty if the arm passed everywhere.
        """
        layouts_of: dict[Cause, list[str]] = {}
        for row in self.arm(arm).rows:
            for cause in row.causes:
                layouts_of.setdefault(cause, []).append(row.layout)
        return layouts_of

    def verdict(self, arm: str) -> str:
        """Describe in one sentence whether an arm (training step under test) passed, was refused or
        failed, with its largest error.
        """
        report = self.arm(arm)
        failed = [row for row in report.rows if not row.passed]
        if not failed:
            return (
                f"passed, same gradient as the full batch in all {len(report.rows)} layouts "
                f"(largest relative error {report.max_error:.1e})"
            )
        for row in failed:
            if row.refused:
                return f"refused: {row.refused}"
        worst = report.worst
        return (
            f"FAILED in {len(failed)} of {len(report.rows)} layouts: {worst.layout} has a relative "
            f"error of {worst.error:.1e}, the limit is {worst.limit:.1e}"
        )

    def reasons(self, arm: str) -> list[str]:
        """Describe why an arm (training step under test) differs, one line per cause, with the
        layouts and the measured values that show it.
        """
        lines = []
        for cause, layouts in self.causes(arm).items():
            layout_names = ", ".join(layouts)
            seen = f"; {cause.seen}" if cause.seen else ""
            lines.append(f"{cause.name}: {cause.text} ({layout_names}{seen})")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the whole equivalence report as a dict that JSON can hold: NaN and infinite
        numbers become None.
        """
        values = {
            "passed": self.passed,
            "max_error": self.max_error,
            "worst": {"arm": self.worst.arm, "layout": self.worst.layout},
            "verdicts": {arm: self.verdict(arm) for arm in self.arms},
            "reasons": {arm: self.reasons(arm) for arm in self.arms},
            **asdict(self),
            "rows": [asdict(row) | {"share_of_limit": row.share} for row in self.rows],
        }
        # json.dumps writes NaN and Infinity, which JSON does not have: read them back as None.
        return json.loads(json.dumps(values), parse_constant=lambda constant: None)

    def save(self, folder: str | Path) -> None:
        """Write an equivalence report as report.json and report.html (text and plot in one file)
        into a folder, which is created if it does not exist.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "report.json", self.to_dict())
        page = (
            "<!DOCTYPE html><html "
            f'lang="en"><head>{HTML_HEAD}</head><body>{self._repr_html_()}</body></html>\n'
        )
        write_text(folder / "report.html", page)

    def __repr__(self) -> str:
        """Return the report as text: verdicts and causes, the table, how the check was run."""
        lines = [self.model]
        for arm in self.arms:
            lines += [
                f"{arm}: {self.verdict(arm)}",
                *(f"  cause: {reason}" for reason in self.reasons(arm)),
            ]
        return "\n".join([*lines, "", *table_lines(self.rows), "", *self.facts])

    def _repr_html_(self) -> str:
        """Return the text and a plot as HTML, which notebooks display; without the plot if no arm
        ran or matplotlib is missing.
        """
        plot = ""
        if find_spec("matplotlib") is None:
            plot = '<p>the plot of this report needs matplotlib: pip install "hf_ga[finetune]".</p>'
        elif any(row.refused is None for row in self.rows):
            plot = f'<img alt="relative error by layout" src="{_plot(self.rows)}">'
        return (
            '<div style="color: black; background: white; overflow-x: '
            f'auto"><pre>{escape(str(self))}</pre>{plot}</div>'
        )


def table_lines(rows: Sequence[ReportRow]) -> list[str]:
    """Format rows as a text table with aligned columns."""
    table = [list(rows[0].cells()), *(list(row.cells().values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(text.ljust(width) for text, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    ]


def _plot(rows: Sequence[ReportRow]) -> str:
    """Plot the relative error of every arm in every layout, with the limits; return the data URL of
    a PNG image.
    """
    # Imported lazily: it takes 0.7 s, and most processes plot nothing.
    from matplotlib.figure import Figure

    ran = [row for row in rows if row.refused is None]
    layouts = dict.fromkeys(row.layout for row in ran)
    figure = Figure(figsize=(9.2, 1.1 + 0.52 * len(layouts)), layout="constrained")
    axes = figure.subplots()
    for arm in dict.fromkeys(row.arm for row in ran):
        of_arm = [row for row in ran if row.arm == arm]
        # A logarithmic axis cannot show 0 and non-finite values.
        errors = np.nan_to_num([row.error for row in of_arm], nan=PLOT_MAX_ERROR)
        errors = np.clip(errors, PLOT_MIN_ERROR, PLOT_MAX_ERROR)
        axes.plot(errors, [row.layout for row in of_arm], "o", alpha=0.7, label=arm)
    limits = [row.limit for row in ran]
    axes.plot(limits, [row.layout for row in ran], "k|", markersize=24, label="limit")
    axes.set(
        xscale="log",
        xlabel="relative error of the gradient (right of the black line: differs from the full "
        "batch)",
    )
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="major")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
