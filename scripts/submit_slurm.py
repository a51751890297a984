"""Submit a run to SLURM, with one `accelerate launch` per node, through submitit.

    python scripts/submit_slurm.py --nodes 2 --gpus_per_node 8 --time 24:00:00 --partition gpu \
        --dry_run -- scripts/finetune.py --model_name_or_path gpt2 --global_batch_size 3072 \
        --output_dir outputs/gpt2

Needs the extra `finetune`. Every start uses `--resume_from_checkpoint auto`, which resumes from the
newest checkpoint in output_dir, if any. A preempted job saves and is requeued, and so is a job at
its time limit, up to --max_timeouts times.
"""

import argparse
import math
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
from hf_ga.finetuning.run.flags.cli import guarded, parse_config
from hf_ga.order.plan_batch import launch_flags

# Time that launched processes have after SIGTERM to finish their window and save.
GRACE_SECONDS = 90
# Maximum time from the SIGTERM of a preemption to the signal that requeues the job, or to SIGKILL.
SIGNAL_SECONDS = 120
RESUME = ("--resume_from_checkpoint", "auto")


@dataclass(frozen=True)
class NodeJob:
    """The callable that submitit runs once on each SLURM node: it starts `accelerate launch`.

    Attributes:
        command: The script and its flags.
        nodes: Number of nodes.
        processes_per_node: Number of processes on each node.
        use_cpu: Whether the processes train on CPUs.
        launch_options: More flags for `accelerate launch`.
    """

    command: tuple[str, ...]
    nodes: int
    processes_per_node: int
    use_cpu: bool = False
    launch_options: tuple[str, ...] = ()

    def __call__(self) -> None:
        """Run `accelerate launch` on this node and wait until it ends; submitit calls this.

        Raises:
            HfGaError: If the launched command failed.
        """
        environment = JobEnvironment()
        # The same port on all nodes; two jobs on one node rarely have the same one.
        port = 20000 + int(environment.job_id) % 10000
        words = self.launch_words(environment.node, environment.hostnames[0], port)
        print(shlex.join(words), flush=True)
        variables = self.environment_variables()
        received_sigterm: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: received_sigterm.append(number))
        preemption_signal = getattr(signal, f"SIG{environment.USR_SIG}")
        code = run_to_end(words, variables, preemption_signal)
        if code and received_sigterm:
            # A preemption, whose SIGTERM also ended the launched processes. To fail now would
            # prevent the requeue, so wait for the signal that requeues the job.
            time.sleep(SIGNAL_SECONDS)
        if code:
            raise HfGaError(f"node {environment.node}: exit code {code} of {shlex.join(words)}")

    def checkpoint(self) -> DelayedSubmission:
        """Return the job to requeue: the same one, which resumes from the newest checkpoint.

        submitit calls this at a preemption and at the time limit. SLURM then sends SIGTERM, after
        which the run saves a checkpoint.
        """
        return DelayedSubmission(self)

    def environment_variables(self) -> dict[str, str]:
        """Return the environment variables of `accelerate launch`: this process's, with changes."""
        variables = dict(os.environ)
        # The node may run without the activated virtual environment: find `accelerate` in it.
        variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # torch's launcher kills processes this long after SIGTERM; its default is 30 s.
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(GRACE_SECONDS)
        if self.use_cpu:
            variables["ACCELERATE_USE_CPU"] = "true"
        return variables

    def launch_words(self, rank: int | str, host: str, port: int | str) -> list[str]:
        """Return the `accelerate launch` command for one node, as a list of arguments.

        Args:
            rank: Index of the node, from 0.
            host: Host name of node 0.
            port: The TCP port on which node 0 listens. Not used for one node, where Accelerate
                picks a free port.
        """
        flags = [*launch_flags(self.nodes, self.processes_per_node), *self.launch_options]
        if "--config_file" in self.launch_options and "--multi_gpu" in flags:
            # --multi_gpu would override the config file's distributed_type: DDP instead of FSDP.
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


def run_to_end(
    words: Sequence[str], variables: dict[str, str], ignored_signal: signal.Signals
) -> int:
    """Run the launch command in a new process group and wait until it ends.

    If waiting is interrupted by an exception, send SIGTERM to all its processes, and SIGKILL after
    `GRACE_SECONDS`.

    Args:
        words: The command as a list of arguments.
        variables: Its environment variables.
        ignored_signal: A signal that the command must ignore: the one with which SLURM announces a
            preemption, because SLURM sends it to all processes of a job.

    Returns:
        The command's exit code.
    """

    def ignore_signal() -> None:
        """Ignore the signal in the child process."""
        signal.signal(ignored_signal, signal.SIG_IGN)

    launcher = subprocess.Popen(
        list(words), env=variables, start_new_session=True, preexec_fn=ignore_signal
    )
    try:
        return launcher.wait()
    finally:
        if launcher.poll() is None:
            # The training processes may outlive the launcher while they save a checkpoint.
            processes = psutil.Process(launcher.pid).children(recursive=True)
            os.killpg(launcher.pid, signal.SIGTERM)
            _, still_running = psutil.wait_procs(processes, GRACE_SECONDS)
            for process in still_running:
                process.kill()
            launcher.kill()
            launcher.wait()


def minutes_of(text: str) -> int:
    """Parse a time limit in SLURM's format, minutes or [days-]hours:minutes:seconds, and return it
    in minutes, rounded up.

    >>> [minutes_of(text) for text in ("90", "24:00:00", "1-00:00:30")]
    [90, 1440, 1441]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return int(text)
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return days * 24 * 60 + hours * 60 + minutes + math.ceil(seconds / 60)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command-line flags of scripts/submit_slurm.py."""
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
    """Run the command scripts/submit_slurm.py.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 1 if a run failed that the command waited for, 2 for bad input, explained in
        one line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(submit, arguments)


def node_job(flags: argparse.Namespace) -> NodeJob:
    """Build the job that SLURM runs on each node. If its command is finetune.py, check its flags
    now, and not after hours in the queue.

    Args:
        flags: The parsed command-line flags.

    Raises:
        ConfigError: If the flags of finetune.py are invalid.
    """
    processes_per_node = flags.gpus_per_node or flags.processes_per_node
    script, *script_flags = flags.command
    if Path(script).name == "finetune.py":
        config = parse_config([*script_flags, *RESUME])
        config.check()
        # Raises if the global batch cannot be split over these processes.
        config.layout(flags.nodes * processes_per_node)
    launch_options: list[str] = []
    if flags.accelerate_config:
        launch_options += ["--config_file", flags.accelerate_config]
    if flags.mixed_precision:
        launch_options += ["--mixed_precision", flags.mixed_precision]
    return NodeJob(
        command=tuple(flags.command),
        nodes=flags.nodes,
        processes_per_node=processes_per_node,
        use_cpu=not flags.gpus_per_node,
        launch_options=tuple(launch_options),
    )


def sbatch_parameters(flags: argparse.Namespace) -> dict:
    """Return submitit's parameters for SLURM's batch script: resources, options of sbatch and srun,
    and shell lines to run first.

    Args:
        flags: The parsed command-line flags.
    """
    # If one node fails, end the job: the other nodes would wait for it.
    srun_options = ["--kill-on-bad-exit=1"]
    if flags.cpus_per_task:
        # srun does not inherit it from sbatch since SLURM 22.05.
        srun_options.append(f"--cpus-per-task={flags.cpus_per_task}")
    sbatch_options = {"requeue": True}
    for option in flags.sbatch:
        name, value = option.split("=", 1)
        sbatch_options[name] = value
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
    parameters["setup"] = flags.setup
    parameters["srun_args"] = srun_options
    parameters["additional_parameters"] = sbatch_options
    return parameters


def submit(arguments: Sequence[str]) -> int:
    """Submit a training run to SLURM, or to this machine with --cluster local; with --dry_run only
    print the batch script and the launch commands; with --wait, wait until the run ends.

    Args:
        arguments: The command-line flags.

    Returns:
        The exit code: 1 if a run failed that the command waited for.
    """
    flags = make_parser().parse_args(arguments)
    job = node_job(flags)
    if flags.dry_run:
        print_dry_run(job, flags)
        return 0
    submitted = make_executor(flags).submit(job)
    print(f"job {submitted.job_id}, log: {submitted.paths.stdout}", flush=True)
    failure = submitted.exception() if flags.wait else None
    if failure:
        print(failure, file=sys.stderr)
    return 1 if failure else 0


def print_dry_run(job: NodeJob, flags: argparse.Namespace) -> None:
    """Print SLURM's batch script and the launch command of each node, without submitting the job.

    Args:
        job: The job of each node.
        flags: The parsed command-line flags.
    """
    command = "python -m submitit.core._submit"
    print(_make_sbatch_string(command, flags.folder, **sbatch_parameters(flags)))
    for node in range(flags.nodes):
        print(f"# node {node}: {shlex.join(job.launch_words(node, 'HOST', 'PORT'))}")


def make_executor(flags: argparse.Namespace) -> AutoExecutor:
    """Build the submitit executor that submits a job to SLURM, or to this machine with --cluster
    local.

    Args:
        flags: The parsed command-line flags.

    Raises:
        ConfigError: If SLURM is not available on this machine.
    """
    timeout_options = {f"{flags.cluster}_max_num_timeout": flags.max_timeouts}
    try:
        executor = AutoExecutor(flags.folder, flags.cluster, **timeout_options)
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
    return executor


if __name__ == "__main__":
    sys.exit(main())
