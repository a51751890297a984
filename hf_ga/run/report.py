"""What a run leaves to read: metrics.jsonl, summary.json, a plot of the curves."""

import json
import os
from pathlib import Path
from typing import Any

from hf_ga.recovery.files import SUFFIX, flush
from hf_ga.recovery.write_errors import writing


class MetricsFile:
    """metrics.jsonl: one JSON object a line, written at once. `size` (bytes) lets a resumed run cut what it will write again.

    Without a path nothing is written: on all processes but one.

    Args:
        size: what a resumed run keeps, or whole lines of it where the file is shorter.
    """

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self.path, self._descriptor = path, None
        if path is None:
            return
        with writing(path, path.parent):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            kept = path.read_bytes()[:size]
            whole = kept.rfind(b"\n") + 1
            os.ftruncate(self._descriptor, whole)
        if whole < size:
            print(f"{path} has only {whole:,} of the {size:,} bytes that it had at the checkpoint: some lines are missing")

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path is not None else 0

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises:
            CheckpointError: it cannot be written; no half of it is left.
        """
        if self.path is None or self._descriptor is None:
            return
        size, line = self.size, (json.dumps(values) + "\n").encode()
        with writing(self.path, self.path.parent):
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            finally:
                if line:
                    os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Training loss by optimizer step and validation loss where it was measured, as a PNG."""
    from matplotlib.figure import Figure  # here: it takes 0.7 s, at the start of every process that draws nothing

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
    beside = path.with_name(path.name + SUFFIX)
    figure.savefig(beside, dpi=120, format=path.suffix[1:])
    flush(beside)
    beside.replace(path)
