"""Measure on a GPU, unattended and in less than ten minutes, what should be known there: `python
scripts/gpu_report.py --help`.

Each part is a command with a time limit; the report is written after each. Without CUDA sizes are
small, and some parts skipped.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
MOST_SECONDS = 530  # of all parts together
LARGE = (
    "--size base --mixed_precision bf16 --max_length 512 --num_samples 1024 --window 512 "
    "--micro_batch 32 --epochs 1"
)
SMALL = (
    "--model gpt --size tiny --num_threads 1 --max_length 64 --num_samples 32 --window 16 "
    "--micro_batch 4 --epochs 1"
)
BENCHMARK = (
    f"scripts/benchmark.py {LARGE if torch.cuda.is_available() else SMALL} --output_dir OUT "
    "--sections"
)
PYTEST = "-m pytest -n 0 -q -s --tb=short -p no:cacheprovider"
LARGE_MODELS = f"{PYTEST} -m report tests/promises/test_large_models.py -k"


class Part(NamedTuple):
    """One part of the report: a command.

    Attributes:
        title: Its title in the report.
        arguments: The arguments of Python; OUT stands for the part's folder.
        seconds: Its time limit.
        needs_cuda: Why it is skipped without CUDA; empty if it is not.
    """

    title: str
    arguments: str
    seconds: float
    needs_cuda: str = ""


PARTS = {
    "environment": Part("Environment", "-W ignore -m torch.utils.collect_env", 40),
    "kernels": Part(
        "Kernels for dropout and attention",
        # Several processes, because compiling takes the time; pytest-benchmark would warn of them.
        "-m pytest -n 4 --dist load -q --tb=short -p no:cacheprovider -p no:benchmark "
        "tests/exact/test_mask_kernel.py tests/speed/test_attention_kernel.py "
        "tests/speed/test_packed_attention.py",
        100,
        "a CPU's tests run them in Triton's interpreter",
    ),
    "promises": Part("Promises 1 to 3, and the same bits", f"{LARGE_MODELS} promise_", 170),
    "waits": Part(
        "Waits for the device", f"{LARGE_MODELS} waits", 30, "the host of a CPU waits for no device"
    ),
    "profile": Part("Where the time of a step goes", f"{BENCHMARK} profile attention", 60),
    "peers": Part("hf_ga, Trainer, TRL and a plain loop", f"{BENCHMARK} peers", 150),
    "tests": Part(
        "Tests marked gpu",
        f"{PYTEST} -m gpu tests/promises/test_on_a_gpu.py tests/parallel/test_stand_in_device.py",
        150,
        "these tests run on a GPU only",
    ),
    "packed": Part(
        "Packed layers and kernels",
        f"{LARGE_MODELS} packed",
        60,
        "a CPU packs by default, and has no such kernels",
    ),
    "speed-ups": Part(
        "Keyed and native dropout, constants, each speed-up left out",
        f"{BENCHMARK} dropout cost ablation",
        200,
    ),
    "small_cost": Part(
        "Constants of the cost model, small models",
        f"{BENCHMARK} cost --size small",
        40,
        "on a CPU the model above is small",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, and write the report after each.

    Returns:
        The exit code: 1 if a part failed or ran out of time.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("outputs/gpu_report"),
        help="folder for report.md and report.json",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=[*PARTS],
        default=[*PARTS],
        help="parts to run, in this order (default: all)",
    )
    flags = parser.parse_args(arguments)
    folder: Path = flags.output_dir.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = {name: {"title": PARTS[name].title, "status": "not run"} for name in flags.parts}
    deadline = time.monotonic() + MOST_SECONDS
    for name in flags.parts:
        part = PARTS[name]
        (folder / name).mkdir(parents=True, exist_ok=True)
        limit = min(part.seconds, deadline - time.monotonic())
        try:
            run_part(part, folder / name, limit, results[name])
        finally:
            write_report(folder, results)
        print(f"{part.title}: {results[name]['status']}", flush=True)
    return int(
        any(result["status"].startswith(("failed", "timed out")) for result in results.values())
    )


def run_part(part: Part, folder: Path, limit: float, result: dict[str, Any]) -> None:
    """Run a command.

    Args:
        part: The command.
        folder: The part's folder.
        limit: Seconds after which it is killed.
        result: Gets the outcome, the output and the figures.
    """
    if part.needs_cuda and not torch.cuda.is_available():
        result["status"] = f"skipped: needs CUDA, as {part.needs_cuda}"
        return
    figures = folder / "benchmark.json"
    figures.unlink(missing_ok=True)
    began = time.monotonic()
    result["status"] = "interrupted"
    words = [str(folder) if word == "OUT" else word for word in part.arguments.split()]
    command = [sys.executable, *words]
    with (folder / "output.txt").open("w") as output:
        # Python 3.11's forkserver preloads from PYTHONPATH only.
        env = os.environ | {
            "TQDM_DISABLE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *sys.path]),
        }
        options = {"cwd": ROOT, "env": env, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, start_new_session=True, **options)
        try:
            code = process.wait(max(0.0, limit))
            result["status"] = "done"
            if code:
                printed = (folder / "output.txt").read_text(errors="replace").strip()
                last_line = printed.rpartition("\n")[2]
                result["status"] = f"failed with exit code {code}: {last_line}"
        except subprocess.TimeoutExpired:
            result["status"] = f"timed out after {limit:.0f} s"
        finally:
            # With all processes that it started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result["seconds"] = time.monotonic() - began
            result["output"] = (folder / "output.txt").read_text(errors="replace")
            result["sections"] = []
            if figures.exists():
                result["sections"] = json.loads(figures.read_text())["sections"]


def write_report(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write report.json, report.md and the plot."""
    (folder / "report.json").write_text(json.dumps(results, indent=1))
    outputs = "\n".join(result.get("output", "") for result in results.values())
    lines = [
        "# Report",
        "",
        *(f"- {result['title']}: {result['status']}" for result in results.values()),
        "",
    ]
    title = "## Targets and defaults"
    if not torch.cuda.is_available():
        title = "## Targets and defaults of a GPU (this is a CPU)"
    lines += [title, ""]
    targets = r"^[.sF]*(?:- )?((?:passed|FAILED|default|waits).*)"
    lines += [f"- {line}" for line in re.findall(targets, outputs, re.MULTILINE)]
    for result in results.values():
        lines += ["", f"## {result['title']}", "", result["status"]]
        text = result.get("output", "").strip()
        if text and result.get("sections"):
            lines += ["", text.replace("\n## ", "\n### ")]
        elif text:
            lines += ["", f"```text\n{text}\n```"]
    peers = results.get("peers", {}).get("sections", [])
    rates = {
        f"{row[0]}, {section['title'][:4]}": row[1] for section in peers for row in section["rows"]
    }
    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.subplots(subplot_kw={"xlabel": "real tokens/s"}).barh([*rates], [*rates.values()])
    figure.savefig(folder / "peers.png", dpi=120)
    (folder / "report.md").write_text(
        "\n".join([*lines, "", "![Real tokens per second](peers.png)", ""])
    )


if __name__ == "__main__":
    sys.exit(main())
