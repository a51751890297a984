"""Printed facts of a run, metrics.jsonl, and the plot of its curves."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
from accelerate import Accelerator
from transformers.utils import logging

from hf_ga.parallel.processes import print_on_main
from hf_ga.recovery.files import SUFFIX, flush
from hf_ga.recovery.write_errors import writing


class MetricsFile:
    """metrics.jsonl: one JSON object per line, flushed. A resumed run truncates it to `size` bytes.

    Without a path (all processes except the main one) nothing is written.

    Args:
        size: bytes to keep on resume.
    """

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self.path, self.size = path, 0
        if path is not None:
            with writing(path, path.parent):
                path.touch()
                self.size = path.read_bytes()[:size].rfind(b"\n") + 1  # whole lines
                os.truncate(path, self.size)

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises:
            CheckpointError: the write failed; no partial line is left.
        """
        if self.path is None:
            return
        with writing(self.path, self.path.parent):
            try:
                with self.path.open("a") as file:
                    file.write(json.dumps(values) + "\n")
            except OSError:
                os.truncate(self.path, self.size)
                raise
        self.size = self.path.stat().st_size


def silence_other_ranks(accelerator: Accelerator) -> None:
    """Show the libraries' progress bars and warnings on the main process only."""
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def print_fact(accelerator: Accelerator, name: str, *lines: Any) -> None:
    """Print aligned lines under one name, on the main process."""
    for i, line in enumerate(lines):
        print_on_main(accelerator, f"{'' if i else name:<11}{line}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_curves(metrics: list[dict[str, Any]], path: Path) -> None:
    """Plot the training loss by optimizer step, and measured validation losses, as a PNG."""
    from matplotlib.figure import Figure  # imported late: takes 0.7 s, and most processes draw nothing

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
