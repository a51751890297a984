"""Speed and memory of hf_ga against Trainer, and of each speed-up left out: what `scripts/benchmark.py` runs."""
