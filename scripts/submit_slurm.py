"""Submit a run to SLURM, with one `accelerate launch` per node, through submitit.

    python scripts/submit_slurm.py --nodes 2 --gpus_per_node 8 --time 24:00:00 --partition gpu \
        --dry_run -- scripts/finetune.py --model_name_or_path gpt2 --global_batch_size 3072 \
        --output_dir outputs/gpt2

Needs the extra `finetune`. Every start uses `--resume_from_checkpoint auto`, which resumes from the
newest checkpoint in output_dir, if any. A preempted job saves and is requeued, and so is a job at
its time limit, up to --max_timeouts times.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from submitit import AutoExecutor, JobEnvironment
from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import _make_sbatch_string

from hf_ga.errors import ConfigError, HfGaError
from hf_ga.exact.plan_batch import launch_flags
from hf_ga.finetuning.run.cli import guarded, parse_config

# For the launched processes to finish their window and save after SIGTERM.
GRACE_SECONDS = 90
# The most from the SIGTERM of a preemption to the signal that requeues the job, or to SIGKILL.
SIGNAL_SECONDS = 120
RESUME = ("--resume_from_checkpoint", "auto")


@dataclass(frozen=True)
class NodeJob:
    """The task that submitit runs once on each node.

    Attributes:
        command: The script and its flags.
        nodes: Number of nodes.
        processes_per_node: Number of processes on each node.
        use_cpu: Whether the processes compute on CPUs.
        launch_options: Further flags of `accelerate launch`.
    """

    command: tuple[str, ...]
    nodes: int
    processes_per_node: int
    use_cpu: bool = False
    launch_options: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Launch the command and wait for its end.

        Raises:
            HfGaError: If the launched command failed.
        """
        environment = JobEnvironment()
        # The same on all nodes; two jobs on one node rarely share it.
        port = 20000 + int(environment.job_id) % 10000
        words = self.launch_words(environment.node, environment.hostnames[0], port)
        print(shlex.join(words), flush=True)
        variables = self.environment_variables()
        terminated: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
        ignored = getattr(signal, f"SIG{environment.USR_SIG}")
        code = run_to_end(words, variables, ignored)
        if code and terminated:
            # SIGTERM also ended the launched processes: a failure now would prevent the requeue.
            time.sleep(SIGNAL_SECONDS)
        if code:
            raise HfGaError(f"node {environment.node}: exit code {code} of {shlex.join(words)}")

    def checkpoint(self) -> DelayedSubmission:
        """Requeue the job: submitit calls it at preemption and at the time limit. SIGTERM follows,
        and the run saves.
        """
        return DelayedSubmission(self)

    def environment_variables(self) -> dict[str, str]:
        """Return the environment variables of the launched command."""
        variables = dict(os.environ)
        # The venv may not be activated.
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # The default is 30 s.
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_SECONDS)
        if self.use_cpu:
            variables["ACCELERATE_USE_CPU"] = "true"
        return variables

    def launch_words(self, rank: int | str, host: str, port: int | str) -> list[str]:
        """Return the words of the launch command.

        Args:
            rank: Number of the node.
            host: Name of node 0.
            port: The port on which node 0 listens. With one node, Accelerate picks a port.
        """
        flags = [*launch_flags(self.nodes, self.processes_per_node), *self.launch_options]
        if "--config_file" in self.launch_options and "--multi_gpu" in flags:
            # It would override the file's distributed_type: DDP instead of FSDP.
            flags.remove("--multi_gpu")
        if self.nodes > 1:
            flags += [
                "--machine_rank",
                str(rank),
                "--main_process_ip",
                host,
                "--main_process_port",
                str(port),
            ]
        elif self.processes_per_node > 1:
            flags += ["--main_process_port", "0"]
        return ["accelerate", "launch", *flags, *self.command, *RESUME]


def run_to_end(words: Sequence[str], variables: dict[str, str], ignored: signal.Signals) -> int:
    """Run a command. If this process ends first, end the command with SIGTERM, later with SIGKILL.

    Args:
        words: The command.
        variables: Its environment variables.
        ignored: A signal that the command ignores: the one with which SLURM announces a preemption,
            which it sends to all processes of a job.

    Returns:
        The command's exit code.
    """

    def ignore() -> None:
        signal.signal(ignored, signal.SIG_IGN)

    launcher = subprocess.Popen(
        list(words), env=variables, start_new_session=True, preexec_fn=ignore
    )
    try:
        return launcher.wait()
    finally:
        if launcher.poll() is None:
            # They may outlive the launcher, to save.
            processes = psutil.Process(launcher.pid).children(recursive=True)
            os.killpg(launcher.pid, signal.SIGTERM)
            _, still_running = psutil.wait_procs(processes, GRACE_SECONDS)
            for process in still_running:
                process.kill()
            launcher.kill()
            launcher.wait()


def minutes_of(text: str) -> int:
    """Return the minutes of a time limit, given as minutes or as [days-]hours:minutes:seconds.

    >>> [minutes_of(text) for text in ("90", "24:00:00", "1-00:00:30")]
    [90, 1440, 1441]
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if found is None:
        return int(text)
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return days * 1440 + hours * 60 + minutes + -(-seconds // 60)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("command", nargs="+", help="the script and its flags, after --")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument(
        "--gpus_per_node",
        type=int,
        default=8,
        help="one process per GPU; 0: processes on CPUs (default: 8)",
    )
    parser.add_argument(
        "--processes_per_node",
        type=int,
        default=1,
        help="without GPUs: processes per node (default: 1)",
    )
    parser.add_argument(
        "--time",
        type=minutes_of,
        default="24:00:00",
        help="[days-]hours:minutes:seconds (default: 24:00:00)",
    )
    parser.add_argument("--partition", help="queue to submit to (default: the cluster's)")
    parser.add_argument(
        "--cpus_per_task", type=int, help="CPU cores per node (default: the cluster's)"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="other option of sbatch; repeatable",
    )
    parser.add_argument(
        "--setup",
        action="append",
        default=[],
        help="shell line to run first, such as a module load; repeatable",
    )
    parser.add_argument("--job_name", default="hf_ga", help="name in the queue (default: hf_ga)")
    parser.add_argument(
        "--max_timeouts", type=int, default=3, help="restarts after the time limit (default: 3)"
    )
    parser.add_argument(
        "--accelerate_config", help="file from accelerate_configs/, for FSDP (default: DDP)"
    )
    parser.add_argument(
        "--mixed_precision", choices=["no", "fp16", "bf16"], help="overrides the file (default: no)"
    )
    parser.add_argument(
        "--folder",
        default="outputs/slurm",
        help="folder for logs, shared by all nodes (default: outputs/slurm)",
    )
    parser.add_argument(
        "--cluster",
        choices=["slurm", "local"],
        default="slurm",
        help="local: this machine (default: slurm)",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for the end; exit code 1 if the run failed"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="print the batch script and the launch commands, submit nothing",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse flags, print or submit.

    Returns:
        The exit code: 2 for bad input, explained in one line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(submit, arguments)


def node_job(flags: argparse.Namespace) -> NodeJob:
    """Return the task of each node, and check the flags of finetune.py now, not after hours in a
    queue.

    Raises:
        ConfigError: If the flags of finetune.py are invalid.
    """
    processes = flags.gpus_per_node or flags.processes_per_node
    script, *script_flags = flags.command
    if Path(script).name == "finetune.py":
        config = parse_config([*script_flags, *RESUME])
        config.check()
        config.layout(flags.nodes * processes)
    options = {"--config_file": flags.accelerate_config, "--mixed_precision": flags.mixed_precision}
    words = tuple(word for name, value in options.items() if value for word in (name, value))
    return NodeJob(
        tuple(flags.command),
        flags.nodes,
        processes,
        use_cpu=not flags.gpus_per_node,
        launch_options=words,
    )


def sbatch_parameters(flags: argparse.Namespace) -> dict:
    """Return submitit's parameters of the batch script."""
    # The other nodes would wait for a failed one.
    srun = ["--kill-on-bad-exit=1"]
    if flags.cpus_per_task:
        # srun does not inherit it from sbatch since SLURM 22.05.
        srun.append(f"--cpus-per-task={flags.cpus_per_task}")
    more = {"requeue": True} | dict(text.split("=", 1) for text in flags.sbatch)
    parameters = {
        "job_name": flags.job_name,
        "time": flags.time,
        "nodes": flags.nodes,
        "ntasks_per_node": 1,
    }
    for name in ("partition", "cpus_per_task", "gpus_per_node"):
        value = getattr(flags, name)
        if value:
            parameters[name] = value
    return {**parameters, "setup": flags.setup, "srun_args": srun, "additional_parameters": more}


def submit(arguments: Sequence[str]) -> int:
    """Print, or submit and optionally wait.

    Returns:
        The exit code.
    """
    flags = make_parser().parse_args(arguments)
    job = node_job(flags)
    if flags.dry_run:
        print(
            _make_sbatch_string(
                "python -m submitit.core._submit", flags.folder, **sbatch_parameters(flags)
            )
        )
        for node in range(flags.nodes):
            print(f"# node {node}: {shlex.join(job.launch_words(node, 'HOST', 'PORT'))}")
        return 0
    try:
        executor = AutoExecutor(
            flags.folder, flags.cluster, **{f"{flags.cluster}_max_num_timeout": flags.max_timeouts}
        )
    except RuntimeError as error:
        raise ConfigError(
            f"SLURM is not available on this machine ({error}). Use --cluster local or --dry_run."
        ) from error
    if flags.cluster == "local":
        executor.update_parameters(
            nodes=flags.nodes, timeout_min=flags.time, gpus_per_node=flags.gpus_per_node
        )
    else:
        executor.update_parameters(
            **{f"slurm_{name}": value for name, value in sbatch_parameters(flags).items()}
        )
    submitted = executor.submit(job)
    print(f"job {submitted.job_id}, log: {submitted.paths.stdout}", flush=True)
    failure = submitted.exception() if flags.wait else None
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
