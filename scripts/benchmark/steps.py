"""hf_ga's own steps, in turn within one process: one window in more micro-batches, and keyed against torch's own dropout."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

import hf_ga
from benchmark.figures import Bound, Section
from benchmark.meters import synchronize
from benchmark.samples import collate_function
from benchmark.setting import Sample, Setting, build_model
from hf_ga.exact.dropout import KeyedDropout

SPLITS = (1, 4, 16)  # micro-batches of a window
MOST_SPLIT, MOST_KEYED = 1.10, 1.05
Times = dict[str, list[tuple[float, float]]]  # of each run (seconds of the clock, CPU seconds of all threads)
KEYED, NATIVE = "keyed dropout", "torch's own dropout"


class _TorchsOwnDropout(KeyedDropout):
    """Places in which nothing is put in torch's stead."""

    @contextmanager
    def active(self) -> Iterator[None]:
        yield


def measure_splits(setting: Setting, samples: Sequence[Sample], rounds: int) -> Times:
    """Times of a step in each split, on the windows of an epoch one after the other; all splits of a window in turn, and the first
    turn is not counted.

    Micro-batches are padded to the longest sample of their window, so all splits compute the same tokens.
    """
    accelerator, model, optimizer, loader = _prepared(setting, samples)
    windows, step = list(loader), _stepper(accelerator, model, optimizer, setting)

    def steps_of(num_micro_batches: int) -> Callable[[], float]:
        parts = [np.array_split(np.arange(window.num_samples), num_micro_batches) for window in windows]
        following = cycle([window.split(of_it, whole_window=True) for window, of_it in zip(windows, parts, strict=True)])
        return lambda: step(next(following))

    return _in_turn(setting, {str(k): steps_of(k) for k in SPLITS}, rounds)


def splits_section(setting: Setting, times: Times, samples: str) -> Section:
    """Times and their ratio to one micro-batch. samples: which, in words."""
    first, last = str(SPLITS[0]), str(SPLITS[-1])
    title = f"{setting.model}: windows of {setting.window_size} {samples}, in so many micro-batches"
    section = _compared(title, times, first)
    what = f"{setting.model}: {last} micro-batches against {first}, {samples}"
    section.bounds.append(Bound(what, _medians(times)[last] / _medians(times)[first], MOST_SPLIT, at_most=True))
    return section


def measure_dropout(setting: Setting, samples: Sequence[Sample], rounds: int) -> Times:
    """Times of a step by hf_ga's own `train_step` with keyed dropout, and with torch's own, on the same windows in turn.

    On a CUDA device torch's own runs with eager attention: its fused kernels draw in another place.
    """
    accelerator, model, optimizer, windows = _prepared(setting, samples)
    window = next(iter(windows))
    keyed = hf_ga.prove_targets(model, window.probe_samples(16), collate_function(setting))
    other = copy.deepcopy(model)
    if setting.device == "cuda":
        other.set_attn_implementation("eager")
    native = replace(keyed, places=_TorchsOwnDropout(other))
    others_optimizer = torch.optim.AdamW(other.parameters(), lr=setting.learning_rate, fused=True)
    steps = {
        KEYED: _stepper(accelerator, model, optimizer, setting, targets=keyed),
        NATIVE: _stepper(accelerator, other, others_optimizer, setting, targets=native, allow_split_dependent_randomness=True),
    }
    return _in_turn(setting, {name: lambda step=step: step(window) for name, step in steps.items()}, rounds)


def dropout_section(setting: Setting, times: Times) -> Section:
    """Times and their ratio."""
    section = _compared(f"{setting.model}: dropout {setting.dropout} in a whole step", times, NATIVE)
    ratio = _medians(times)[KEYED] / _medians(times)[NATIVE]
    section.bounds.append(Bound(f"{setting.model}: keyed against torch's own dropout", ratio, MOST_KEYED, at_most=True))
    return section


def _prepared(setting: Setting, samples: Sequence[Sample]) -> tuple[Accelerator, Any, Any, hf_ga.WindowLoader]:
    torch.set_num_threads(setting.num_threads)
    accelerator = Accelerator(cpu=setting.device == "cpu", mixed_precision=setting.mixed_precision)
    windows = hf_ga.WindowLoader(
        samples,
        collate_function(setting),
        accelerator=accelerator,
        per_device_batch_size=setting.micro_batch_size,
        global_batch_size=setting.window_size,
        lengths=[len(sample["input_ids"]) for sample in samples],
    )
    model = build_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)
    return accelerator, *accelerator.prepare(model, optimizer), windows


def _stepper(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, setting: Setting, **more: Any
) -> Callable[[hf_ga.Window], float]:
    def step(window: hf_ga.Window) -> float:
        norm = setting.max_grad_norm
        return hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=norm, **more).loss

    return step


def _in_turn(setting: Setting, runs: dict[str, Callable[[], Any]], rounds: int) -> Times:
    """Times of each, in turn; the order turns round each time, and the first turn (a proof, memory) is not counted."""
    times: Times = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            synchronize(setting.device)
            began = time.perf_counter(), time.process_time()
            runs[name]()
            synchronize(setting.device)
            if turn:
                times[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return times


def _medians(times: Times, of_cpu: bool = False) -> dict[str, float]:
    return {name: statistics.median(values[of_cpu] for values in measured) for name, measured in times.items()}


def _compared(title: str, times: Times, base: str) -> Section:
    """A table of medians and their ratios to one of them."""
    clock, cpu = _medians(times), _medians(times, of_cpu=True)
    rows = [[name, clock[name], clock[name] / clock[base], cpu[name], cpu[name] / cpu[base]] for name in times]
    return Section(title, ("", "seconds a step", "ratio", "CPU s", "ratio"), rows, figures={"times": times})
