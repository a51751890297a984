"""SIGTERM, SIGINT (Ctrl-C) and SLURM's warnings while a run trains: remembered, and answered at the end of a window."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")  # the last two are what SLURM is asked to warn with
# Seconds in which the same request may come twice: a launcher passes on to its processes what they got themselves.
SAME_REQUEST = 1.0


@dataclass
class StopRequest:
    """What signals have asked of this process.

    Attributes:
        first: when each kind of signal came first, in seconds of `time.monotonic()`; in the order in which they came.
    """

    first: dict[int, float] = field(default_factory=dict)

    @property
    def came(self) -> bool:
        """Whether this process is to stop."""
        return bool(self.first)

    def pass_on(self) -> None:
        """Let what came act as before, where nobody has answered it."""
        for number in self.first:
            signal.raise_signal(number)

    def __str__(self) -> str:
        return signal.Signals(next(iter(self.first))).name if self.first else "a signal to another process"


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """For as long as the block runs, a signal is only remembered; the same one again, more than a second later, acts as before.

    Signals that are ignored stay so (SLURM's warning in a job that submitit queues again, Ctrl-C in the background), and outside
    of the main thread, where Python cannot take signals, all of them act as before.
    """
    request = StopRequest()
    before = _handlers() if threading.current_thread() is threading.main_thread() else {}

    def remember(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - request.first.setdefault(number, time.monotonic()) > SAME_REQUEST:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    try:
        for number in before:
            signal.signal(number, remember)
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Any]:
    """What each signal does now; without those that are ignored, or that a library in C takes."""
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]  # Windows has no SIGUSR1
    return {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)}
