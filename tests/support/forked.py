"""Phases of a job, each on processes of its own that have imported everything: forked, because
imports would take most of the time.

    python tests/forked.py JOB.json

JOB.json is a list of phases, done one after the other; ends with code 1 at the first one that does
not end as it should. See `phase`. The environment of each process is that of `accelerate launch`.
"""

import json
import multiprocessing
import os
import pickle
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest
import torch.distributed.checkpoint.state_dict
import transformers as tf
from accelerate.state import AcceleratorState
from launching import free_port
from runs import without_curves

from hf_ga.finetuning.run import finetune, loop
from hf_ga.finetuning.run.flags.config import FinetuneConfig

LIMIT = 400  # seconds for all phases of one call, which take a quarter of it on an idle machine
FORK = multiprocessing.get_context("fork")
STOPPED = 9  # exit code of a process that was stopped where a phase says so
KINDS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp1": {
        "FSDP_VERSION": "1",
        "FSDP_RESHARD_AFTER_FORWARD": "FULL_SHARD",
        "FSDP_USE_ORIG_PARAMS": "true",
    },
    "fsdp2": {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    "fsdp2 from main": {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    },
}
SHARDED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_SYNC_MODULE_STATES": "false",
}


def phase(
    config: FinetuneConfig,
    kind: str = "ddp",
    processes: int = 1,
    windows: int | None = None,
    precision: str = "no",
) -> dict:
    """A run on so many processes; after so many windows all of them are gone at once, as if
    killed.
    """
    return {
        "config": config.to_dict(),
        "kind": kind,
        "processes": processes,
        "windows": windows,
        "precision": precision,
    }


def run_phases(folder: Path, phases: list[dict]) -> str:
    """Do the phases; returns what they printed."""
    return run_script(__file__, folder, phases)


def run_script(script: str, folder: Path, job: Any) -> str:
    """A script with a file of what it is to do; returns what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job))
    code, printed, errors = run_forked([script, str(folder / "job.json")], folder)
    assert code == 0, (printed + errors)[-4000:]
    return printed


def run_forked(words: list[str], folder: Path) -> tuple[int | None, str, str]:
    """Run a script in a folder, in a process forked from this one, which has imported the libraries.

    Returns:
        Its exit code (None: it was killed after `LIMIT` seconds), output and errors.
    """
    if torch.cuda.is_available():  # autograd's threads for a GPU survive no fork
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        return done.returncode, done.stdout, done.stderr
    with TemporaryFile("w+") as printed, TemporaryFile("w+") as errors:
        process = ForkedScript(words, folder, printed, errors)
        process.join(LIMIT)
        code = process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        printed.seek(0)
        errors.seek(0)
        return code, printed.read(), errors.read()


def start_script(
    words: list[str], folder: Path, printed: IO[str], errors: IO[str]
) -> "ForkedScript | subprocess.Popen":
    """Start a script in a folder, in a process that is forked from this one if it can be."""
    if torch.cuda.is_available():
        command = [sys.executable, *words]
        return subprocess.Popen(command, cwd=folder, stdout=printed, stderr=errors)
    return ForkedScript(words, folder, printed, errors)


class ForkedScript(FORK.Process):
    """A script in a session of its own, as if started in a folder by Python; `poll` and `wait` are
    those of a Popen.
    """

    def __init__(
        self,
        words: list[str],
        folder: Path,
        printed: IO[str],
        errors: IO[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        super().__init__(target=self._become, args=(words, folder, printed, errors, environment))
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> None:
        self.join()

    @staticmethod
    def _become(
        words: list[str],
        folder: Path,
        printed: IO[str],
        errors: IO[str],
        environment: dict[str, str] | None,
    ) -> None:
        os.setsid()
        os.dup2(printed.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        # pytest's are written at the end.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment or {})
        os.chdir(folder)
        warnings.simplefilter("ignore")  # which are errors in a test
        AcceleratorState._reset_state(True)
        if words[0] == "-m":
            words = words[1:]
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")


class ForkedPython(ForkedScript):
    """As `subprocess.Popen` of Python, in a process that has imported the libraries."""

    def __init__(
        self,
        args: Sequence[str],
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdout: IO[str] | None = None,
        stderr: IO[str] | int | None = None,
        **_: Any,
    ) -> None:
        words = [word for word in args[1:] if word != "-u"]
        printed = stdout or sys.stdout
        errors = printed if stderr == subprocess.STDOUT else stderr or sys.stderr
        super().__init__(words, cwd or Path.cwd(), printed, errors, env)

    def run(self) -> None:
        """Without the handlers of signals of the process that starts it."""
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        super().run()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.join(timeout)
        return self.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def environment_of(kind: str, processes: int) -> dict[str, str]:
    port = str(free_port())
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    return {
        "ACCELERATE_MIXED_PRECISION": precision,
        **world,
        **(SHARDED if kind != "ddp" else {}),
        **KINDS[kind],
    }


def fork(work: Callable[[], None], environment: dict[str, str]) -> int:
    """Returns the id of a process that does the work and ends."""
    if child := os.fork():
        return child
    os.environ.update(environment)
    os.sched_getaffinity = lambda pid: {
        0
    }  # one thread: several would wait for each other beside other tests
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def together(work: Callable[[], None], kind: str, processes: int) -> set[int]:
    """Exit codes of the processes that did the work together; one that fails ends all."""
    if processes == 1:
        return {os.waitstatus_to_exitcode(os.waitpid(fork(work, {}), 0)[1])}
    environment = environment_of(kind, processes)
    running = {
        fork(work, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    }
    codes = set()
    while running:
        child, status = os.wait()
        running.remove(child)
        codes.add(os.waitstatus_to_exitcode(status))
        if codes - {0, STOPPED}:
            for other in running:
                os.kill(other, signal.SIGKILL)
    return codes


def on_two_ranks(work: Callable[[], Any], kind: str = "ddp", limit: float = 60) -> list[Any]:
    """What `work` returns on each of two ranks, forked from this process; the text of what it
    raises.
    """
    return on_ranks(work, 2, kind, limit)


def on_ranks(
    work: Callable[[], Any], num_processes: int, kind: str = "ddp", limit: float = 60
) -> list[Any]:
    """As `on_two_ranks`, on any number of them.

    limit: seconds for each rank; after them all ranks are ended and the test fails.
    """
    if torch.cuda.is_available():
        pytest.skip("autograd's threads for a GPU survive no fork")
    environment = environment_of(kind, num_processes)
    ranks = []
    ends = []
    for rank in range(num_processes):
        end, other = FORK.Pipe(duplex=False)
        mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(FORK.Process(target=_be_rank, args=(mine, work, other), daemon=True))
        ranks[-1].start()
        other.close()  # so that the end of a rank is seen
        ends.append(end)
    try:
        if not all(end.poll(limit) for end in ends):
            others = [_received(end) for end in ends if end.poll(0)]
            raise AssertionError(f"a rank ran for more than {limit} s; the others: {others}")
        return [_received(end) for end in ends]
    finally:
        for process in ranks:
            process.join(5)
            process.kill()  # what waits for a rank that is gone


def without_errors(found: list[Any]) -> list[Any]:
    """What ranks returned, if none of them raised anything."""
    errors = [one for one in found if isinstance(one, str)]
    assert not errors, "\n".join(errors)
    return found


def _received(end: Connection) -> Any:
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return "EOFError: the rank was ended from outside, by torch or by a signal"


def _be_rank(environment: dict[str, str], work: Callable[[], Any], end: Connection) -> None:
    warnings.simplefilter("ignore")  # torch's own, about its next releases
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)
    with (
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):  # pytest's files would be limited by `disk_limits`
        found = outcome(work)
    end.send_bytes(pickle.dumps(found))
    os._exit(0)


def outcome(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the text of what it raises."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def stop_after(windows: int) -> None:
    """End this process, without any farewell, where it would compute the window after so many."""
    done = 0
    train_step = loop.train_step

    def step(*args, **kwargs):
        nonlocal done
        if done == windows:
            os._exit(STOPPED)
        done += 1
        return train_step(*args, **kwargs)

    loop.train_step = step


def run_of(one: dict) -> Callable[[], None]:
    def work() -> None:
        os.environ["ACCELERATE_MIXED_PRECISION"] = one["precision"]
        if one["windows"] is not None:
            stop_after(one["windows"])
        finetune.finetune(FinetuneConfig(**one["config"]))

    return work


def main(phases: list[dict]) -> None:
    for number, one in enumerate(phases):
        expected = {0 if one["windows"] is None else STOPPED}
        if (codes := together(run_of(one), one["kind"], one["processes"])) != expected:
            sys.exit(f"phase {number} ended with {codes}, not {expected}")


if __name__ == "__main__":
    tf.logging.set_verbosity_error()
    with without_curves():
        main(json.loads(Path(sys.argv[1]).read_text()))
