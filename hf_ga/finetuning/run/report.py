"""What a run reports: printed settings and results, metrics.jsonl, and the plot of its curves."""

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
    """The file metrics.jsonl: one JSON object per line, flushed.

    Args:
        path: The file. None: nothing is written, as on all processes except the main one.
        size: Bytes of an existing file to keep, which a resumed run knows from its checkpoint.

    Attributes:
        path: The file, or None.
        size: Its size in bytes.
    """

    def __init__(self, path: Path | None, size: int = 0) -> None:
        self.path = path
        self.size = 0
        if path is not None:
            with writing(path, path.parent):
                path.touch()
                kept = path.read_bytes()[:size]
                # Whole lines only.
                self.size = kept.rfind(b"\n") + 1
                os.truncate(path, self.size)

    def write(self, **values: Any) -> None:
        """Append one line.

        Raises:
            CheckpointError: If the write fails; no partial line is left.
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
    """Print aligned lines under one name, on the main process.

    Args:
        accelerator: The accelerator of the run.
        name: Printed before the first line.
        lines: Printed one below the other.
    """
    for i, line in enumerate(lines):
        heading = name if i == 0 else ""
        print_on_main(accelerator, f"{heading:<11}{line}")


def print_results(accelerator: Accelerator, results: Mapping[str, Any]) -> None:
    """Print a table of losses and metrics on the main process: a row for each split, a column for
    each metric.

    Args:
        accelerator: The accelerator of the run.
        results: Name -> number, with names such as `train_loss`, `eval_loss`, `test_accuracy`.
    """
    measured = [key.partition("_")[2] for key in results if key.startswith(("eval_", "test_"))]
    names = [name for name in dict.fromkeys(measured) if name != "num_targets"]
    widths = {name: max(12, len(name) + 2) for name in names}
    headings = "".join(f"{name:>{widths[name]}}" for name in names)
    print_on_main(accelerator, f"{'results':<12}{headings}")
    for split, prefix in (("last step", "train_"), ("validation", "eval_"), ("test", "test_")):
        # Of the last step there is only the loss, which comes first.
        cells = [
            f"{results[prefix + name]:>{widths[name]}.4f}"
            for name in names
            if results.get(prefix + name) is not None
        ]
        if cells:
            print_on_main(accelerator, f"  {split:<10}" + "".join(cells))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def plot_curves(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot the loss of each window and its moving mean, the validation losses and the learning rate
    by optimizer step.

    Args:
        metrics: The lines of metrics.jsonl.
        path: The PNG file to write.
        title: The title of the figure.
    """
    # Imported late: it takes 0.7 s, and most processes draw nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    trained = [line for line in metrics if not line["skipped"]]
    steps = [line["step"] for line in trained]
    losses = np.array([line["loss"] for line in trained], float)
    rates = [line["learning_rate"] for line in trained]
    radius = len(losses) // 40
    smooth = _moving_mean(losses, radius)
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
    evaluated = [line for line in metrics if "eval_loss" in line]
    if evaluated:
        upper.plot(
            [line["step"] for line in evaluated],
            [line["eval_loss"] for line in evaluated],
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


def _moving_mean(values: np.ndarray, radius: int) -> list[float]:
    """Average each value with `radius` neighbors on both sides; with fewer at both ends, where a
    mean over one side only would be biased.
    """
    means = []
    for i in range(len(values)):
        own_radius = min(radius, i, len(values) - 1 - i)
        means.append(values[i - own_radius : i + own_radius + 1].mean())
    return means
