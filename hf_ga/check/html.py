"""A check's report as HTML: verdict first, then reasons, the plot and the table. One file, nothing is loaded from elsewhere."""

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import Template

from hf_ga.check.rows import Row

COLORS = ("#1a7f4b", "#c0392b", "#d98200", "#6a4fb3", "#2471a3", "#7f8c8d")  # of the arms, in order
SMALLEST, LARGEST = 1e-9, 1e3  # the range of the plot
TEMPLATE = Template(
    """<div class="hfga"><style>
.hfga { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #ffffff; max-width: 1120px; margin: auto; padding: 8px; }
.hfga .arm { border-left: 6px solid; padding: 8px 14px; margin: 10px 0; }
.hfga .good { color: #14663c; background: #eaf6ef; } .hfga .bad { color: #a93226; background: #fdf0ee; }
.hfga li, .hfga summary, .hfga p { color: #3d464e; }
.hfga table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.hfga th, .hfga td { text-align: left; white-space: nowrap; padding: 4px 8px; border-bottom: 1px solid #dfe4e8; }
.hfga img { max-width: 100%; }
</style>
<h1>{{ model }}: is every split of a window the full batch?</h1>
{% for arm, verdict in verdicts.items() %}
<div class="arm {{ "good" if verdict.startswith("passed") else "bad" }}"><b>{{ arm }}</b>: {{ verdict }}
<ul>{% for reason in reasons[arm] %}<li>{{ reason }}</li>{% endfor %}</ul></div>
{% endfor %}
<p>{{ facts | join("; ") }}.</p>
{% if plot %}<h2>Relative error by layout</h2><img alt="relative error by layout" src="{{ plot }}">{% endif %}
<div style="overflow-x: auto"><table>
<tr>{% for name in table[0] %}<th>{{ name }}</th>{% endfor %}</tr>
{% for cells in table %}
<tr>{% for name, text in cells.items() %}
<td{% if name == "verdict" %} class="{{ "good" if text == "passed" else "bad" }}"{% endif %}>{{ text }}</td>
{% endfor %}</tr>
{% endfor %}
</table></div>
<p>relative error: ||g - g64|| / ||g64|| over all parameters together; limit: twice that of the full batch in the same precision,
plus 1e-6; worst parameter: the largest error of one parameter as a share of its own limit (floor taken of the norm over all).</p>
<details><summary>Settings and versions</summary><pre>{{ details }}</pre></details></div>
""",
    autoescape=True,
    trim_blocks=True,
)


def render(report: dict[str, Any], rows: Sequence[Row]) -> str:
    """What a notebook shows. report: `EquivalenceReport.to_dict()`."""
    details = json.dumps({"settings": report["settings"], "versions": report["versions"]}, indent=2)
    plot = _plot(rows) if any(row.refused is None for row in rows) else ""
    return TEMPLATE.render(report, table=[row.cells() for row in rows], plot=plot, details=details)


def render_page(report: dict[str, Any], rows: Sequence[Row]) -> str:
    """The whole of report.html."""
    head = '<meta charset="utf-8"><meta name="color-scheme" content="light"><title>Equivalence report</title>'
    body = f'<body style="background: #ffffff">{render(report, rows)}</body>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head>{body}</html>\n'


def _plot(rows: Sequence[Row]) -> str:
    """Relative error of every arm in every layout, and the limits, as the address of an image."""
    from matplotlib.figure import Figure  # here, as it takes 0.7 s and most processes draw nothing

    layouts, arms = (list(dict.fromkeys(names)) for names in zip(*((row.layout, row.arm) for row in rows), strict=True))
    figure = Figure(figsize=(9.2, 1.1 + 0.52 * len(layouts)), layout="constrained")
    axes = figure.subplots()
    for index, arm in enumerate(arms):
        own = [row for row in rows if row.arm == arm and row.refused is None]
        heights = [layouts.index(row.layout) + 0.16 * (index - (len(arms) - 1) / 2) for row in own]
        # An exact 0 and what is not finite have no place on a logarithmic axis.
        errors = np.clip(np.nan_to_num([row.error for row in own], nan=LARGEST), SMALLEST, LARGEST)
        label = arm if own else f"{arm} (refused)"
        axes.scatter(errors, heights, s=58, color=COLORS[index % len(COLORS)], label=label, zorder=3)
    for height, layout in enumerate(layouts):
        if limits := [row.limit for row in rows if row.layout == layout and row.refused is None]:
            label = "limit" if height == 0 else None
            axes.vlines(max(limits), height - 0.4, height + 0.4, color="black", linewidth=2, label=label)
    axes.set(xscale="log", xlabel="relative error of the gradient (right of the black line: not the full batch)")
    axes.set_yticks(range(len(layouts)), layouts)
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x", which="major")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
