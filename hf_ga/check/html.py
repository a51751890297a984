"""A check's report as HTML: verdict first, then reasons, plots and the table. One file, nothing is loaded from elsewhere."""

import base64
import io
import json
import re
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from hf_ga.check.report import HEADER, EquivalenceReport, Row, cells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1a7f4b", "#c0392b", "#d98200", "#6a4fb3", "#2471a3", "#7f8c8d")  # of the arms, in order
SMALLEST, LARGEST = 1e-9, 1e3  # the range of the plots
_STYLE = """
.hfga { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #ffffff; }
.hfga { max-width: 1120px; margin: 0 auto; padding: 8px 16px; }
.hfga h1 { font-size: 24px; margin: 12px 0 4px; } .hfga h2 { font-size: 17px; margin: 26px 0 8px; }
.hfga .arm { border-left: 6px solid; border-radius: 4px; padding: 8px 14px; margin: 10px 0; }
.hfga .good { border-color: #1a7f4b; background: #eaf6ef; } .hfga .bad { border-color: #c0392b; background: #fdf0ee; }
.hfga ul { margin: 4px 0 0; padding-left: 20px; } .hfga li { margin: 2px 0; } .hfga li i, .hfga .note { color: #5b6670; }
.hfga table { border-collapse: collapse; font-size: 13px; width: 100%; font-variant-numeric: tabular-nums; }
.hfga th { text-align: left; border-bottom: 2px solid #9aa5ae; padding: 4px 8px; color: #1c2126; background: #ffffff; }
.hfga td { border-bottom: 1px solid #dfe4e8; padding: 4px 8px; white-space: nowrap; text-align: left; }
.hfga td { color: #1c2126; background: #ffffff; } .hfga tr.first td { border-top: 2px solid #9aa5ae; }
.hfga td.good { color: #14663c; background: #eaf6ef; font-weight: 600; }
.hfga td.bad { color: #a93226; background: #fdf0ee; font-weight: 600; }
.hfga img { max-width: 100%; display: block; margin: 4px 0; }
.hfga details { margin-top: 18px; } .hfga pre { font-size: 12px; white-space: pre-wrap; }
"""


def full_page(report: EquivalenceReport) -> str:
    """The whole of report.html."""
    body = [
        *_head(report),
        *_sections(report),
        f"<h2>All figures</h2>{_table(report.rows)}",
        _legend(),
        f"<details><summary>Settings and versions</summary><pre>{escape(_settings(report))}</pre></details>",
    ]
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(report.summary())}</title>'
        f'<meta name="color-scheme" content="light"><style>body {{ background: #ffffff; margin: 0; }}{_STYLE}</style></head>'
        f'<body><main class="hfga">{"".join(body)}</main></body></html>\n'
    )


def fragment(report: EquivalenceReport) -> str:
    """What a notebook shows: verdict, reasons, one plot, the table."""
    body = [*_head(report), *_sections(report)[:1], _table(report.rows)]
    return f'<div class="hfga"><style>{_STYLE}</style>{"".join(body)}</div>'


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: its name up to the first number, or without its last part.

    >>> layer_of("bert.encoder.layer.3.output.dense.weight"), layer_of("classifier.bias")
    ('bert.encoder.layer.3', 'classifier')
    """
    numbered = re.match(r"(.*?\.\d+)(\.|$)", parameter)
    return numbered.group(1) if numbered else parameter.rpartition(".")[0] or parameter


def layer_errors(row: Row) -> dict[str, float]:
    """L2 norm of the error of each layer, relative to the norm of the whole gradient, in the model's order."""
    squares: dict[str, float] = {}
    for name, error in row.parameter_errors.items():
        squares[layer_of(name)] = squares.get(layer_of(name), 0.0) + error**2
    return {layer: float(np.sqrt(square)) for layer, square in squares.items()}


def _head(report: EquivalenceReport) -> list[str]:
    head = [f"<h1>{escape(report.model)}: is every split of a window the full batch?</h1>"]
    for arm in report.arms:
        reasons = "".join(f"<li>{_reason(line)}</li>" for line in report.reasons(arm))
        kind = "good" if report.arm(arm).passed else "bad"
        listed = f"<ul>{reasons}</ul>" if reasons else ""
        verdict = report.verdict(arm)
        name, _, rest = verdict.partition(": ")
        head.append(f'<div class="arm {kind}"><b>{escape(name)}</b>: {escape(rest)}{listed}</div>')
    facts = "; ".join(report.facts)
    return [*head, f'<p class="note">{escape(facts)}.</p>']


def _reason(line: str) -> str:
    name, _, text = line.partition(": ")
    text, _, where = text.rpartition(" (")
    return f"<b>{escape(name)}</b>: {escape(text)} <i>({escape(where)}</i>"


def _table(rows: list[Row]) -> str:
    lines, previous = [], None
    for row in rows:
        values = cells(row)
        kind = "good" if row.passed else "bad"
        inner = "".join(f"<td>{escape(value)}</td>" for value in values[:-1]) + f'<td class="{kind}">{escape(values[-1])}</td>'
        lines.append(f'<tr class="{"first" if row.arm != previous else ""}">{inner}</tr>')
        previous = row.arm
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADER)
    return '<div style="overflow-x: auto">' + f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _legend() -> str:
    words = {
        "error": "L2 distance of the gradient from the truth, over all parameters together, relative to the truth's norm",
        "limit": "twice the distance of the full batch in the same precision, plus 1e-6",
        "worst parameter": "the largest error of one parameter as a share of its own limit (floor taken of the norm over all)",
        "norm ratio": "1 is right",
        "step": "relative error of what one optimizer step adds to the weights; AdamW amplifies rounding of gradients near zero",
    }
    return f'<p class="note">{escape("; ".join(f"{name}: {text}" for name, text in words.items()))}.</p>'


def _sections(report: EquivalenceReport) -> list[str]:
    """The plots, by layout and by layer; none where every arm refused."""
    sections = []
    if any(row.refused is None for row in report.rows):
        sections.append(f'<h2>Error by layout</h2><img alt="error by layout" src="{_layout_plot(report)}">')
    if any(row.parameter_errors for row in report.rows):
        title = "Error by layer (each arm in its worst layout)"
        sections.append(f'<h2>{title}</h2><img alt="error by layer" src="{_layer_plot(report)}">')
    return sections


def _layout_plot(report: EquivalenceReport) -> str:
    """Error of every arm in every layout, and the limits."""
    layouts = list(dict.fromkeys(row.layout for row in report.rows))
    figure, axes = _figure(9.2, 1.1 + 0.52 * len(layouts))
    for index, arm in enumerate(report.arms):
        rows = [row for row in report.rows if row.arm == arm and row.refused is None]
        heights = [layouts.index(row.layout) + 0.16 * (index - (len(report.arms) - 1) / 2) for row in rows]
        color, label = COLORS[index % len(COLORS)], arm if rows else f"{arm} (refused)"
        axes.scatter(_shown([row.error for row in rows]), heights, s=58, color=color, label=label, zorder=3)
    for height, layout in enumerate(layouts):
        limits = [row.limit for row in report.rows if row.layout == layout and row.refused is None]
        if limits:
            label = "limit" if height == 0 else None
            axes.vlines(max(limits), height - 0.4, height + 0.4, color="black", linewidth=2, label=label)
    axes.set(xscale="log", xlabel="relative error of the gradient (right of the black line: not the full batch)")
    axes.set_yticks(range(len(layouts)), layouts)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="major")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _as_png(figure)


def _layer_plot(report: EquivalenceReport) -> str:
    """For each arm the errors of the layers in its worst layout, and the limit of one parameter."""
    figure, axes = _figure(9.2, 4.4)
    layers: list[str] = []
    limits: dict[str, float] = {}
    for index, arm in enumerate(report.arms):
        rows = [row for row in report.arm(arm).rows if row.parameter_errors]
        if rows:
            worst = max(rows, key=lambda row: (not row.passed, row.share))
            errors = layer_errors(worst)
            layers = list(errors)
            label, color = f"{arm}: {worst.layout}", COLORS[index % len(COLORS)]
            axes.plot(range(len(layers)), _shown(list(errors.values())), "o-", color=color, label=label, markersize=5)
            limits = layer_errors(Row(arm, "", [], 0, parameter_errors=worst.parameter_limits))
    axes.plot(range(len(layers)), _shown(list(limits.values())), "--", color="black", linewidth=1, label="limit")
    axes.set(yscale="log", ylabel="error, relative to the gradient's norm")
    axes.set_xticks(range(len(layers)), _short(layers), rotation=45, ha="right", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return _as_png(figure)


def _short(layers: list[str]) -> list[str]:
    """Without the first word where all but the head share it (`bert.encoder.layer.0`), and not too long."""
    first = max((layer.partition(".")[0] for layer in layers), key=[layer.partition(".")[0] for layer in layers].count, default="")
    cut = [layer.removeprefix(f"{first}.") for layer in layers]
    return [layer if len(layer) <= 28 else "..." + layer[-26:] for layer in cut]


def _shown(values: list[float]) -> list[float]:
    """Within the plot: an exact 0 and what is not finite have no place on a logarithmic axis."""
    return [float(np.clip(np.nan_to_num(value, nan=LARGEST), SMALLEST, LARGEST)) for value in values]


def _figure(*size: float) -> tuple["Figure", "Axes"]:
    """An empty plot of that width and height in inches."""
    from matplotlib.figure import Figure  # here, as it takes 0.7 s and most processes draw nothing

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _as_png(figure: "Figure") -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _settings(report: EquivalenceReport) -> str:
    return json.dumps({"settings": report.settings, "versions": report.versions}, indent=2)
