"""A check's report as one self-contained HTML file: its text and a plot."""

import base64
import io
from collections.abc import Sequence
from html import escape

import numpy as np

from hf_ga.check.rows import Row

COLORS = ("#1a7f4b", "#c0392b", "#d98200", "#6a4fb3", "#2471a3", "#7f8c8d")  # of the arms, in order
SMALLEST, LARGEST = 1e-9, 1e3  # the range of the plot


def render(text: str, rows: Sequence[Row]) -> str:
    """The report for a notebook. text: `str()` of the report."""
    plot = f'<img alt="relative error by layout" src="{_plot(rows)}">' if any(row.refused is None for row in rows) else ""
    return f'<div style="color: black; background: white; overflow-x: auto"><pre>{escape(text)}</pre>{plot}</div>'


def render_page(text: str, rows: Sequence[Row]) -> str:
    """The complete report.html."""
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light"><title>Equivalence report</title>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{render(text, rows)}</body></html>\n'


def _plot(rows: Sequence[Row]) -> str:
    """Plot of the relative error of every arm in every layout, with the limits, as a data URL."""
    from matplotlib.figure import Figure  # imported late: takes 0.7 s, and most processes draw nothing

    layouts, arms = (list(dict.fromkeys(names)) for names in zip(*((row.layout, row.arm) for row in rows), strict=True))
    figure = Figure(figsize=(9.2, 1.1 + 0.52 * len(layouts)), layout="constrained")
    axes = figure.subplots()
    for index, arm in enumerate(arms):
        own = [row for row in rows if row.arm == arm and row.refused is None]
        heights = [layouts.index(row.layout) + 0.16 * (index - (len(arms) - 1) / 2) for row in own]
        # A logarithmic axis cannot show 0 and non-finite values.
        errors = np.clip(np.nan_to_num([row.error for row in own], nan=LARGEST), SMALLEST, LARGEST)
        label = arm if own else f"{arm} (refused)"
        axes.scatter(errors, heights, s=58, color=COLORS[index % len(COLORS)], label=label, zorder=3)
    for height, layout in enumerate(layouts):
        if limits := [row.limit for row in rows if row.layout == layout and row.refused is None]:
            label = "limit" if height == 0 else None
            axes.vlines(max(limits), height - 0.4, height + 0.4, color="black", linewidth=2, label=label)
    axes.set(xscale="log", xlabel="relative error of the gradient (right of the black line: differs from the full batch)")
    axes.set_yticks(range(len(layouts)), layouts)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="major")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
