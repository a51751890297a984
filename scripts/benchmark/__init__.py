"""Speed and memory against Trainer, TRL and a raw Accelerate loop: what `scripts/benchmark.py` runs."""
