"""Reports of a fine-tuning run: printed settings and results, the file metrics.jsonl, and the plot
of loss and learning rate.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import Accelerator

from hf_ga.parallel.processes import print_on_main
from hf_ga.recovery.files import SUFFIX, flush, writing


def cut_metrics(path: Path, size: int) -> None:
    """Cut the metrics.jsonl of a fine-tuning run to its first `size` bytes, without an incomplete
    last line: what a run wrote after the checkpoint that it resumes from is dropped. The file is
    created if it does not exist.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    with writing(path, path.parent):
        path.touch()
        kept = path.read_bytes()[:size]
        os.truncate(path, kept.rfind(b"\n") + 1)


def write_metrics(path: Path, line: Mapping[str, Any]) -> int:
    """Append a line, a JSON object, to the metrics.jsonl of a fine-tuning run, and return the size
    of the file in bytes.

    Raises:
        CheckpointError: If the write fails, as on a full disk; no partial line is left.
    """
    with writing(path, path.parent):
        size = path.stat().st_size
        try:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            os.truncate(path, size)
            raise
        return path.stat().st_size


def print_fact(accelerator: Accelerator, name: str, *lines: Any) -> None:
    """Print lines of the log of a fine-tuning run on the main process, aligned in a column, with a
    name in front of the first one.

    Args:
        accelerator: The accelerator of the run.
        name: The name, such as `data` or `precision`.
        lines: The lines; converted to strings.
    """
    for i, line in enumerate(lines):
        heading = name if i == 0 else ""
        print_on_main(accelerator, f"{heading:<11}{line}")


def print_results(accelerator: Accelerator, results: Mapping[str, Any]) -> None:
    """Print a table of a run's losses and metrics on the main process, with a row each for the last
    training step, the validation split and the test split, and a column for each metric. Rows
    without values are omitted.

    Args:
        accelerator: The accelerator of the run.
        results: Name -> number, with names such as `train_loss`, `eval_loss`, `test_accuracy`.
    """
    metrics = [name.partition("_")[2] for name in results if name.startswith(("eval_", "test_"))]
    rows = {"last step": "train_", "validation": "eval_", "test": "test_"}
    # Each metric once, in the order of `results`.
    cells = {
        metric: [results.get(prefix + metric) for prefix in rows.values()]
        for metric in metrics
        if metric != "num_targets"
    }
    table = pd.DataFrame(cells, rows, dtype=float).dropna(how="all")
    text = table.to_string(float_format="{:.4f}".format, na_rep="")
    print_fact(accelerator, "results", *text.splitlines())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the metrics.jsonl of a fine-tuning run: one dict for each line, thus for each window.
    The last line of a run that was killed may be incomplete; it is left out.
    """
    lines = []
    for line in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def describe_world_change(path: Path, step: int, num_processes: int) -> str | None:
    """Return the line that a resumed run prints if it has another number of processes than before.

    Args:
        path: The metrics.jsonl of the run, with the lines that were written before it was resumed.
        step: The optimizer step of the checkpoint from which the run is resumed.
        num_processes: The number of processes now.

    Returns:
        The line, or None if the number is the same, or no window was trained yet.

    Example:
        describe_world_change(path, 8, 1)
        # '2 -> 1 processes after step 11: same updates, resumed at step 8, 3 steps computed again'
    """
    lines = read_metrics(path) if path.exists() else []
    if not lines or lines[-1]["num_processes"] == num_processes:
        return None
    last = lines[-1]
    num_lost = max(0, last["step"] - step)
    unit = "step" if num_lost == 1 else "steps"
    return (
        f"{last['num_processes']} -> {num_processes} processes after step {last['step']}: same "
        f"updates, resumed at step {step}, {num_lost} {unit} computed again"
    )


def plot_curves(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Plot the curves of a fine-tuning run over its optimizer steps, and write them to an image
    file: the training loss of each window, its moving mean, the validation losses and the learning
    rate. A vertical line marks each change of the number of processes.

    Windows that were skipped, without an optimizer step, are not plotted.

    Args:
        metrics: The lines of metrics.jsonl, see `read_metrics`.
        path: The image file to write; its suffix is the format, such as .png.
        title: The title of the figure.
    """
    # Imported here because it takes 0.7 s, and most processes plot nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    loss_axes, rate_axes = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    lines = pd.DataFrame(metrics)
    trained = lines[~lines["skipped"].astype(bool)]
    steps = trained["step"]
    losses = trained["loss"].astype(float)
    loss_axes.plot(steps, losses, color="tab:blue", alpha=0.4, label="training, each window")
    width = 2 * (len(losses) // 40) + 1
    smooth = losses.rolling(width, center=True, min_periods=1).mean()
    loss_axes.plot(steps, smooth, color="tab:blue", label=f"training, mean of {width} windows")
    if "eval_loss" in lines:
        evaluated = lines.dropna(subset="eval_loss")
        loss_axes.plot(
            evaluated["step"], evaluated["eval_loss"], "o-", color="tab:orange", label="validation"
        )
    for before, after in pairwise(trained.itertuples()):
        if before.num_processes != after.num_processes:
            between = (before.step + after.step) / 2
            loss_axes.axvline(between, color="tab:red", linestyle=":")
            text = f"{before.num_processes} -> {after.num_processes} processes"
            loss_axes.annotate(text, (between, 1), xycoords=("data", "axes fraction"))
    rate_axes.plot(steps, trained["learning_rate"], color="tab:gray")
    loss_axes.set(title=title, ylabel="loss (nats per target)")
    rate_axes.set(xlabel="optimizer step", ylabel="learning rate")
    rate_axes.set_ylim(bottom=0)
    loss_axes.legend()
    for axes in (loss_axes, rate_axes):
        axes.grid(alpha=0.3)
    # Written under a temporary name, so that a crash leaves no incomplete image.
    temporary = path.with_name(path.name + SUFFIX)
    figure.savefig(temporary, dpi=120, format=path.suffix[1:])
    flush(temporary)
    temporary.replace(path)
