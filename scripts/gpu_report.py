"""Measure, unattended and in less than ten minutes, all that is to be known on a GPU: `python scripts/gpu_report.py --output_dir
DIR`.

Each part runs in a process of its own within a time limit. After each part report.md, report.json and plots are written again, so
an interrupted run keeps what it has. Without CUDA all sizes are small, and parts that need CUDA are skipped.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import SkipTest

from matplotlib.figure import Figure

Result = dict[str, Any]  # title, status, why, seconds, rows, targets
MOST_SECONDS = 590  # all parts together


@dataclass(frozen=True)
class Part:
    """One part. seconds: its time limit."""

    title: str
    seconds: float


PARTS = {  # by the name of their function in gpu_parts.py
    "environment": Part("Environment", 40),
    "gpu_tests": Part("`pytest -m gpu`", 130),
    "same_update": Part("Promises 1 and 2: same update (dropout 0), same randomness (dropout 0.1); float32 without TF32", 120),
    "same_after_a_stop": Part("Promise 3: same after a stop", 80),
    "same_bits": Part("Same bits: chunks of 4 samples, per-device batch sizes 4, 8 and 16", 60),
    "packed": Part("Packed layers and kernels, dropout 0", 60),
    "dropout": Part("Keyed dropout and native dropout", 60),
    "ablation": Part("Each speed-up left out", 90),
    "trainers": Part("hf_ga, Trainer, TRL and a plain loop on ragged text", 120),
    "host_waits": Part("Waits of the host for the device", 40),
    "cost_model": Part("Constants of the cost model", 50),
    "defaults": Part("What should become the default", 20),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a part failed or ran out of time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu_report"), help="folder for report.md and report.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_parts(PARTS, parser.parse_args(arguments).output_dir)


def run_parts(parts: Mapping[str, Part], folder: Path, module: str = "gpu_parts") -> int:
    """Run each part, which is a function in `module`, and write the report after each."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    # Parts are forked from a process that has imported all. It must not initialize CUDA, as their checks for a GPU else might.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic kernels
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    results: dict[str, Result] = {name: {"title": part.title, "status": "not run"} for name, part in parts.items()}
    began = time.monotonic()
    for name, part in parts.items():
        print(f"{part.title} ...", flush=True)
        limit = max(0.0, min(part.seconds, MOST_SECONDS - (time.monotonic() - began)))
        _run(server.Process(target=measure, args=(module, name, folder, results)), limit, results[name], folder / "parts" / name)
        write_report(folder, results)
        print(f"  {_status(results[name])}", flush=True)
        if results[name]["status"] == "interrupted":
            return 128 + signal.SIGTERM
    print(f"report: {folder / 'report.md'}")
    return int(any(result["status"] in ("failed", "timed out") for result in results.values()))


def measure(module: str, name: str, folder: Path, results: dict[str, Result]) -> None:
    """The process of a part: writes all rows (dicts) and lines about targets (strings) so far whenever there is one more."""
    os.setsid()  # so that its processes end with it
    path = folder / "parts" / name
    with path.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    found: Result = {"rows": [], "targets": []}
    try:
        for item in getattr(importlib.import_module(module), name)(results):
            found["targets" if isinstance(item, str) else "rows"].append(item)
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").replace(path.with_suffix(".json"))
    except SkipTest as reason:
        path.with_suffix(".json").write_text(json.dumps({"status": "skipped", "why": str(reason)}))


def _run(process: Any, limit: float, result: Result, path: Path) -> None:
    """Run a part's process and write its outcome to `result`."""
    path.with_suffix(".json").unlink(missing_ok=True)
    began = time.monotonic()
    result["status"] = "interrupted"
    try:
        process.start()
        process.join(limit)
        result["status"] = "timed out" if process.exitcode is None else "failed" if process.exitcode else "done"
    except (SystemExit, KeyboardInterrupt):
        result["why"] = "stopped by a signal"
    with suppress(ProcessLookupError, TypeError):  # it has not begun
        os.killpg(process.pid, signal.SIGKILL)
    result["seconds"] = time.monotonic() - began
    if result["status"] == "timed out":
        process.kill()
        result["why"] = f"stopped after {limit:.0f} s"
    if result["status"] == "failed":
        lines = path.with_suffix(".log").read_text(errors="replace").strip().splitlines() or ["without a message"]
        result["why"] = f"exit code {process.exitcode}: {lines[-1]}"
    with suppress(FileNotFoundError):
        result |= json.loads(path.with_suffix(".json").read_text())


def write_report(folder: Path, results: Mapping[str, Result]) -> None:
    """Write report.json, report.md and its plots."""
    (folder / "report.json").write_text(json.dumps(results, indent=1))
    lines = ["# Report", "", *_table([{"part": result["title"], "status": _status(result)} for result in results.values()])]
    for name, result in results.items():
        if result.get("rows"):
            lines += ["", f"## {result['title']}", "", *_table(result["rows"]), ""]
            lines += [f"- {line}" for line in result["targets"]]
        if name in PLOTS and result.get("rows"):
            figure = Figure(figsize=(8, 4), layout="constrained")
            PLOTS[name](figure.subplots(), result["rows"])
            figure.savefig(folder / f"{name}.png", dpi=120)
            lines += ["", f"![{result['title']}]({name}.png)"]
    (folder / "report.md").write_text("\n".join([*lines, ""]))


def _status(result: Result) -> str:
    seconds = f", {result['seconds']:.0f} s" if "seconds" in result else ""
    return f"{result['status']}{seconds}" + (f": {result['why']}" if result.get("why") else "")


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown. Lists are for plots and for report.json only."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    cells = [[_shown(row.get(name, "")) for name in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *cells]]


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value).replace("|", "\\|")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plot_rates(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    measured = [row for row in rows if "real tokens/s" in row][::-1]
    axes.barh([f"{row['model']}: {row['arm']}" for row in measured], [row["real tokens/s"] for row in measured])
    axes.set(xlabel="real tokens/s")


def _plot_fits(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        axes.loglog(row["fitted ms"], row["ms"], "o", label=f"{row['model']}, width {row['width']}")
    low, high = axes.get_xlim()
    axes.loglog([low, high], [low, high], color="black", linewidth=0.8)
    axes.set(xlabel="time of a micro-batch, fitted, ms", ylabel="measured, ms")
    axes.legend()


PLOTS = {"trainers": _plot_rates, "cost_model": _plot_fits}

if __name__ == "__main__":
    sys.exit(main())
