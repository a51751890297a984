"""Measure the time and memory of each arm (a way of training in the benchmark), in a process of its
own. The processes take turns window by window, so that changes of the machine's speed affect all
arms equally, and each has its own peak memory.
"""

import gc
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import common
import psutil
import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from benchmark.setting import Setting, build_model


class BenchmarkOver(Exception):
    """Raised by `BenchmarkRun.step_done` after the last window, to leave the training loop."""


@dataclass
class Measurements:
    """Time and memory of one way of training in the benchmark, without its first epoch.

    Attributes:
        seconds: Seconds of each window (samples of one optimizer step), from the end of the
            previous step to the end of this one, data loading included.
        padding: Computed tokens, padding included, divided by real tokens. 0 without samples.
        each_once: Whether every sample was collated exactly once per epoch, or none is. False if a
            measured window was rehearsed, as one of a hundred is after the first three.
        peak_memory: Peak memory of the process in bytes. 0: not measured.
        memory_before: Memory in bytes after imports and construction of data and model.
    """

    seconds: list[float] = field(default_factory=list)
    padding: float = 0.0
    each_once: bool = True
    peak_memory: int = 0
    memory_before: int = 0


class BenchmarkRun:
    """The measured training of one arm of the benchmark. A training loop gets it as argument,
    trains `model` on the setting's samples with `collate`, and calls `step_done` after each
    optimizer step.

    Args:
        setting: The setting of the benchmark.
        turn: Connection to the process that lets the arms take turns: the run waits for a message
            before each window. None: it does not wait.

    Attributes:
        setting: The setting of the benchmark.
        model: The model to train, with new weights.
        has_samples: Whether the loop trains on samples that `collate` returned.
        seconds: Seconds of each window so far.
    """

    def __init__(self, setting: Setting, turn: Connection | None = None) -> None:
        self.setting = setting
        self.model = build_model(setting)
        self.has_samples = True
        self.seconds: list[float] = []
        self._turn = turn

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collate samples, and record their ids and the number of tokens with padding."""
        batch = common.collate(samples)
        if not torch.is_grad_enabled():
            # hf_ga's audit collates some samples a second time: do not count them.
            return batch
        self._ids += [sample["id"] for sample in samples]
        self._padded_tokens += batch["input_ids"].numel()
        return batch

    def measure(self, arm: Callable[["BenchmarkRun"], None]) -> Measurements:
        """Call a training loop with this run, until all epochs are trained, and return its
        measurements.
        """
        setting = self.setting
        gc.collect()
        before = memory_now(setting.device)
        self._next_window()
        with suppress(BenchmarkOver):
            arm(self)
        expected_ids = [sample["id"] for sample in setting.samples] * setting.epochs
        return Measurements(
            seconds=self.seconds[setting.windows_per_epoch :],
            padding=self._padded_tokens / (setting.epochs * setting.real_tokens),
            each_once=not self.has_samples or sorted(self._ids) == sorted(expected_ids),
            peak_memory=peak_memory(setting.device),
            memory_before=before,
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer of all arms: a fused AdamW without weight decay."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)

    def step_done(self) -> None:
        """Record the seconds of the window whose optimizer step has just ended, then wait until the
        next window may begin.

        Raises:
            BenchmarkOver: After the last window.
        """
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._window_start)
        if len(self.seconds) == (1 + self.setting.epochs) * self.setting.windows_per_epoch:
            raise BenchmarkOver
        self._next_window()

    def _next_window(self) -> None:
        """Wait until it is this arm's turn in the benchmark, and start the clock of the next
        window.
        """
        # The first epoch is not measured: forget the samples of the audit and of this epoch.
        if len(self.seconds) in (0, self.setting.windows_per_epoch):
            self._ids = []
            self._padded_tokens = 0
        if self._turn is not None:
            self._turn.send(None)
            self._turn.recv()
        self._window_start = time.perf_counter()


def measure_interleaved(
    setting: Setting, arms: dict[str, Callable[[BenchmarkRun], None]], title: str
) -> dict[str, Measurements]:
    """Measure all arms of the benchmark in separate processes, which take turns window by window:
    one process runs at a time.

    Args:
        setting: The setting of the benchmark.
        arms: Name of the arm -> training loop.
        title: Title of the progress bar.

    Returns:
        Name of the arm -> its measurements.

    Raises:
        RuntimeError: If a process exits without a result.
    """
    context = multiprocessing.get_context("forkserver")
    # So all processes start within a second, and with the same memory.
    context.set_forkserver_preload(["benchmark.arms"])
    running: dict[str, Connection] = {}
    results: dict[str, Measurements] = {}
    processes = []
    try:
        for name, arm in arms.items():
            running[name], turn = context.Pipe()
            process = context.Process(
                target=_run_in_process, args=(setting, arm, turn), daemon=True
            )
            processes.append(process)
            process.start()
            turn.close()
            # Wait until it has built its data and model.
            _receive(name, running[name])
        with tqdm(
            total=(1 + setting.epochs) * setting.windows_per_epoch,
            desc=title,
            unit="window",
            dynamic_ncols=True,
        ) as bar:
            while running:
                for name, connection in [*running.items()]:
                    connection.send(None)
                    measurements = _receive(name, connection)
                    if measurements is not None:
                        results[name] = measurements
                        del running[name]
                bar.update()
    finally:
        for process in processes:
            process.kill()
    return results


def measure_one_by_one(
    setting: Setting, arms: dict[str, Callable[[BenchmarkRun], None]], title: str
) -> dict[str, Measurements]:
    """Measure one arm of the benchmark after the other, each in a new process, because a GPU has no
    memory for all at the same time.

    Args:
        setting: The setting of the benchmark.
        arms: Name of the arm -> training loop.
        title: Title of the progress bar.

    Returns:
        Name of the arm -> its measurements. The seconds of an arm that failed are NaN; its error
        is printed on the terminal.
    """
    num_windows = setting.epochs * setting.windows_per_epoch
    results = dict.fromkeys(arms, Measurements([float("nan")] * num_windows))
    for name, arm in arms.items():
        with suppress(RuntimeError):
            results |= measure_interleaved(setting, {name: arm}, f"{title}, {name}")
    return results


def _run_in_process(
    setting: Setting, arm: Callable[[BenchmarkRun], None], turn: Connection
) -> None:
    """Measure an arm in this process, and send its measurements to the main process, which lets
    the arms take turns.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(setting.num_threads)
    run = BenchmarkRun(setting, turn)
    turn.send(run.measure(arm))


def _receive(name: str, connection: Connection) -> Measurements | None:
    """Wait for a message from the process of an arm: its measurements at its end; None: it waits
    for its turn. Raises RuntimeError if the process has exited without a result.
    """
    try:
        return connection.recv()
    except EOFError as error:
        raise RuntimeError(
            f"arm {name!r} exited without a result: see its error above, or memory ran out."
        ) from error


def memory_now(device: str) -> int:
    """Return the memory in bytes that this process uses: allocated GPU memory for "cuda", the
    resident set size for "cpu".
    """
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes: allocated GPU memory for "cuda", the
    resident set size for "cpu".
    """
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # In bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
