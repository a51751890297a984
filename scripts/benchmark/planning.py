"""Measures the time of order and plan of a large dataset."""

import time
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence

import hf_ga

LONGEST = 256


class _Ones:
    """Samples of the given lengths, created on access."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.ones(int(self.lengths[index]), dtype=torch.int64)}


def seconds_to_first_window(num_samples: int) -> float:
    """Seconds from a dataset with known lengths to its first window of 64 samples."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3.5, 1.0, num_samples), 2, LONGEST).astype(np.int64)
    accelerator, began = Accelerator(cpu=True), time.perf_counter()
    windows = hf_ga.WindowLoader(
        _Ones(lengths),
        lambda samples: {"input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)},
        accelerator=accelerator,
        per_device_batch_size=8,
        global_batch_size=64,
        lengths=lengths,
    )
    next(iter(windows))
    return time.perf_counter() - began
