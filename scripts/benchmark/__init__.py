"""The benchmark of `scripts/benchmark.py`: speed and memory of hf_ga, of Trainer, and without each
speed-up.
"""
