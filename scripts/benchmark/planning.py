"""Order and plan of large datasets: seconds until the first window, and to plan one large window."""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType

import hf_ga

WINDOW, NUM_PROCESSES, MICRO_BATCH, LONGEST = 4096, 256, 8, 256


class _Ones:
    """Samples of these lengths, made when they are asked for."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.ones(int(self.lengths[index]), dtype=torch.int64)}


def first_window(num_samples: int) -> float:
    """Seconds from a dataset with known lengths to the first window of 64 samples on one process."""
    lengths = _ragged(num_samples)
    dataset, began = _Ones(lengths), time.perf_counter()
    next(iter(_loader(dataset, num_processes=1, window_size=64)))
    return time.perf_counter() - began


def planned_window(repeats: int) -> float:
    """Median seconds in which a process plans one window of 4,096 samples over 256 processes."""
    requests = _loader(_Ones(_ragged(WINDOW * (repeats + 1))), NUM_PROCESSES, WINDOW).requests()
    next(requests)  # makes the order of the epoch
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        next(requests)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _ragged(num_samples: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(3.5, 1.0, num_samples), 2, LONGEST).astype(np.int64)


def _loader(dataset: _Ones, num_processes: int, window_size: int) -> hf_ga.WindowLoader:
    launched = SimpleNamespace(  # what a loader asks an accelerator for
        num_processes=num_processes,
        process_index=0,
        gradient_accumulation_steps=8,
        mixed_precision="no",
        distributed_type=DistributedType.MULTI_GPU,
        device=torch.device("cpu"),
    )
    return hf_ga.WindowLoader(
        dataset,
        lambda samples: {"input_ids": torch.nn.utils.rnn.pad_sequence([s["input_ids"] for s in samples], batch_first=True)},
        accelerator=launched,
        per_device_batch_size=MICRO_BATCH,
        global_batch_size=window_size,
        lengths=dataset.lengths,
    )
