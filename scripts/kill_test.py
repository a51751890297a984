"""Kill runs at random instants, resume them, compare the result with an uninterrupted run: `python
scripts/kill_test.py`.

A small GPT-2 with dropout trains 12 optimizer steps (3 epochs) on generated rows, with a checkpoint
every 2 steps (2 are kept) and an evaluation every 3. Each kill is a SIGKILL, followed by
`--resume_from_checkpoint auto` to the end and a comparison: weights, metrics.jsonl (except
tokens_per_second), the best and the last model, the losses of summary.json, the names of all files.
Half of the instants are drawn uniformly over the duration of a run, start-up included; half are
file operations in output_dir, drawn from
all that Python audits in a run: the process kills itself right before. Every second pair of killed
    runs resumes from the files of
the previous kill, so there are chains of kills without a finished run between them. With 2
processes (DDP on CPUs) one is killed; the other one receives SIGTERM and later SIGKILL, as from a
launcher, if it does not exit. Exits with code 1 if any result differs.
"""

import argparse
import filecmp
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
import torch
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import hf_ga
from hf_ga.finetuning.data.corpus import train_tokenizer

DESCRIPTOR = {
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 2,
    "os.truncate": None,
    "open": None,
}  # argument index
TEXT = (
    "the window of samples is one step and every split gives same update while dropout stays "
    "keyed by position"
)
SERVER = multiprocessing.get_context(
    "forkserver"
)  # imports once; each run is still a separate process
PRELOAD = [
    "hf_ga.finetuning.run.finetune",
    "hf_ga.finetuning.data.corpus",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.modeling_auto",
]
OFFLINE = {f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS", "EVALUATE")}
ENVIRONMENT = OFFLINE | {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ENVIRONMENT["PYTHONWARNINGS"] = (
    "ignore:resource_tracker"  # it cleans up the semaphores of killed processes
)
SUMMARY = (
    "weights_sha256",
    "train_loss",
    "eval_loss",
    "best_eval_loss",
    "steps",
    "skipped_windows",
)
SURVIVES = (
    10.0  # seconds for a process to exit after the other one was killed, and again after a SIGTERM
)
TIME_LIMIT = 300.0  # seconds for a run (a normal one takes a few)


def main() -> int:
    """Kill, resume, compare, report. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--kills",
        type=int,
        default=50,
        help="runs to kill, each resumed and compared (default: 50)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        choices=(1, 2),
        help="ranks of each run; one is killed (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants (default: 0)")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("outputs/kill_test"),
        help="a new folder for all runs",
    )
    flags = parser.parse_args()
    if flags.kills < 1 or flags.output_dir.exists():
        parser.error(
            f"kills must be at least 1 (got {flags.kills}), and output_dir {flags.output_dir} "
            "must not exist yet"
        )
    flags.output_dir.mkdir(parents=True)
    os.environ.update(
        ENVIRONMENT | {"HF_DATASETS_CACHE": str(flags.output_dir.resolve() / "cache")}
    )
    SERVER.set_forkserver_preload(PRELOAD)
    runs, random = (
        Runs(flags.output_dir.resolve(), flags.processes),
        np.random.default_rng(flags.seed),
    )
    runs.measure()
    print(
        f"uninterrupted: {runs.seconds:.1f} s, {sum(runs.operations)} file operations; a second "
        "run is bit-identical"
    )
    numbers = tqdm(range(flags.kills), desc="kills", unit="kill", dynamic_ncols=True)
    different = sum(kill_and_compare(runs, random, number) for number in numbers)
    print(f"{different} of {flags.kills} differ")
    return int(different > 0)


def write_inputs(folder: Path) -> None:
    """Write rows and a small model with its tokenizer."""
    random, words = np.random.default_rng(0), TEXT.split()
    for name, count in {"train": 60, "validation": 13}.items():
        texts = [" ".join(random.choice(words, random.integers(1, 13))) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    tokenizer = train_tokenizer([TEXT] * 3, 300)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer),
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
    }
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def settings(folder: Path, output: Path) -> dict[str, Any]:
    """Flags of a run; the model has dropout 0.1."""
    files = {"dataset_name": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    paths = {"model_name_or_path": folder / "model", "output_dir": output, **files}
    often = {
        "max_steps": 12,
        "eval_steps": 3,
        "save_steps": 2,
        "save_total_limit": 2,
        "warmup_steps": 2,
    }
    sizes = {"max_length": 24, "per_device_train_batch_size": 4, "global_batch_size": 16}
    return {**paths, **often, **sizes, "learning_rate": 1e-3, "resume_from_checkpoint": "auto"}


def train(folder: Path, output: Path, rank: dict[str, Any], count: Any, die_at: int) -> None:
    """Run one process; prints to a log file next to the folder. See `count_operation`."""
    os.environ.update({name: str(value) for name, value in rank.items()})
    with output.with_name(f"{output.name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    sys.addaudithook(
        lambda event, values: count_operation(event, values, str(output), count, die_at)
    )
    hf_ga.finetune(hf_ga.FinetuneConfig(**settings(folder, output)))


def count_operation(
    event: str, values: tuple[Any, ...], output: str, count: Any, die_at: int
) -> None:
    """An audit hook: counts operations that change the folder, and kills the process right before
    operation `die_at`.
    """
    if event not in DESCRIPTOR or isinstance(values[0], int):
        return
    if event == "open" and not (values[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    path, descriptor = os.fsdecode(values[0]), DESCRIPTOR[event]
    if (
        descriptor is not None and values[descriptor] >= 0
    ):  # relative to an open folder, as in `shutil.rmtree`
        path = os.path.join(os.readlink(f"/proc/self/fd/{values[descriptor]}"), path)
    if not path.startswith(output + os.sep):
        return
    count.value += 1
    if count.value == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Runs:
    """Runs with the same settings in one folder, each in new processes."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        self.seconds, self.operations = 0.0, np.zeros(processes)
        joined([started(write_inputs, folder)])

    def start(self, output: Path, victim: int = 0, die_at: int = 0) -> list[Any]:
        """Start a run, which resumes from the folder's checkpoint, if any. The victim kills itself
        right before its file operation `die_at` (from 1); 0: never.
        """
        sizes = {"WORLD_SIZE": self.processes, "LOCAL_WORLD_SIZE": self.processes}
        sizes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks = [
            {**sizes, "RANK": rank, "LOCAL_RANK": rank} if self.processes > 1 else {}
            for rank in range(self.processes)
        ]
        self.counts = [SERVER.RawValue("i") for _ in ranks]
        return [
            started(train, self.folder, output, rank, count, die_at * (i == victim))
            for i, (rank, count) in enumerate(zip(ranks, self.counts, strict=True))
        ]

    def finish(self, output: Path) -> list[str]:
        """Run to the end; returns the failures."""
        codes = joined(self.start(output))
        return [f"exit codes {codes}: {last_line(output)}"] if any(codes) else []

    def measure(self) -> None:
        """Two uninterrupted runs: the first fills caches; the second is timed and must be
        identical.
        """
        wrong, began = self.finish(self.folder / "undisturbed"), time.monotonic()
        wrong = wrong or self.finish(self.folder / "again")
        self.seconds, self.operations = (
            time.monotonic() - began,
            np.array([count.value for count in self.counts]),
        )
        if wrong := wrong or differences(self.folder / "undisturbed", self.folder / "again"):
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(wrong)}")

    def kill(self, output: Path, victim: int, instant: float, die_at: int) -> bool:
        """Kill a process after `instant` seconds, or before its file operation `die_at`; False: the
        run had ended before.
        """
        processes = self.start(output, victim, die_at)
        killed = processes.pop(victim)
        joined([killed], instant)
        for process in processes:
            end_as_a_launcher_would(process)
        if killed.exitcode not in (0, -signal.SIGKILL):
            raise SystemExit(f"{output} failed before it was killed: {last_line(output)}")
        return killed.exitcode != 0


def free_port() -> int:
    """A free port below the ephemeral ones, where a process that waits for a listener may connect
    to itself.
    """
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


def kill_and_compare(runs: Runs, random: np.random.Generator, number: int) -> bool:
    """One kill, one resume, one comparison: whether the result differs. If the run ends before the
    kill, an earlier instant is drawn.
    """
    output, left, reach = runs.folder / f"killed-{number}", runs.folder / "left", 1.0
    at_operation, resumes = number % 2 == 1, number % 4 >= 2 and left.exists()
    while True:
        if resumes:
            shutil.copytree(left, output)
        instant, die_at, victim = TIME_LIMIT, 0, int(random.integers(runs.processes))
        if at_operation:
            victim = int(random.choice(runs.processes, p=runs.operations / runs.operations.sum()))
            die_at = 1 + int(random.integers(max(1, int(reach * runs.operations[victim]))))
        else:
            instant = float(random.uniform(0, reach * runs.seconds))
        if runs.kill(output, victim, instant, die_at):
            break
        shutil.rmtree(output)
        reach /= 2
    shutil.rmtree(left, ignore_errors=True)
    if output.exists():
        shutil.copytree(output, left)
    if found := lost_or_different(runs, output):
        where = f"before file operation {die_at}" if at_operation else f"after {instant:.3f} s"
        tqdm.write(f"kill {number} of process {victim} {where}: {'; '.join(found)}")
        if left.exists():
            shutil.copytree(left, left.with_name(f"left-{number}"))  # kept for inspection
    else:
        shutil.rmtree(output)
    return bool(found)


def lost_or_different(runs: Runs, output: Path) -> list[str]:
    """Resume a killed run to its end; returns differences from the uninterrupted run."""
    has_checkpoint, log = (output / "latest").exists(), output.with_name(f"{output.name}.log")
    log.unlink(missing_ok=True)  # the killed run's log
    found = runs.finish(output) or differences(runs.folder / "undisturbed", output)
    if has_checkpoint and "starts from step 0" in log.read_text(errors="replace"):
        found.append("a checkpoint was lost: the run started from step 0")
    return found


def differences(reference: Path, output: Path) -> list[str]:
    """The differences between two finished runs."""
    right, summary = (
        json.loads((folder / "summary.json").read_text()) for folder in (reference, output)
    )
    found = [
        f"{name} {summary.get(name)} instead of {right[name]}"
        for name in SUMMARY
        if summary.get(name) != right[name]
    ]
    expected, lines = (metrics_of(folder) for folder in (reference, output))
    if lines != expected:
        steps = [line["step"] for line in lines]
        changed = sorted({line["step"] for line in lines if line not in expected})
        found.append(
            f"metrics.jsonl has the steps {steps}, of which {changed} differ from the "
            "uninterrupted run's"
        )
    for file in ("model.safetensors", "best/model.safetensors"):
        if not filecmp.cmp(reference / file, output / file, shallow=False):
            found.append(f"{file} differs")
    before, after = (
        {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
        for folder in (reference, output)
    )
    if names := before ^ after:
        found.append(f"files in only one of the folders: {', '.join(sorted(names))}")
    return found


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without the speed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines
    ]


def last_line(output: Path) -> str:
    """The last line that a run printed."""
    log = output.with_name(f"{output.name}.log")
    return f"{log.name} ends with {log.read_text(errors='replace').strip().splitlines()[-1:]}"


if __name__ == "__main__":
    sys.exit(main())
