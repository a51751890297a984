"""What a job asks SLURM for, and submitit's executors for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ga.errors import ConfigError


@dataclass(frozen=True)
class Resources:
    """What a job asks SLURM for.

    Attributes:
        nodes: machines.
        gpus_per_node: GPUs on each; 0: processes run on CPUs.
        processes_per_node: processes that `accelerate launch` starts on each.
        minutes: time limit of one start.
        max_timeouts: how often a job that ran into its time limit is queued again. (Preempted jobs always are.)
        job_name: its name in the queue.
        setup: shell lines that come first (modules, environment).
        more: further options of sbatch without their dashes: partition, account, mem, ...
    """

    nodes: int
    gpus_per_node: int
    processes_per_node: int
    minutes: int
    max_timeouts: int
    job_name: str
    setup: tuple[str, ...]
    more: dict[str, str]


def slurm_executor(folder: Path, resources: Resources) -> Any:
    """submitit's `SlurmExecutor` for these resources.

    Args:
        folder: of logs and submitted jobs; all nodes must see it.
        resources: what to ask for.
    """
    from submitit import SlurmExecutor

    executor = SlurmExecutor(folder, max_num_timeout=resources.max_timeouts)
    executor.update_parameters(**_sbatch_parameters(resources))
    return executor


def sbatch_script(folder: Path, resources: Resources) -> str:
    """What `slurm_executor` would hand to sbatch. Works without SLURM."""
    from submitit import SlurmExecutor

    class WithoutSlurm(SlurmExecutor):
        """submitit refuses to make an executor where there is no srun."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    executor = WithoutSlurm(folder, max_num_timeout=resources.max_timeouts)
    executor.update_parameters(**_sbatch_parameters(resources))
    return executor._make_submission_file_text(executor._submitit_command_str, uid="dry_run")


def local_executor(folder: Path, resources: Resources) -> Any:
    """submitit's `LocalExecutor`: the same job on this machine.

    Raises:
        ConfigError: more than one node.
    """
    from submitit import LocalExecutor

    if resources.nodes > 1:
        raise ConfigError(f"cluster local is this machine: nodes must be 1, got {resources.nodes}.")
    executor = LocalExecutor(folder, max_num_timeout=resources.max_timeouts)
    executor.update_parameters(timeout_min=resources.minutes, gpus_per_node=resources.gpus_per_node)
    return executor


def minutes_of(text: str) -> int:
    """A time limit in one of SLURM's ways to write it, rounded up to whole minutes.

    Raises:
        ConfigError: none of them, or no time at all.

    >>> [minutes_of(text) for text in ("90", "90:30", "24:00:00", "2-12", "1-00:30")]
    [90, 91, 1440, 3600, 1470]
    """
    days, dash, rest = text.rpartition("-")
    parts = [*(days or "0").split(":"), *rest.split(":")]
    if not all(part.isdigit() for part in parts) or len(parts) > 4 or (dash and not days):
        raise ConfigError(
            f"time must be minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:minutes[:seconds]], got {text}."
        )
    day, *numbers = map(int, parts)
    first = 3600 if dash or len(numbers) == 3 else 60  # seconds in one unit of the first number
    seconds = 86400 * day + sum(number * first // 60**i for i, number in enumerate(numbers))
    if seconds < 1:
        raise ConfigError(f"time must be at least one minute, got {text}.")
    return -(-seconds // 60)


def _sbatch_parameters(resources: Resources) -> dict[str, Any]:
    more = {name.replace("_", "-"): value for name, value in resources.more.items()}
    srun = ["--kill-on-bad-exit=1"]  # the other nodes would wait for one that failed
    if "cpus-per-task" in more:
        srun.append(f"--cpus-per-task={more['cpus-per-task']}")  # srun does not take it from sbatch since SLURM 22.05
    gpus = {"gpus_per_node": resources.gpus_per_node} if resources.gpus_per_node else {}
    return {
        "job_name": resources.job_name,
        "time": resources.minutes,
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        **gpus,
        "setup": list(resources.setup),
        "srun_args": srun,
        "additional_parameters": {"requeue": True, **more},
    }
