"""One arm in a separate process, which waits for its turn before each window. So changes of the
machine's speed affect all arms equally, and each has its own peak memory.
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

import psutil
import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from benchmark.setting import Setting, build_model


class LapOver(Exception):
    """Raised by `Lap.step_done` after the last window, to leave the arm's loop."""


@dataclass
class Measured:
    """The measurements of an arm after its first epoch.

    Attributes:
        seconds: Seconds of each window, from the end of the previous step to the end of its step,
            data loading included.
        padding: Padded tokens over real ones.
        each_once: Whether every sample came once per epoch.
        peak_memory: Peak memory in bytes.
        memory_before: Memory in bytes after imports and construction of data and model.
    """

    seconds: list[float] = field(default_factory=list)
    padding: float = 0.0
    each_once: bool = True
    peak_memory: int = 0
    memory_before: int = 0


class Lap:
    """One arm's run: it trains `model` on the setting's samples with `collate`, and calls
    `step_done` after each step.

    Args:
        setting: The setting of all arms.
        turn: Where the lap waits for its turn before each window. None: it does not wait.

    Attributes:
        setting: The setting of all arms.
        model: A new model.
        collator: The function that `collate` calls.
        seconds: Seconds of each window so far.
    """

    def __init__(self, setting: Setting, turn: Connection | None = None) -> None:
        self.setting = setting
        self.model = build_model(setting)
        self.collator = setting.collate
        self.seconds: list[float] = []
        self._turn = turn

    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Collate, and record the samples."""
        batch = self.collator(samples)
        if not torch.is_grad_enabled():
            # An audit collates some samples again.
            return batch
        self._ids += [sample["id"] for sample in samples]
        self._padded_tokens += batch["input_ids"].numel()
        return batch

    def run(self, arm: Callable[["Lap"], None]) -> Measured:
        """Run an arm to its end."""
        setting = self.setting
        gc.collect()
        before = memory_now(setting.device)
        self._next_window()
        with suppress(LapOver):
            arm(self)
        expected_ids = [sample["id"] for sample in setting.samples] * setting.epochs
        return Measured(
            seconds=self.seconds[setting.windows_per_epoch :],
            padding=self._padded_tokens / (setting.epochs * setting.real_tokens),
            each_once=sorted(self._ids) == sorted(expected_ids),
            peak_memory=peak_memory(setting.device),
            memory_before=before,
        )

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a fused AdamW without weight decay, as in Trainer's arms."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)

    def step_done(self) -> None:
        """Record the end of an optimizer step. Returns when the next window may begin."""
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == (1 + self.setting.epochs) * self.setting.windows_per_epoch:
            raise LapOver
        self._next_window()

    def _next_window(self) -> None:
        """Wait for the turn, and note the time at which the window begins."""
        # The first epoch is not measured.
        if len(self.seconds) in (0, self.setting.windows_per_epoch):
            self._ids = []
            self._padded_tokens = 0
        if self._turn is not None:
            self._turn.send(None)
            self._turn.recv()
        self._began = time.perf_counter()


def measure_in_turn(
    setting: Setting, arms: dict[str, Callable[[Lap], None]], title: str
) -> dict[str, Measured]:
    """Run all arms in separate processes, which take turns window by window: one runs at a time.

    Args:
        setting: The setting of all arms.
        arms: Name -> arm.
        title: The title of the progress bar.

    Returns:
        Name -> measurements.

    Raises:
        RuntimeError: If a process exits without a result.
    """
    context = multiprocessing.get_context("forkserver")
    # The processes start within a second, from the same memory.
    context.set_forkserver_preload(["benchmark.arms"])
    running: dict[str, Connection] = {}
    results: dict[str, Measured] = {}
    processes = []
    try:
        for name, arm in arms.items():
            running[name], turn = context.Pipe()
            process = context.Process(target=_run_apart, args=(setting, arm, turn), daemon=True)
            processes.append(process)
            process.start()
            turn.close()
            _answer(name, running[name])
        with tqdm(
            total=(1 + setting.epochs) * setting.windows_per_epoch,
            desc=title,
            unit="window",
            dynamic_ncols=True,
        ) as bar:
            while running:
                for name, connection in [*running.items()]:
                    connection.send(None)
                    answer = _answer(name, connection)
                    if answer is not None:
                        results[name] = answer
                        del running[name]
                bar.update()
    finally:
        for process in processes:
            process.kill()
    return results


def measure_apart(
    setting: Setting, arms: dict[str, Callable[[Lap], None]], title: str
) -> dict[str, Measured]:
    """Run one arm after the other: a GPU has no memory for all at once. An arm that fails has NaN;
    its error is on the terminal.
    """
    num_windows = setting.epochs * setting.windows_per_epoch
    results = dict.fromkeys(arms, Measured([float("nan")] * num_windows))
    for name, arm in arms.items():
        with suppress(RuntimeError):
            results |= measure_in_turn(setting, {name: arm}, f"{title}, {name}")
    return results


def _run_apart(setting: Setting, arm: Callable[[Lap], None], turn: Connection) -> None:
    """Run an arm in its process, and send its measurements."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(setting.num_threads)
    lap = Lap(setting, turn)
    turn.send(lap.run(arm))


def _answer(name: str, connection: Connection) -> Measured | None:
    """Wait for an arm.

    Returns:
        Its measurements. None: it waits for its next turn.

    Raises:
        RuntimeError: If its process has exited without a result.
    """
    try:
        return connection.recv()
    except EOFError as error:
        raise RuntimeError(
            f"arm {name!r} exited without a result: see its error above, or memory ran out."
        ) from error


def memory_now(device: str) -> int:
    """Return the memory of this process in bytes: on the device, or on a CPU its resident set
    size.
    """
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # In bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
