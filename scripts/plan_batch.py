"""Lay a wanted global batch out exactly over nodes and devices: `python scripts/plan_batch.py --help`.

    python scripts/plan_batch.py --global_batch_size 3072 --nodes 30 --devices_per_node 8 --per_device_train_batch_size 10

Prints one line for each fact: who gets how many samples, the flags that give it, and alternatives with the learning rates that go
with another batch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from hf_ga import ConfigError, plan_batch


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse flags, plan, print. Returns the exit code: 2 for sizes that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--global_batch_size", type=int, required=True, help="samples wanted in one optimizer step")
    parser.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    parser.add_argument("--devices_per_node", type=int, default=1, help="GPUs, or processes, on each machine (default: 1)")
    parser.add_argument("--per_device_train_batch_size", type=int, help="most samples in one micro-batch (or give tokens)")
    parser.add_argument("--tokens_per_micro_batch", type=int, help="most tokens in one micro-batch, padding included")
    parser.add_argument("--sequence_length", type=int, help="tokens of the longest sample; with tokens_per_micro_batch")
    parser.add_argument("--learning_rate", type=float, help="peak rate to scale to other batches (default: factors only)")
    parser.add_argument("--base_batch_size", type=int, help="samples a step it was found with (default: the wanted batch)")
    parser.add_argument("--json", action="store_true", help="print all of it as one JSON object")
    flags = vars(parser.parse_args(arguments))
    as_json = flags.pop("json")
    try:
        plan = plan_batch(**flags)
    except ConfigError as error:
        print("error:", error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(plan), indent=2) if as_json else plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
