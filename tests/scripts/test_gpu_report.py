"""The report on a GPU: parts that fail, hang or are interrupted leave the others' results; all of
it, small, on a CPU.
"""

import json
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_report
import psutil
import pytest
import torch
from benchmark import measuring
from forked import FORK, ForkedPython
from gpu_report import Part
from hanging_worker import FIGURES

HANGS = Path(__file__).with_name("hanging_worker.py")


@pytest.fixture(autouse=True)
def handler_of_sigterm():
    """The report's own would stay in this process."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def parts(seconds: float) -> dict[str, Part]:
    return {
        "first": Part("First", "-c print('-\\x20passed:\\x201,\\x20target\\x20>=\\x201')", 60),
        "fails": Part("Fails", "-c raise(ValueError('broken'))", 60),
        "peers": Part("Hangs", f"{HANGS} OUT", seconds),
        "cuda": Part("On a GPU", "-c print('ran')", 60, "a CPU has none"),
        "last": Part("Last", "-c print('also_here')", 60),
    }


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_part_that_fails_or_hangs_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "PARTS", parts(1.5))
    assert gpu_report.main(["--output_dir", str(tmp_path / "out")]) == 1
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    statuses = [
        "done",
        "failed with exit code 1: ValueError: broken",
        "timed out after 2 s",
        "skipped: needs CUDA, as a CPU has none",
    ]
    assert [result["status"] for result in found.values()] == [*statuses, "done"]
    assert found["last"]["output"] == "also_here\n"
    assert found["peers"]["sections"] == FIGURES["sections"]
    assert not is_running(int(found["peers"]["output"].split()[1]))
    page = (tmp_path / "out" / "report.md").read_text()
    assert "- Fails: failed with exit code 1: ValueError: broken\n" in page
    assert "also_here" in page
    assert "- passed: 1, target >= 1\n" in page
    assert (tmp_path / "out" / "peers.png").stat().st_size > 1000


def test_an_interrupted_report_keeps_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "PARTS", parts(60))
    out = tmp_path / "out"
    process = FORK.Process(target=gpu_report.main, args=(["--output_dir", str(out)],))
    process.start()
    output = out / "peers" / "output.txt"
    while process.is_alive() and not (output.exists() and output.read_text().endswith("\n")):
        time.sleep(0.02)
    process.terminate()
    process.join(60)
    assert process.exitcode == 143
    found = json.loads((out / "report.json").read_text())
    assert [found[name]["status"] for name in ("first", "peers", "last")] == [
        "done",
        "interrupted",
        "not run",
    ]
    assert found["peers"]["sections"]
    assert not is_running(int(found["peers"]["output"].split()[1]))
    assert "- Hangs: interrupted\n" in (out / "report.md").read_text()


def start(command: list[str], **how: Any) -> ForkedPython | subprocess.Popen:
    is_script = command[1].endswith(".py")
    return (ForkedPython if is_script else subprocess.Popen)(command, **how)


def smaller(part: Part) -> Part:
    """Two windows of 8 samples in place of those of 16."""
    sizes = "--num_samples 32 --window 16"
    smaller_sizes = "--num_samples 16 --window 8"
    return part._replace(arguments=part.arguments.replace(sizes, smaller_sizes))


@pytest.mark.slow("the whole report")
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes ten minutes on a GPU")
def test_the_whole_report_on_a_cpu(tmp_path, monkeypatch):
    started = SimpleNamespace(
        Popen=start, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(gpu_report, "subprocess", started)
    monkeypatch.setattr(gpu_report, "PARTS", {n: smaller(p) for n, p in gpu_report.PARTS.items()})
    arms_start = SimpleNamespace(get_context=lambda _: FORK)
    monkeypatch.setattr(measuring, "multiprocessing", arms_start)
    code = gpu_report.main(["--output_dir", str(tmp_path)])
    found = json.loads((tmp_path / "report.json").read_text())
    assert code == 0, {
        name: (result["status"], result.get("output", "")[-2000:]) for name, result in found.items()
    }
    skipped = {
        name for name, result in found.items() if result["status"].startswith("skipped: needs CUDA")
    }
    assert (
        skipped
        == {"tests", "kernels", "packed", "waits", "small_cost"}
        == {n for n, part in gpu_report.PARTS.items() if part.needs_cuda}
    )
    rates = {row[0]: row[1] for row in found["peers"]["sections"][-1]["rows"]}
    assert len(rates) == 5
    assert min(rates.values()) > 0
    assert "8 passed" in found["promises"]["output"]
    assert "target >= 0.45" in (tmp_path / "report.md").read_text()
