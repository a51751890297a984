"""What an arm is given: model, samples, and the meters that it must start and stop."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch
from torch import nn

from benchmark.apart import wait_for_turn
from benchmark.meters import CountedCollate, Stopwatch, peak_memory
from benchmark.setting import Sample, Setting


class Refused(Exception):
    """An arm that cannot run in this setting; the message says why."""


class Lap:
    """One arm's run: a warm-up, then one epoch between `begin` and `end`, with `step_done` after each window.

    Attributes:
        collate: counts what it hands out; every arm must use it, or put its own function into it.
        stopwatch: see `Stopwatch`. cpu_seconds: of all threads in the timed part.
        warmup_peak: most bytes that the process held before the timed part (proofs are made in the warm-up).
    """

    def __init__(
        self, setting: Setting, model: nn.Module, samples: list[Sample], collate: Callable, turn: Connection | None = None
    ) -> None:
        self.setting, self.model, self.samples, self._turn = setting, model, samples, turn
        self.collate, self.stopwatch = CountedCollate(collate), Stopwatch(setting.device)
        self.cpu_seconds, self.warmup_peak = 0.0, 0

    @property
    def warmup_samples(self) -> list[Sample]:
        """Those of the warm-up windows."""
        return self.samples[: self.setting.warmup_windows * self.setting.window_size]

    def begin(self) -> None:
        """The warm-up is over: everything from here is measured."""
        self.collate.restart()
        self.warmup_peak = peak_memory(self.setting.device)
        self._cpu_began = time.process_time()
        if self._turn is not None:
            wait_for_turn(self._turn)
        self.stopwatch.start()

    def step_done(self) -> None:
        """A window is done: where arms take turns, it is the others' now."""
        if self._turn is not None:
            self.stopwatch.stop()
            wait_for_turn(self._turn)
            self.stopwatch.go_on()

    def end(self) -> None:
        """The last step of the epoch is done."""
        self.stopwatch.stop()
        self.cpu_seconds = time.process_time() - self._cpu_began

    @contextmanager
    def measured(self) -> Iterator[None]:
        """`begin` and `end`."""
        self.begin()
        yield
        self.end()

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW without decay in its fused form, which is what Trainer takes too."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.setting.learning_rate, weight_decay=0.0, fused=True)
