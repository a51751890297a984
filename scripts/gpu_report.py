"""Run the GPU tests and benchmarks unattended, in less than ten minutes, and write one report:
`python scripts/gpu_report.py --help`.

Each part is a command with a time limit; the report is written after each. Without CUDA the models
are small, and some parts are skipped.
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
TIME_LIMIT = 530  # seconds for all parts together
# Flags of scripts/benchmark.py, on a GPU and without one.
GPU_FLAGS = (
    "--size base --mixed_precision bf16 --lengths lognormal --max_length 1024 --num_samples 512 "
    "--window 64 --micro_batch 8 --epochs 1"
)
CPU_FLAGS = (
    "--model gpt --size tiny --num_threads 1 --max_length 64 --num_samples 32 --window 16 "
    "--micro_batch 4 --epochs 1"
)
BENCHMARK = (
    f"scripts/benchmark.py {GPU_FLAGS if torch.cuda.is_available() else CPU_FLAGS} "
    "--output_dir OUT --sections"
)
PYTEST = "-m pytest -n 0 -q -s --tb=short -p no:cacheprovider"
LARGE_MODELS = f"{PYTEST} -m report tests/promises/test_large_models.py -k"


class Part(NamedTuple):
    """One part of the GPU report: a Python command, such as a benchmark or some tests.

    Attributes:
        title: Title of the part in the report.
        arguments: Command-line arguments of Python, separated by spaces; "OUT" is replaced by the
            part's output folder.
        seconds: Time limit.
        needs_cuda: The reason why the part is skipped without CUDA; "" if it also runs on a CPU.
    """

    title: str
    arguments: str
    seconds: float
    needs_cuda: str = ""


PARTS = {
    "environment": Part("Environment", "-W ignore -m torch.utils.collect_env", 40),
    "kernels": Part(
        "Kernels for dropout and attention",
        # Several processes, because most of the time is compilation; pytest-benchmark is off,
        # because it warns if there are several.
        "-m pytest -n 4 --dist load -q --tb=short -p no:cacheprovider -p no:benchmark "
        "tests/draws/test_mask_kernel.py tests/rows/test_attention_kernel.py "
        "tests/rows/test_packed_attention.py tests/rows/test_varlen_attention.py",
        100,
        "a CPU's tests run them in Triton's interpreter",
    ),
    "promises": Part("Promises 1 to 3, and the same bits", f"{LARGE_MODELS} promise_", 170),
    "waits": Part(
        "Waits for the device", f"{LARGE_MODELS} waits", 30, "the host of a CPU waits for no device"
    ),
    "profile": Part("Where the time of a step goes", f"{BENCHMARK} profile attention", 60),
    "peers": Part("hf_ga, Trainer and full rows", f"{BENCHMARK} peers", 240),
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
        f"{BENCHMARK} cost ablation",
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
    """Run the parts of the GPU report one after the other, and write the report after each.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 1 if a part failed or timed out.
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
    # On SIGTERM exit by an exception, so that the part's processes end and the report is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = {name: {"title": PARTS[name].title, "status": "not run"} for name in flags.parts}
    deadline = time.monotonic() + TIME_LIMIT
    for name in flags.parts:
        part = PARTS[name]
        (folder / name).mkdir(parents=True, exist_ok=True)
        limit = min(part.seconds, deadline - time.monotonic())
        try:
            run_part(part, folder / name, limit, results[name])
        finally:
            write_report(folder, results)
        print(f"{part.title}: {results[name]['status']}", flush=True)
    statuses = [result["status"] for result in results.values()]
    return int(any(status.startswith(("failed", "timed out")) for status in statuses))


def run_part(part: Part, folder: Path, limit: float, result: dict[str, Any]) -> None:
    """Run the command of one part of the GPU report, and write the outcome into `result`, in place.

    Args:
        part: The part.
        folder: The part's output folder, where output.txt is written.
        limit: Seconds after which the command and all processes that it started are killed.
        result: Gets "status", "seconds", "output" (what was printed) and "sections" (the tables of
            benchmark.json, if the command wrote it); only "status" if the part is skipped.
    """
    if part.needs_cuda and not torch.cuda.is_available():
        result["status"] = f"skipped: needs CUDA, as {part.needs_cuda}"
        return
    benchmark_file = folder / "benchmark.json"
    benchmark_file.unlink(missing_ok=True)
    output_file = folder / "output.txt"
    start = time.monotonic()
    result["status"] = "interrupted"
    arguments = [str(folder) if word == "OUT" else word for word in part.arguments.split()]
    with output_file.open("w") as output:
        environment = os.environ | {
            "TQDM_DISABLE": "1",
            # Python 3.11's forkserver preloads from PYTHONPATH only.
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts"), *sys.path]),
        }
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.0, limit))
            result["status"] = "done"
            if code:
                printed = output_file.read_text(errors="replace").strip()
                last_line = printed.rpartition("\n")[2]
                result["status"] = f"failed with exit code {code}: {last_line}"
        except subprocess.TimeoutExpired:
            result["status"] = f"timed out after {limit:.0f} s"
        finally:
            # The command runs in its own process group: kill all processes that it started, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            result["seconds"] = time.monotonic() - start
            result["output"] = output_file.read_text(errors="replace")
            result["sections"] = []
            if benchmark_file.exists():
                result["sections"] = json.loads(benchmark_file.read_text())["sections"]


def write_report(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the GPU report into a folder: report.json; report.md with the status and output of each
    part, and all lines about targets and defaults at the top; and peers.png, a bar chart of tokens
    per second.

    Args:
        folder: The folder of the report.
        results: Name of the part -> the result of `run_part`.
    """
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
    # pytest may have printed the dots of its progress in front of a line.
    target_lines = r"^[.sF]*(?:- )?((?:passed|FAILED|default|waits).*)"
    lines += [f"- {line}" for line in re.findall(target_lines, outputs, re.MULTILINE)]
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
