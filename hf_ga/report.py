"""What a run leaves to read: metrics.jsonl, summary.json, a plot of the curves."""

import json
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


class MetricsFile:
    """metrics.jsonl: one JSON object a line, flushed at once. `size` (bytes) lets a resumed run cut what it will write again.

    Without a path nothing is written: on all processes but one.
    """

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self.path, self._file = path, None
        if path is not None:
            path.touch()
            os.truncate(path, min(size, path.stat().st_size))  # beyond its end it would be filled with zero bytes
            self._file = path.open("a")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path is not None else 0

    def write(self, **values: Any) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(values, indent=2) + "\n")
    beside.replace(path)


def plot_curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training loss by optimizer step and validation loss where it was measured, as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, marker in (("loss", "training loss", ""), ("eval_loss", "validation loss", "o")):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, linewidth=1 if not marker else 2, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per target)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
