"""Trainer, TRL, a raw Accelerate loop and hf_ga in turn: `python scripts/benchmark.py --help`.

Every measurement runs in a process of its own, most of them forked of one that has imported all. Whole windows are timed, from
the first request for data to the end of the last step; a warm-up comes before. Memory is the peak of the process (its resident
set, or what is allocated on a CUDA device), also above what it held when imports, data and model were there. Trainer's
`training_step`, and elsewhere the model's forward and every backward, count as forward and backward.
"""

import sys
from pathlib import Path

from benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(checker=Path(__file__).with_name("benchmark_checker.py")))
