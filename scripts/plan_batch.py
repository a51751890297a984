"""Split a global batch exactly over nodes and devices: `python scripts/plan_batch.py --help`.

    python scripts/plan_batch.py --global_batch_size 3072 --nodes 30 --devices_per_node 8
    --per_device_train_batch_size 10

Prints the samples of each process and the command for this layout.
"""

import argparse
import sys
from collections.abc import Sequence

from hf_ga import plan_batch
from hf_ga.finetuning.run.flags.cli import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command scripts/plan_batch.py.

    Args:
        arguments: The command-line flags. None: those of the process.

    Returns:
        The exit code: 2 for invalid sizes, explained in one line.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(_print_plan, arguments)


def _print_plan(arguments: Sequence[str]) -> None:
    """Print how the global batch in these command-line flags is split over processes, and the
    command that trains with it.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--global_batch_size", type=int, required=True, help="samples in one optimizer step"
    )
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument(
        "--devices_per_node",
        type=int,
        default=1,
        help="GPUs, or processes, on each machine (default: 1)",
    )
    parser.add_argument(
        "--per_device_train_batch_size",
        type=int,
        required=True,
        help="maximum samples in one micro-batch",
    )
    flags = parser.parse_args(arguments)
    print(plan_batch(**vars(flags)))


if __name__ == "__main__":
    sys.exit(main())
