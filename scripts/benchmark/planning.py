"""Order and plan: how long until the first window of a large dataset, and how long one large window takes to plan."""

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType

import hf_ga
from benchmark.figures import Bound, Section
from benchmark.meters import memory_now, peak_memory

MOST_SECONDS, MOST_MEMORY, MOST_MILLISECONDS = 3.0, 500.0, 50.0  # memory in MB, 1e6 bytes
WINDOW, PROCESSES, MICRO_BATCH = 4096, 256, 8
LONGEST = 256


@dataclass
class _Launched:
    """What a loader asks an accelerator for, of a process among many."""

    num_processes: int
    process_index: int = 0
    gradient_accumulation_steps: int = 8
    mixed_precision: str = "no"
    distributed_type: DistributedType = DistributedType.MULTI_GPU
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


class _Numbers:
    """A dataset of so many samples, made when they are asked for."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.full((int(self.lengths[index]),), index % 100)}


def first_window(num_samples: int) -> tuple[float, float, int, int]:
    """(seconds from nothing to the first window, CPU seconds, bytes that this added, peak of the process), with lengths given.

    The lengths themselves, 8 bytes a sample, are there before. To be run in a process of its own.
    """
    lengths = _draw_lengths(num_samples)
    dataset = _Numbers(lengths)
    gc.collect()
    before, began, cpu_began = memory_now("cpu"), time.perf_counter(), time.process_time()
    windows = _loader(dataset, lengths, _Launched(1), 64)
    next(iter(windows))
    seconds, cpu_seconds, peak = time.perf_counter() - began, time.process_time() - cpu_began, peak_memory("cpu")
    return seconds, cpu_seconds, max(0, peak - before), peak


def planned_window(rounds: int) -> list[float]:
    """Milliseconds in which a process plans one window of 4,096 samples over 256 processes, each another window."""
    lengths = _draw_lengths(WINDOW * (rounds + 1))
    windows = _loader(_Numbers(lengths), lengths, _Launched(PROCESSES), WINDOW)
    requests, milliseconds = windows.requests(), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        next(requests)
        milliseconds.append(1000 * (time.perf_counter() - began))
    return milliseconds[1:]  # the first one makes the order of the epoch


def planning_section(first: dict[int, list[tuple[float, float, int, int]]], milliseconds: list[float]) -> Section:
    """Medians over the rounds."""
    rows, medians = [], {}
    for num_samples, measured in first.items():
        seconds, cpu_seconds, added, peak = (statistics.median(values) for values in zip(*measured, strict=True))
        medians[num_samples] = seconds, added / 1e6
        rows.append([f"{num_samples:,}", seconds, cpu_seconds, added / 1e6, peak / 1e6])
    header = ("samples", "seconds to the first window", "CPU s", "MB that it added", "MB of the process at its peak")
    section = Section("Order and plan", header, rows, figures={"first_window": first, "planned_ms": milliseconds})
    most, (seconds, added) = max(medians.items())
    section.bounds.append(Bound(f"{most:,} samples: seconds to the first window", seconds, MOST_SECONDS, at_most=True))
    section.bounds.append(Bound(f"{most:,} samples: MB that the first window added", added, MOST_MEMORY, at_most=True))
    what = f"ms to plan {WINDOW:,} samples over {PROCESSES} processes"
    section.bounds.append(Bound(what, statistics.median(milliseconds), MOST_MILLISECONDS, at_most=True))
    return section


def _draw_lengths(num_samples: int) -> np.ndarray:
    """Ragged ones, as real texts are."""
    return np.clip(np.random.default_rng(0).lognormal(3.5, 1.0, num_samples), 2, LONGEST).astype(np.int64)


def _loader(dataset: Any, lengths: np.ndarray, launched: Any, window_size: int) -> hf_ga.WindowLoader:
    return hf_ga.WindowLoader(
        dataset,
        _collate,
        accelerator=launched,
        per_device_batch_size=MICRO_BATCH,
        global_batch_size=window_size,
        lengths=lengths,
    )


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)}
