"""Benchmark hf_ga against Trainer, without each speed-up, and on two ranks: `python
scripts/benchmark.py --help`.
"""

import sys

from benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main())
