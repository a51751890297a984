"""Kill runs at random instants, resume them, compare the result with an uninterrupted run: `python scripts/kill_test.py`.

A small GPT-2 with dropout trains 12 optimizer steps (3 epochs) on generated rows, with a checkpoint every 2 steps (2 are kept)
and an evaluation every 3. Each kill is a SIGKILL, followed by `--resume_from_checkpoint auto` to the end and a comparison: weights,
metrics.jsonl (except tokens_per_second), the best and the last model, the losses of summary.json, the names of all files. Half of
the instants are drawn uniformly over the duration of a run, start-up included; half are file operations in output_dir, drawn from
all that Python audits in a run: the process kills itself right before. Every second pair of killed runs resumes from the files of
the previous kill, so there are chains of kills without a finished run between them. With 2 processes (DDP on CPUs) one is killed;
the other one receives SIGTERM and later SIGKILL, as from a launcher, if it does not exit. Exits with code 1 if any result differs.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from killed_run import PHASES, Watch, train, write_inputs
from tqdm.auto import tqdm

SERVER = multiprocessing.get_context("forkserver")  # imports once; each run is still a separate process
PRELOAD = [
    "hf_ga.run.finetune",
    "hf_ga.data.corpus",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.modeling_auto",
]
OFFLINE = {f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS", "EVALUATE")}
ENVIRONMENT = OFFLINE | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT["PYTHONWARNINGS"] = "ignore:resource_tracker"  # it cleans up the semaphores of killed processes
SUMMARY = ("weights_sha256", "train_loss", "eval_loss", "best_eval_loss", "steps", "skipped_windows")
SURVIVES = 10.0  # seconds for a process to exit after the other one was killed, and again after a SIGTERM
TIME_LIMIT = 300.0  # seconds for a run (a normal one takes a few)


def main() -> int:
    """Kill, resume, compare, report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=50, help="runs to kill, each resumed and compared (default: 50)")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2), help="ranks of each run; one is killed (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants (default: 0)")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/kill_test"), help="a new folder for all runs")
    flags = parser.parse_args()
    if flags.kills < 1 or flags.output_dir.exists():
        parser.error(f"kills must be at least 1 (got {flags.kills}), and output_dir {flags.output_dir} must not exist yet")
    flags.output_dir.mkdir(parents=True)
    os.environ.update(ENVIRONMENT | {"HF_DATASETS_CACHE": str(flags.output_dir.resolve() / "cache")})
    SERVER.set_forkserver_preload(PRELOAD)
    runs, random = Runs(flags.output_dir.resolve(), flags.processes), np.random.default_rng(flags.seed)
    runs.measure()
    print(f"uninterrupted: {runs.seconds:.1f} s, {sum(runs.operations)} file operations; a second run is bit-identical")
    numbers = tqdm(range(flags.kills), desc="kills", unit="kill", dynamic_ncols=True)
    phases, different = zip(*(kill_and_compare(runs, random, number) for number in numbers), strict=True)
    print("kills by phase: " + ", ".join(f"{phase} {phases.count(phase)}" for phase in PHASES))
    print(f"{sum(different)} of {flags.kills} differ")
    return int(any(different))


class Runs:
    """Runs with the same settings in one folder, each in new processes."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        self.seconds, self.operations = 0.0, np.zeros(processes)
        joined([started(write_inputs, folder)])

    def watches(self) -> list[Watch]:
        return [Watch(SERVER.RawArray("i", 2)) for _ in range(self.processes)]

    def start(self, output: Path, watches: list[Watch]) -> list[Any]:
        """Start a run, which resumes from the folder's checkpoint, if any."""
        sizes = {"WORLD_SIZE": self.processes, "LOCAL_WORLD_SIZE": self.processes}
        sizes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks = [{**sizes, "RANK": rank, "LOCAL_RANK": rank} if self.processes > 1 else {} for rank in range(self.processes)]
        return [started(train, self.folder, output, rank, watch) for rank, watch in zip(ranks, watches, strict=True)]

    def finish(self, output: Path, watches: list[Watch]) -> list[str]:
        """Run to the end; returns the failures."""
        codes = joined(self.start(output, watches))
        return [f"exit codes {codes}: {last_line(output)}"] if any(codes) else []

    def measure(self) -> None:
        """Two uninterrupted runs: the first fills caches; the second is timed and must be identical."""
        wrong = self.finish(self.folder / "undisturbed", self.watches())
        watches, began = self.watches(), time.monotonic()
        wrong = wrong or self.finish(self.folder / "again", watches)
        self.seconds, self.operations = time.monotonic() - began, np.array([watch.shared[1] for watch in watches])
        if wrong := wrong or differences(self.folder / "undisturbed", self.folder / "again"):
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(wrong)}")

    def kill(self, output: Path, watches: list[Watch], victim: int, instant: float) -> bool:
        """Kill a process after `instant` seconds, unless it kills itself; False: the run had ended before."""
        processes = self.start(output, watches)
        killed = processes.pop(victim)
        joined([killed], instant)
        for process in processes:
            end_as_a_launcher_would(process)
        if killed.exitcode not in (0, -signal.SIGKILL):
            raise SystemExit(f"{output} failed before it was killed: {last_line(output)}")
        return killed.exitcode != 0


def free_port() -> int:
    """A free port below the ephemeral ones, where a process that waits for a listener may connect to itself."""
    for port in np.random.default_rng().permutation(np.arange(10_000, 30_000)).tolist():
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise SystemExit("none of the ports 10,000 to 29,999 is free")


def started(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a process."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def joined(processes: list[Any], seconds: float = TIME_LIMIT) -> list[int]:
    """Wait for processes, kill those that still run after `seconds`; returns their exit codes."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # no effect if it has exited
        process.join()
    return [process.exitcode for process in processes]


def end_as_a_launcher_would(process: Any) -> None:
    """Wait, then send SIGTERM, finally SIGKILL."""
    process.join(SURVIVES)
    process.terminate()  # no effect if it has exited
    joined([process], SURVIVES)


def kill_and_compare(runs: Runs, random: np.random.Generator, number: int) -> tuple[str, bool]:
    """One kill, one resume, one comparison. If the run ends before the kill, an earlier instant is drawn.

    Returns the phase in which the run was killed, and whether the result differs.
    """
    output, left, reach = runs.folder / f"killed-{number}", runs.folder / "left", 1.0
    at_operation, resumes = number % 2 == 1, number % 4 >= 2 and left.exists()
    while True:
        if resumes:
            shutil.copytree(left, output)
        watches, instant, victim = runs.watches(), TIME_LIMIT, int(random.integers(runs.processes))
        if at_operation:
            victim = int(random.choice(runs.processes, p=runs.operations / runs.operations.sum()))
            watches[victim].die_at = 1 + int(random.integers(max(1, int(reach * runs.operations[victim]))))
        else:
            instant = float(random.uniform(0, reach * runs.seconds))
        if runs.kill(output, watches, victim, instant):
            break
        shutil.rmtree(output)
        reach /= 2
    shutil.rmtree(left, ignore_errors=True)
    if output.exists():
        shutil.copytree(output, left)
    phase = PHASES[watches[victim].shared[0]]
    if found := lost_or_different(runs, output):
        where = f"before file operation {watches[victim].die_at}" if at_operation else f"after {instant:.3f} s"
        tqdm.write(f"kill {number} of process {victim}, {phase}, {where}: {'; '.join(found)}")
        if left.exists():
            shutil.copytree(left, left.with_name(f"left-{number}"))  # kept for inspection
    else:
        shutil.rmtree(output)
    return phase, bool(found)


def lost_or_different(runs: Runs, output: Path) -> list[str]:
    """Resume a killed run to its end; returns differences from the uninterrupted run."""
    has_checkpoint, log = (output / "latest").exists(), output.with_name(f"{output.name}.log")
    log.unlink(missing_ok=True)  # the killed run's log
    found = runs.finish(output, runs.watches()) or differences(runs.folder / "undisturbed", output)
    if has_checkpoint and "starts from step 0" in log.read_text(errors="replace"):
        found.append("a checkpoint was lost: the run started from step 0")
    return found


def differences(reference: Path, output: Path) -> list[str]:
    """The differences between two finished runs."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (reference, output)]
    found = [
        f"{name} {summaries[1].get(name)} instead of {summaries[0][name]}"
        for name in SUMMARY
        if len({s.get(name) for s in summaries}) > 1
    ]
    expected, lines = (metrics_of(folder) for folder in (reference, output))
    if lines != expected:
        steps = [line["step"] for line in lines]
        changed = sorted({line["step"] for line in lines if line not in expected})
        found.append(f"metrics.jsonl has the steps {steps}, of which {changed} differ from the uninterrupted run's")
    for file in ("model.safetensors", "best/model.safetensors"):
        if len({hashlib.sha256((folder / file).read_bytes()).digest() for folder in (reference, output)}) > 1:
            found.append(f"{file} differs")
    if names := names_in(reference) ^ names_in(output):
        found.append(f"files in only one of the folders: {', '.join(sorted(names))}")
    return found


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the speed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def names_in(folder: Path) -> set[str]:
    """Names of all files and folders."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def last_line(output: Path) -> str:
    """The last line that a run printed."""
    log = output.with_name(f"{output.name}.log")
    return f"{log.name} ends with {log.read_text(errors='replace').strip().splitlines()[-1:]}"


if __name__ == "__main__":
    sys.exit(main())
