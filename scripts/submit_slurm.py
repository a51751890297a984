"""Submit a run to SLURM, one `accelerate launch` a node, resumed after preemption: `python scripts/submit_slurm.py --help`.

    python scripts/submit_slurm.py --nodes 2 --gpus_per_node 8 --time 24:00:00 --partition gpu --dry_run -- \
        scripts/finetune.py --model_name_or_path gpt2 --global_batch_size 3072 --output_dir outputs/gpt2

Needs the extra `slurm` (submitit). A preempted job is queued again and goes on from its newest checkpoint, and so does, up to
--max_timeouts times, one that ran into its time limit. --dry_run prints what would be submitted; --cluster local runs it here.
"""

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_ga.errors import ConfigError, HfGaError
from hf_ga.run.slurm import NodeJob, node_job
from hf_ga.run.slurm_executors import Resources, local_executor, minutes_of, sbatch_script, slurm_executor


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse flags, submit or print. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    flags = make_parser().parse_args(words[:end])
    try:
        if importlib.util.find_spec("submitit") is None:
            raise ConfigError('submitit is not installed: pip install "hf_ga[slurm]".')
        resources = read_resources(flags)
        options = [("--config_file", flags.accelerate_config), ("--mixed_precision", flags.mixed_precision)]
        job = node_job(words[end + 1 :], resources, [word for pair in options if pair[1] for word in pair])
        return submit(flags, resources, job)
    except HfGaError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The flags before `--`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument("--gpus_per_node", type=int, default=8, help="GPUs on each, one process a GPU; 0: CPUs (default: 8)")
    parser.add_argument("--processes_per_node", type=int, help="only without GPUs: processes on each node (default: 1)")
    parser.add_argument("--time", default="24:00:00", help="limit of one start, as SLURM writes it (default: 24:00:00)")
    parser.add_argument("--partition", help="queue to submit to (default: the cluster's)")
    parser.add_argument("--account", help="account to charge (default: yours)")
    parser.add_argument("--mem", help="memory of each node, such as 480G; 0: all of it (default: the cluster's)")
    parser.add_argument("--cpus_per_task", type=int, help="CPU cores of each node's task (default: the cluster's)")
    parser.add_argument("--sbatch", action="append", default=[], metavar="NAME=VALUE", help="other option of sbatch; repeatable")
    parser.add_argument("--setup", action="append", default=[], help="shell line to run first, such as a module load; repeatable")
    parser.add_argument("--job_name", default="hf_ga", help="name in the queue (default: hf_ga)")
    parser.add_argument("--max_timeouts", type=int, default=3, help="restarts after the time limit (default: 3)")
    parser.add_argument("--accelerate_config", help="file from accelerate_configs/ for FSDP and the like (default: DDP)")
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], help="wins over the file (default: no)")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/slurm"), help="of logs, seen by all nodes (default: outputs/slurm)"
    )
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm", help="local: on this machine (default: slurm)")
    parser.add_argument("--wait", action="store_true", help="wait for the end, and exit with 1 if the run failed")
    parser.add_argument("--dry_run", action="store_true", help="print the batch script and each node's command; submit nothing")
    return parser


def read_resources(flags: argparse.Namespace) -> Resources:
    """Check and derive.

    Raises:
        ConfigError: a number that is too small, processes given beside GPUs, or a malformed --sbatch or --time.
    """
    for name, least in {"nodes": 1, "gpus_per_node": 0, "processes_per_node": 1, "cpus_per_task": 1, "max_timeouts": 0}.items():
        value = getattr(flags, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}.")
    if flags.gpus_per_node and flags.processes_per_node not in (None, flags.gpus_per_node):
        raise ConfigError(
            f"processes_per_node is gpus_per_node ({flags.gpus_per_node}), got {flags.processes_per_node}: leave it out."
        )
    if wrong := [text for text in flags.sbatch if not text.partition("=")[2]]:
        raise ConfigError(f"sbatch takes NAME=VALUE, got {wrong[0]}.")
    named = {name: getattr(flags, name) for name in ("partition", "account", "mem", "cpus_per_task")}
    more = {name: str(value) for name, value in named.items() if value is not None}
    more |= {text.partition("=")[0].lstrip("-"): text.partition("=")[2] for text in flags.sbatch}
    processes = flags.gpus_per_node or flags.processes_per_node or 1
    limits = (minutes_of(flags.time), flags.max_timeouts)
    return Resources(flags.nodes, flags.gpus_per_node, processes, *limits, flags.job_name, tuple(flags.setup), more)


def submit(flags: argparse.Namespace, resources: Resources, job: NodeJob) -> int:
    """Print, or submit and perhaps wait. Returns the exit code."""
    if flags.dry_run:
        print(sbatch_script(flags.folder, resources))
        print("# what the task on each node starts (HOST: node 0; PORT: 20000 + job id % 10000):")
        for node in range(resources.nodes):
            print(f"# node {node}: {shlex.join(job.node_command(node, 'HOST', 'PORT'))}")
        return 0
    try:
        executor = (local_executor if flags.cluster == "local" else slurm_executor)(flags.folder, resources)
    except RuntimeError as error:
        raise ConfigError(f"this machine submits to no SLURM: {error} --dry_run and --cluster local work without.") from error
    submitted = executor.submit(job)
    print(f"job {submitted.job_id}, log: {submitted.paths.stdout}", flush=True)
    if not flags.wait:
        return 0
    failure = submitted.exception()
    print(failure or "done", file=sys.stderr if failure else sys.stdout)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
