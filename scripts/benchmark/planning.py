"""Measures the time of order and plan of a large dataset."""

import time

import numpy as np
import torch
from accelerate import Accelerator

import hf_ga

LONGEST = 256


def seconds_to_first_window(num_samples: int) -> float:
    """Seconds from a dataset with known lengths to its first window of 64 samples."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 1.0, num_samples), 2, LONGEST).astype(np.int64)
    accelerator, began = Accelerator(cpu=True), time.perf_counter()
    windows = hf_ga.WindowLoader(
        range(num_samples),  # samples whose content does not matter
        lambda samples: {"input_ids": torch.tensor(samples)[:, None]},
        accelerator=accelerator,
        per_device_batch_size=8,
        global_batch_size=64,
        lengths=lengths,
    )
    next(iter(windows))
    return time.perf_counter() - began
