"""Kill training runs at random moments, resume them, and compare the result with an uninterrupted
run: `python scripts/kill_test.py`.

A small GPT-2 with dropout trains 12 optimizer steps (3 epochs) on generated rows, with a checkpoint
every 2 steps (2 are kept) and an evaluation every 3. Each kill is a SIGKILL, followed by
`--resume_from_checkpoint auto` to the end and a comparison: weights, metrics.jsonl (except
tokens_per_second), the best and the last model, the losses of summary.json, the names of all files.
Half of the kills happen after a time drawn uniformly from the duration of a run, start-up included;
half happen right before a file operation in output_dir, drawn from all that Python audits in a run:
the process kills itself. Every second pair of killed runs resumes from the files of the previous
kill, so there are chains of kills without a finished run between them. With 2 processes (DDP on
CPUs) one is killed; the other one receives SIGTERM and later SIGKILL, as from a launcher, if it
does not exit.
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
from elastic.inputs import settings, write_inputs
from elastic.run import run_elastic_test
from tqdm.auto import tqdm

import hf_ga

# Python's audit events of file operations that may change a folder -> index of the event's argument
# that is the file descriptor of a folder, to which the path is relative; None if it has none.
DESCRIPTOR_INDEX = {
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 2,
    "os.truncate": None,
    "open": None,
}
# The server process imports the modules of `PRELOAD` once; each run is still a process of its own.
SERVER = multiprocessing.get_context("forkserver")
PRELOAD = [
    "hf_ga.finetuning.run.finetune",
    "hf_ga.finetuning.data.formats.corpus",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.auto.modeling_auto",
]
OFFLINE = {f"HF_{name}_OFFLINE": "1" for name in ("HUB", "DATASETS", "EVALUATE")}
ENVIRONMENT = OFFLINE | {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Python's resource tracker would warn that it cleans up the semaphores of killed processes.
ENVIRONMENT["PYTHONWARNINGS"] = "ignore:resource_tracker"
# Keys of summary.json that must be equal.
COMPARED_KEYS = (
    "weights_sha256",
    "train_loss",
    "eval_loss",
    "best_eval_loss",
    "steps",
    "skipped_windows",
)
# Seconds to wait for a process to exit after the other one was killed, and again after a SIGTERM.
EXIT_SECONDS = 10.0
# Seconds after which a run is killed; a normal one takes a few.
TIME_LIMIT = 300.0


def main() -> int:
    """Run the kill test with the flags of the command line: kill runs, resume them, compare them
    with an uninterrupted run, and print the differences.

    Returns:
        The exit code: 1 if any result differs.
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
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the kills' random moments (default: 0)"
    )
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("outputs/kill_test"),
        help="a new folder for all runs",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="instead: one run on two to three of torch's agents, with --kills random events "
        "(killed workers and agents, SIGTERM, agents that join, two at once), and a ledger of the "
        "samples",
    )
    parser.add_argument(
        "--door",
        default="command",
        choices=("command", "accelerate", "trainer", "stock"),
        help="with --elastic, what trains: the command, a loop with hf_ga.Accelerator, "
        "ExactTrainer, or the control: the loop with Accelerate's own Accelerator",
    )
    parser.add_argument(
        "--same_bits",
        type=int,
        help="with --elastic: the command's flag, with which the weights must have one SHA-256",
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
    if flags.elastic:
        folder = flags.output_dir.resolve()
        write_inputs(folder, is_numbered=True)
        return run_elastic_test(folder, flags.door, flags.kills, flags.same_bits, flags.seed)
    runs = Runs(flags.output_dir.resolve(), flags.processes)
    random = np.random.default_rng(flags.seed)
    runs.measure()
    print(
        f"uninterrupted: {runs.seconds:.1f} s, {sum(runs.operations)} file operations; a second "
        "run is bit-identical"
    )
    num_different = 0
    for index in tqdm(range(flags.kills), desc="kills", unit="kill", dynamic_ncols=True):
        if kill_and_compare(runs, random, index):
            num_different += 1
    print(f"{num_different} of {flags.kills} differ")
    return int(num_different > 0)


def train(
    folder: Path, output: Path, rank_variables: dict[str, Any], count: Any, die_at: int
) -> None:
    """Fine-tune in this process, as one rank of a run; print to a log file next to the output
    folder.

    Args:
        folder: The folder of the inputs.
        output: The run's output folder.
        rank_variables: The environment variables of the rank, such as RANK; empty for one process.
        count: Integer in shared memory that counts the file operations in the output folder.
        die_at: Number of the file operation, from 1, before which the process kills itself. 0:
            never.
    """
    os.environ.update({name: str(value) for name, value in rank_variables.items()})
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
    """Audit hook (`sys.addaudithook`) that counts the file operations that change a folder, and
    kills this process right before one of them.

    Args:
        event: The name of the audit event, such as "os.rename".
        values: The arguments of the event; the first one is a path or a file descriptor.
        output: The folder; operations on other paths, and on open files, are not counted.
        count: Integer in shared memory that is increased by one for each operation.
        die_at: Number of the operation, from 1, before which the process kills itself. 0: never.
    """
    if event not in DESCRIPTOR_INDEX or isinstance(values[0], int):
        return
    if event == "open":
        open_flags = values[2] or 0
        if not open_flags & (os.O_WRONLY | os.O_RDWR):
            return
    path = os.fsdecode(values[0])
    descriptor_index = DESCRIPTOR_INDEX[event]
    if descriptor_index is not None and values[descriptor_index] >= 0:
        # The path is relative to an open folder, as in `shutil.rmtree`.
        open_folder = os.readlink(f"/proc/self/fd/{values[descriptor_index]}")
        path = os.path.join(open_folder, path)
    if not path.startswith(output + os.sep):
        return
    count.value += 1
    if count.value == die_at:
        os.kill(os.getpid(), signal.SIGKILL)


class Runs:
    """Starts, kills and resumes training runs with the same settings, each in new processes.

    Args:
        folder: The folder of inputs and outputs; the inputs are written into it.
        num_processes: Number of ranks of each run.

    Attributes:
        seconds: Duration of an uninterrupted run; 0 before `measure`.
        operations: For each rank, the number of file operations of an uninterrupted run; 0 before
            `measure`.
        counts: For each rank, the number of file operations of the run started last, as integers in
            shared memory.
    """

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.folder = folder
        self.num_processes = num_processes
        self.seconds = 0.0
        self.operations = np.zeros(num_processes)
        self.counts: list[Any] = []
        write_inputs(folder)

    def start(self, output: Path, victim: int = 0, die_at: int = 0) -> list[Any]:
        """Start the processes of a training run, which resumes from the output folder's checkpoint,
        if there is one.

        Args:
            output: The run's output folder.
            victim: The rank that kills itself.
            die_at: Number of the file operation, from 1, before which it does. 0: never.

        Returns:
            The processes, one for each rank.
        """
        world_variables = {
            "WORLD_SIZE": self.num_processes,
            "LOCAL_WORLD_SIZE": self.num_processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }
        self.counts = [SERVER.RawValue("i") for _ in range(self.num_processes)]
        processes = []
        for rank, count in enumerate(self.counts):
            variables = {}
            if self.num_processes > 1:
                variables = {**world_variables, "RANK": rank, "LOCAL_RANK": rank}
            rank_dies_at = die_at if rank == victim else 0
            processes.append(
                start_process(train, self.folder, output, variables, count, rank_dies_at)
            )
        return processes

    def finish(self, output: Path) -> list[str]:
        """Start or resume a training run without killing it, and wait for its end.

        Returns:
            An error message if the run failed; an empty list if it succeeded.
        """
        codes = join_or_kill(self.start(output))
        if not any(codes):
            return []
        return [f"exit codes {codes}: {last_line(output)}"]

    def measure(self) -> None:
        """Train twice without interruption, and exit with an error if the results differ. The first
        run fills caches and is the reference of all comparisons; the second sets `seconds` and
        `operations`.
        """
        first = self.folder / "undisturbed"
        second = self.folder / "again"
        problems = self.finish(first)
        start = time.monotonic()
        problems = problems or self.finish(second)
        self.seconds = time.monotonic() - start
        self.operations = np.array([count.value for count in self.counts])
        problems = problems or differences(first, second)
        if problems:
            raise SystemExit(f"two uninterrupted runs differ: {'; '.join(problems)}")

    def kill(self, output: Path, victim: int, seconds: float, die_at: int) -> bool:
        """Start or resume a training run, and kill one of its processes by SIGKILL; then end the
        other one as a launcher does.

        Args:
            output: The run's output folder.
            victim: The rank to kill.
            seconds: Time after which it is killed.
            die_at: Number of the file operation, from 1, before which it kills itself. 0: never.

        Returns:
            Whether the process was killed; False if it had ended successfully before.
        """
        processes = self.start(output, victim, die_at)
        killed = processes.pop(victim)
        join_or_kill([killed], seconds)
        for process in processes:
            end_like_launcher(process)
        if killed.exitcode not in (0, -signal.SIGKILL):
            raise SystemExit(f"{output} failed before it was killed: {last_line(output)}")
        return killed.exitcode != 0


def free_port() -> int:
    """Return a random free TCP port between 10,000 and 29,999.

    Ephemeral ports are above: there a process that waits for the listener may be given the same
    port, and connect to itself.
    """
    ports = np.random.default_rng().permutation(np.arange(10_000, 30_000))
    for port in ports.tolist():
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise SystemExit("none of the ports 10,000 to 29,999 is free")


def start_process(function: Callable[..., None], *arguments: Any) -> Any:
    """Start a new process that calls `function(*arguments)`, and return it."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    return process


def join_or_kill(processes: list[Any], seconds: float = TIME_LIMIT) -> list[int]:
    """Wait until processes exit, and kill those that still run after `seconds`.

    Returns:
        The exit code of each process.
    """
    deadline = time.monotonic() + seconds
    for process in processes:
        seconds_left = max(0.0, deadline - time.monotonic())
        process.join(seconds_left)
        # A no-op if it has exited.
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def end_like_launcher(process: Any) -> None:
    """End a process as a launcher does after another rank failed: wait, then send SIGTERM, wait
    again, and finally send SIGKILL.
    """
    process.join(EXIT_SECONDS)
    # A no-op if it has exited.
    process.terminate()
    join_or_kill([process], EXIT_SECONDS)


def kill_and_compare(runs: Runs, random: np.random.Generator, index: int) -> bool:
    """Kill a training run, resume it to its end, and compare the result with the uninterrupted run;
    print the differences, if any. If the run ends before the kill, try again with an earlier kill.

    Odd kills happen right before a file operation, even ones after a random time. In every second
    pair the run first resumes from the files that the previous kill left.

    Args:
        runs: The runs, after `measure`.
        random: Draws the time or file operation of the kill, and the rank.
        index: Number of the kill, from 0.

    Returns:
        Whether the result differs. Then the files that the kill left are kept in left-`index`.
    """
    output = runs.folder / f"killed-{index}"
    left_files = runs.folder / "left"
    at_operation = index % 2 == 1
    resumes_previous = index % 4 >= 2 and left_files.exists()
    # The kill is drawn from this share of a run, from its start.
    share = 1.0
    while True:
        if resumes_previous:
            shutil.copytree(left_files, output)
        victim, seconds, die_at = draw_kill(runs, random, at_operation, share)
        if runs.kill(output, victim, seconds, die_at):
            break
        shutil.rmtree(output)
        share /= 2
    shutil.rmtree(left_files, ignore_errors=True)
    if output.exists():
        shutil.copytree(output, left_files)
    found = resume_and_compare(runs, output)
    if not found:
        shutil.rmtree(output)
        return False
    moment = f"before file operation {die_at}" if at_operation else f"after {seconds:.3f} s"
    tqdm.write(f"kill {index} of process {victim} {moment}: {'; '.join(found)}")
    if left_files.exists():
        # Kept for inspection.
        shutil.copytree(left_files, left_files.with_name(f"left-{index}"))
    return True


def draw_kill(
    runs: Runs, random: np.random.Generator, at_operation: bool, share: float
) -> tuple[int, float, int]:
    """Draw the rank to kill, and when, in the first part of a training run.

    Args:
        runs: The runs, after `measure`.
        random: The random generator.
        at_operation: Whether to kill before a file operation; False kills after a time.
        share: The part of a run to draw from, 0 to 1.

    Returns:
        The rank; the seconds after which to kill it (`TIME_LIMIT` if `at_operation`); and the
        number of the file operation, from 1, before which it kills itself (0 if not
        `at_operation`).
    """
    victim = int(random.integers(runs.num_processes))
    if not at_operation:
        return victim, float(random.uniform(0, share * runs.seconds)), 0
    probabilities = runs.operations / runs.operations.sum()
    victim = int(random.choice(runs.num_processes, p=probabilities))
    num_operations = max(1, int(share * runs.operations[victim]))
    return victim, TIME_LIMIT, 1 + int(random.integers(num_operations))


def resume_and_compare(runs: Runs, output: Path) -> list[str]:
    """Resume a killed training run to its end, and compare it with the uninterrupted run.

    Args:
        runs: The runs, after `measure`.
        output: The output folder of the killed run.

    Returns:
        One line for each difference, also if the run failed, or started from step 0 although there
        was a checkpoint.
    """
    has_checkpoint = (output / "latest").exists()
    log = output.with_name(f"{output.name}.log")
    # Delete the killed run's log, so that the log is that of the resumed run.
    log.unlink(missing_ok=True)
    found = runs.finish(output) or differences(runs.folder / "undisturbed", output)
    if has_checkpoint and "starts from step 0" in log.read_text(errors="replace"):
        found.append("a checkpoint was lost: the run started from step 0")
    return found


def differences(reference: Path, output: Path) -> list[str]:
    """Compare the output folders of two finished training runs: summary.json, metrics.jsonl, the
    last and the best weights, and the names of all files.

    Returns:
        One line for each difference; an empty list if the runs are identical.
    """
    expected_summary = json.loads((reference / "summary.json").read_text())
    summary = json.loads((output / "summary.json").read_text())
    found = [
        f"{key} {summary.get(key)} instead of {expected_summary[key]}"
        for key in COMPARED_KEYS
        if summary.get(key) != expected_summary[key]
    ]
    expected = read_metrics(reference)
    lines = read_metrics(output)
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
    in_one_only = list_paths(reference) ^ list_paths(output)
    if in_one_only:
        found.append(f"files in only one of the folders: {', '.join(sorted(in_one_only))}")
    return found


def list_paths(folder: Path) -> set[str]:
    """Return the relative paths of all files and folders in a folder and its subfolders."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read a run's metrics.jsonl, one dict for each line, without tokens_per_second, which differs
    from run to run.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name != "tokens_per_second"}
        for line in lines
    ]


def last_line(output: Path) -> str:
    """Return a phrase that quotes the last line of a run's log, for an error message.

    Args:
        output: The run's output folder; the log file is next to it.
    """
    log = output.with_name(f"{output.name}.log")
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"{log.name} ends with {lines[-1:]}"


if __name__ == "__main__":
    sys.exit(main())
