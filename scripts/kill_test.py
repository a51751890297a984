"""Kill runs at random instants, resume them, and compare the result with an uninterrupted run:
`python scripts/kill_test.py`.

A small GPT-2 with dropout trains 12 optimizer steps (3 epochs) on generated rows, with a checkpoint
every 2 steps (2 are kept) and an evaluation every 3. Each kill is a SIGKILL, followed by
`--resume_from_checkpoint auto` to the end and a comparison: weights, metrics.jsonl (except
tokens_per_second), the best and the last model, the losses of summary.json, the names of all files.
Half of the instants are drawn uniformly over the duration of a run, start-up included; half are
file operations in output_dir, drawn from all that Python audits in a run: the process kills itself
right before. Every second pair of killed runs resumes from the files of the previous kill, so there
are chains of kills without a finished run between them. With 2 processes (DDP on CPUs) one is
killed; the other one receives SIGTERM and later SIGKILL, as from a launcher, if it does not exit.
Exits with code 1 if any result differs.
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

# Audited operation -> index of the argument that is a folder's descriptor. None: it has none.
DESCRIPTOR = {
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 2,
    "os.truncate": None,
    "open": None,
}
TEXT = (
    "the window of samples is one step and every split gives same update while dropout stays "
    "keyed by position"
)
# Imports once; each run is still a separate process.
SERVER = multiprocessing.get_context("forkserver")
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
# It cleans up the semaphores of killed processes.
ENVIRONMENT["PYTHONWARNINGS"] = "ignore:resource_tracker"
SUMMARY = (
    "weights_sha256",
    "train_loss",
    "eval_loss",
    "best_eval_loss",
    "steps",
    "skipped_windows",
)
# Seconds for a process to exit after the other one was killed, and again after a SIGTERM.
SURVIVES = 10.0
# Seconds for a run; a normal one takes a few.
TIME_LIMIT = 300.0


def main() -> int:
    """Kill, resume, compare, report.

    Returns:
        The exit code.
    """
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
    runs = Runs(flags.output_dir.resolve(), flags.processes)
    random = np.random.default_rng(flags.seed)
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
    random = np.random.default_rng(0)
    words = TEXT.split()
    for name, count in {"train": 60, "validation": 13}.items():
        lines = []
        for _ in range(count):
            chosen = random.choice(words, random.integers(1, 13))
            lines.append(json.dumps({"text": " ".join(chosen)}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
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
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def settings(folder: Path, output: Path) -> dict[str, Any]:
    """Return the flags of a run; the model has dropout 0.1."""
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
    """Run one process, which prints to a log file next to its output folder.

    Args:
        folder: The folder of the inputs.
        output: The output folder.
        rank: The environment variables of the rank.
        count: Counts file operations, see `count_operation`.
        die_at: See `count_operation`.
    """
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
    """Count operations that change a folder, and kill the process right before one of them: an
    audit hook.

    Args:
        event: The name of the audited operation.
        values: Its arguments.
        output: The folder.
        count: An integer in shared memory.
        die_at: The number of the operation, from 1. 0: never.
    """
    if event not in DESCRIPTOR or isinstance(values[0], int):
        return
    if event == "open" and not (values[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    path = os.fsdecode(values[0])
    descriptor = DESCRIPTOR[event]
    if descriptor is not None and values[descriptor] >= 0:
        # Relative to an open folder, as in `shutil.rmtree`.
        open_folder = os.readlink(f"/proc/self/fd/{values[descriptor]}")
        path = os.path.join(open_folder, path)
    if not path.startswith(output + os.sep):
        return
    count.value += 1
    if count.value == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Runs:
    """Runs with the same settings in one folder, each in new processes.

    Args:
        folder: The folder of inputs and outputs.
        processes: Number of ranks of each run.

    Attributes:
        seconds: Duration of an uninterrupted run, once measured.
        operations: Number of file operations of each rank in it.
        counts: The same of the last run, in shared memory.
    """

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder = folder
        self.processes = processes
        self.seconds = 0.0
        self.operations = np.zeros(processes)
        self.counts: list[Any] = []
        joined([started(write_inputs, folder)])

    def start(self, output: Path, victim: int = 0, die_at: int = 0) -> list[Any]:
        """Start a run, which resumes from the folder's checkpoint, if any.

        Args:
            output: The output folder.
            victim: The rank that kills itself.
            die_at: The file operation right before which it does, from 1. 0: never.

        Returns:
            The processes.
        """
        sizes = {"WORLD_SIZE": self.processes, "LOCAL_WORLD_SIZE": self.processes}
        sizes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        self.counts = [SERVER.RawValue("i") for _ in range(self.processes)]
        processes = []
        for rank, count in enumerate(self.counts):
            variables = {}
            if self.processes > 1:
                variables = {**sizes, "RANK": rank, "LOCAL_RANK": rank}
            own_die_at = die_at if rank == victim else 0
            processes.append(started(train, self.folder, output, variables, count, own_die_at))
        return processes

    def finish(self, output: Path) -> list[str]:
        """Run to the end.

        Returns:
            The failures, as texts.
        """
        codes = joined(self.start(output))
        if not any(codes):
            return []
        return [f"exit codes {codes}: {last_line(output)}"]

    def measure(self) -> None:
        """Run twice without interruption: the first run fills caches; the second is timed and must
        be identical.
        """
        first = self.folder / "undisturbed"
        second = self.folder / "again"
        wrong = self.finish(first)
        began = time.monotonic()
        wrong = wrong or self.finish(second)
        self.seconds = time.monotonic() - began
        self.operations = np.array([count.value for count in self.counts])
        wrong = wrong or differences(first, second)
        if wrong:
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(wrong)}")

    def kill(self, output: Path, victim: int, instant: float, die_at: int) -> bool:
        """Run, and kill a process after `instant` seconds, or before its file operation `die_at`.

        Returns:
            False, if the run had ended before.
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
    """Find a free port below the ephemeral ones, where a process that waits for a listener may
    connect to itself.
    """
    ports = np.random.default_rng().permutation(np.arange(10_000, 30_000))
    for port in ports.tolist():
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise SystemExit("none of the ports 10,000 to 29,999 is free")


def started(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a process that calls a function."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def joined(processes: list[Any], seconds: float = TIME_LIMIT) -> list[int]:
    """Wait for processes, and kill those that still run after `seconds`.

    Returns:
        Their exit codes.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        seconds_left = max(0.0, deadline - time.monotonic())
        process.join(seconds_left)
        # Without effect if it has exited.
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def end_as_a_launcher_would(process: Any) -> None:
    """Wait, then send SIGTERM, finally SIGKILL."""
    process.join(SURVIVES)
    # Without effect if it has exited.
    process.terminate()
    joined([process], SURVIVES)


def kill_and_compare(runs: Runs, random: np.random.Generator, number: int) -> bool:
    """Kill a run, resume it, and compare the result. If the run ends before the kill, draw an
    earlier instant.

    Args:
        runs: The runs, measured.
        random: Draws the instant and the process.
        number: The number of the kill, which decides its kind and whether it resumes from the files
            of the previous kill.

    Returns:
        Whether the result differs.
    """
    output = runs.folder / f"killed-{number}"
    left = runs.folder / "left"
    at_operation = number % 2 == 1
    resumes = number % 4 >= 2 and left.exists()
    # The part of a run in which the instant is drawn.
    reach = 1.0
    while True:
        if resumes:
            shutil.copytree(left, output)
        victim = int(random.integers(runs.processes))
        instant = TIME_LIMIT
        die_at = 0
        if at_operation:
            victim = int(random.choice(runs.processes, p=runs.operations / runs.operations.sum()))
            num_operations = max(1, int(reach * runs.operations[victim]))
            die_at = 1 + int(random.integers(num_operations))
        else:
            instant = float(random.uniform(0, reach * runs.seconds))
        if runs.kill(output, victim, instant, die_at):
            break
        shutil.rmtree(output)
        reach /= 2
    shutil.rmtree(left, ignore_errors=True)
    if output.exists():
        shutil.copytree(output, left)
    found = lost_or_different(runs, output)
    if not found:
        shutil.rmtree(output)
        return False
    where = f"before file operation {die_at}" if at_operation else f"after {instant:.3f} s"
    tqdm.write(f"kill {number} of process {victim} {where}: {'; '.join(found)}")
    if left.exists():
        # Kept for inspection.
        shutil.copytree(left, left.with_name(f"left-{number}"))
    return True


def lost_or_different(runs: Runs, output: Path) -> list[str]:
    """Resume a killed run to its end.

    Returns:
        The differences from the uninterrupted run, as texts.
    """
    has_checkpoint = (output / "latest").exists()
    log = output.with_name(f"{output.name}.log")
    # The killed run's log.
    log.unlink(missing_ok=True)
    found = runs.finish(output) or differences(runs.folder / "undisturbed", output)
    if has_checkpoint and "starts from step 0" in log.read_text(errors="replace"):
        found.append("a checkpoint was lost: the run started from step 0")
    return found


def differences(reference: Path, output: Path) -> list[str]:
    """List the differences between two finished runs, as texts."""
    right = json.loads((reference / "summary.json").read_text())
    summary = json.loads((output / "summary.json").read_text())
    found = [
        f"{name} {summary.get(name)} instead of {right[name]}"
        for name in SUMMARY
        if summary.get(name) != right[name]
    ]
    expected = metrics_of(reference)
    lines = metrics_of(output)
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
    in_one_only = names_in(reference) ^ names_in(output)
    if in_one_only:
        found.append(f"files in only one of the folders: {', '.join(sorted(in_one_only))}")
    return found


def names_in(folder: Path) -> set[str]:
    """Return the names of all files and folders below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl without the speed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines
    ]


def last_line(output: Path) -> str:
    """Return a sentence with the last line that a run printed."""
    log = output.with_name(f"{output.name}.log")
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{log.name} ends with {lines[-1:]}"


if __name__ == "__main__":
    sys.exit(main())
