"""A run as a SLURM job through submitit: one `accelerate launch` on each node, resumed where it was preempted."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hf_ga.errors import ConfigError, HfGaError
from hf_ga.recovery.checkpoint import list_checkpoints
from hf_ga.run.batch_arithmetic import launch_flags
from hf_ga.run.cli import parse_config
from hf_ga.run.slurm_executors import Resources

GRACE_SECONDS = 90  # for launched processes to finish their window and save, once they are asked to stop
SIGNAL_SECONDS = 120.0  # between the SIGTERM of a preemption and the signal that queues the job again, or the end


@dataclass
class NodeJob:
    """What submitit runs once on each node, and queues again when the job is preempted or runs into its time limit.

    Attributes:
        command: the script with its flags.
        nodes: machines.
        processes_per_node: processes on each of them.
        use_cpu: whether the processes run on CPUs.
        output_dir: where the script keeps `checkpoint-*` folders; None: restarts begin anew.
        launch_options: further flags of `accelerate launch`.
        restarts: how often the job was queued again.
        first_start: seconds since the epoch; None before it.
        found_empty: whether output_dir was empty then.
    """

    command: tuple[str, ...]
    nodes: int
    processes_per_node: int
    use_cpu: bool = False
    output_dir: str | None = None
    launch_options: tuple[str, ...] = ()
    restarts: int = 0
    first_start: float | None = None
    found_empty: bool = False

    def __call__(self) -> None:
        """Run to the end on this node.

        Raises:
            HfGaError: the launched command ended with another exit code than 0.
        """
        from submitit import JobEnvironment

        environment = JobEnvironment()
        self._note_start()
        words = self.node_command(environment.node, environment.hostnames[0], main_process_port(environment.job_id))
        print(shlex.join(words), flush=True)
        more = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # the environment may not be activated
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS),  # or else the launcher ends its processes after 30 s
        }
        if self.use_cpu:
            more["ACCELERATE_USE_CPU"] = "true"
        terminated: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
        try:
            code = run_to_end(words, os.environ | more, environment.USR_SIG)
            if code and terminated:  # it stopped the launched processes, too; to fail now would lose the place in the queue
                time.sleep(SIGNAL_SECONDS)
        finally:
            signal.signal(signal.SIGTERM, before)
        if code:
            raise HfGaError(f"node {environment.node}: exit code {code} of {shlex.join(words)}")

    def checkpoint(self) -> Any:
        """submitit calls this at preemption and at the time limit. Returns the `DelayedSubmission` that is queued instead.

        There is nothing to save here: the script is sent SIGTERM next, at which it finishes its window and saves.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(replace(self, restarts=self.restarts + 1))

    def node_command(self, rank: int | str, host: str, port: int | str) -> list[str]:
        """The launch on one node.

        Args:
            rank: of the node, from 0.
            host: name of node 0.
            port: that node 0 listens on; with one node Accelerate takes a free one.
        """
        flags = [*launch_flags(self.nodes, self.processes_per_node), *self.launch_options]
        if "--config_file" in self.launch_options and "--multi_gpu" in flags:
            flags.remove("--multi_gpu")  # it would win over the file's distributed_type: DDP instead of FSDP
        if self.nodes > 1:
            flags += ["--machine_rank", str(rank), "--main_process_ip", host, "--main_process_port", str(port)]
        elif self.processes_per_node > 1:
            flags += ["--main_process_port", "0"]
        return ["accelerate", "launch", *flags, *self.words_of_start()]

    def words_of_start(self) -> list[str]:
        """The script and its flags, as this start needs them: resumed where an earlier start of this job left a checkpoint.

        Without one, what an earlier start has begun in an output_dir that was empty is begun again. Flags that come later win.
        """
        words = list(self.command)
        if self.output_dir is None or not self.restarts:
            return words
        overwrites, resumes = (_has_flag(words, name) for name in ("--overwrite_output_dir", "--resume_from_checkpoint"))
        saved = [path for path in list_checkpoints(Path(self.output_dir)) if path.stat().st_mtime >= (self.first_start or 0)]
        if saved:
            return [*words, "--resume_from_checkpoint", "auto", *(["--overwrite_output_dir", "false"] if overwrites else [])]
        begun = self.found_empty and not _is_empty(self.output_dir)
        return [*words, "--overwrite_output_dir"] if begun and not resumes and not overwrites else words

    def _note_start(self) -> None:
        if self.first_start is not None:
            return
        # SLURM queues a job again by itself when a node fails. Nothing was noted then, and any checkpoint is taken to be its own.
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", 0))
        self.first_start = 0.0 if self.restarts else time.time()
        self.found_empty = not self.restarts and self.output_dir is not None and _is_empty(self.output_dir)


def run_to_end(words: Sequence[str], environment: dict[str, str], ignored_signal: str) -> int:
    """Run a command, and stop it with all that it started if this process is ended first: by SIGTERM, at which finetune.py saves,
    and after a while by SIGKILL. Returns the exit code.

    Args:
        words: the command.
        environment: its environment variables.
        ignored_signal: such as USR2, with which SLURM tells of preemption: sent to every process of a job, it would kill those
            that do not know it before this process has queued the job again.
    """
    number = getattr(signal, f"SIG{ignored_signal}")
    process = subprocess.Popen(
        list(words), env=environment, start_new_session=True, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN)
    )
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(
                process.pid, signal.SIGTERM
            )  # accelerate's launcher passes it on to its workers, which are groups of their own
            if not _group_ends(process, GRACE_SECONDS + 10):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _group_ends(process: subprocess.Popen, seconds: float) -> bool:
    """Whether it ends in time. Of one process, accelerate's launcher ends at once, and the run later, in the same group."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        process.poll()  # an ended process stays in its group until then
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def node_job(command: Sequence[str], resources: Resources, launch_options: Sequence[str]) -> NodeJob:
    """What each node runs. The flags of `finetune.py` are checked now: not after hours in a queue.

    Raises:
        ConfigError: no command, or flags that finetune.py refuses.
    """
    if not command:
        raise ConfigError("there is nothing to run: put the script and its flags last, after --.")
    script, *flags = command
    if Path(script).name == "finetune.py":
        config = parse_config(flags)
        config.check()
        config.layout(resources.nodes * resources.processes_per_node)
        output_dir: str | None = config.output_dir
    else:
        output_dir = _value_of(flags, "--output_dir")
    return NodeJob(
        tuple(command),
        resources.nodes,
        resources.processes_per_node,
        use_cpu=resources.gpus_per_node == 0,
        output_dir=output_dir,
        launch_options=tuple(launch_options),
    )


def main_process_port(job_id: str) -> int:
    """The same on all nodes of a job, different for most jobs that meet on a node; below the ports that Linux gives away.

    >>> main_process_port("1234567")
    24567
    """
    return 20000 + int(re.sub(r"\D", "", job_id) or 0) % 10000


def _has_flag(words: Sequence[str], name: str) -> bool:
    return any(word.partition("=")[0].replace("-", "_") == name.replace("-", "_") for word in words)


def _value_of(words: Sequence[str], name: str) -> str | None:
    """Of a flag that is given as `--name value` or `--name=value`, with dashes or underscores."""
    for word, following in zip_longest(words, words[1:]):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == name.replace("-", "_"):
            return value if equals else following
    return None


def _is_empty(folder: str) -> bool:
    return not Path(folder).is_dir() or not any(Path(folder).iterdir())
