"""Trainer and hf_ga in turn, each speed-up left out, two ranks and one process: `python scripts/benchmark.py --help`."""

import sys

from benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
