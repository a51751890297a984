"""Printed settings and results of a run, metrics.jsonl, and the plot of its curves."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator

from hf_ga.parallel.processes import print_on_main
from hf_ga.recovery.files import SUFFIX, flush, writing


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


def print_fact(accelerator: Accelerator, name: str, *lines: Any) -> None:
    """Print aligned lines under one name, on the main process."""
    for i, line in enumerate(lines):
        print_on_main(accelerator, f"{'' if i else name:<11}{line}")


def print_results(accelerator: Accelerator, results: Mapping[str, Any]) -> None:
    """Print a table of losses and metrics on the main process: a row for each split, a column for
    each metric.

    Args:
        results: with keys such as `train_loss`, `eval_loss`, `test_accuracy`.
    """
    measured = [k.partition("_")[2] for k in results if k.startswith(("eval_", "test_"))]
    names = [name for name in dict.fromkeys(measured) if name != "num_targets"]
    widths = {name: max(12, len(name) + 2) for name in names}
    print_on_main(
        accelerator, f"{'results':<12}" + "".join(f"{name:>{widths[name]}}" for name in names)
    )
    for split, prefix in (("last step", "train_"), ("validation", "eval_"), ("test", "test_")):
        cells = [
            f"{results[prefix + name]:>{widths[name]}.4f}"
            for name in names
            if results.get(prefix + name) is not None
        ]
        if cells:  # of the last step there is only the loss, which comes first
            print_on_main(accelerator, f"  {split:<10}" + "".join(cells))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_curves(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot as a PNG by optimizer step: the loss of each window and its moving mean, validation
    losses, and the learning rate.
    """
    from matplotlib.figure import (
        Figure,
    )  # imported late: takes 0.7 s, and most processes draw nothing

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    steps, losses, rates = (
        np.array([[m["step"], m["loss"], m["learning_rate"]] for m in metrics if not m["skipped"]])
        .reshape(-1, 3)
        .T
    )
    radius = len(losses) // 40
    ends = [
        min(radius, i, len(losses) - 1 - i) for i in range(len(losses))
    ]  # less at both ends, where it would be biased
    smooth = [losses[i - r : i + r + 1].mean() for i, r in enumerate(ends)]
    upper.plot(
        steps, losses, color="tab:blue", alpha=0.4, linewidth=1, label="training, each window"
    )
    upper.plot(
        steps,
        smooth,
        color="tab:blue",
        linewidth=2,
        label=f"training, mean of {2 * radius + 1} windows",
    )
    measured = [(line["step"], line["eval_loss"]) for line in metrics if "eval_loss" in line]
    if measured:
        upper.plot(
            *zip(*measured, strict=True),
            color="tab:orange",
            linewidth=1.5,
            marker="o",
            label="validation",
        )
    lower.plot(steps, rates, color="tab:gray")
    upper.set(title=title, ylabel="loss (nats per target)")
    lower.set(xlabel="optimizer step", ylabel="learning rate")
    lower.set_ylim(bottom=0)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    upper.legend()
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    beside = path.with_name(path.name + SUFFIX)
    figure.savefig(beside, dpi=120, format=path.suffix[1:])
    flush(beside)
    beside.replace(path)
