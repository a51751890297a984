"""Signals that ask a training run to stop: SIGTERM, SIGINT (Ctrl-C) and SLURM's warning signals.
They are only recorded when they arrive, so that the training loop can stop at the end of a window.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# SLURM can send the last two as a warning before the time limit. Windows does not have them.
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
# Seconds during which the same signal is taken for the same request: launchers forward signals that
# their processes also received directly.
SAME_REQUEST_SECONDS = 1.0


@dataclass
class StopRequest:
    """The stop signals that this process has received, while `stop_requests` records them.

    Attributes:
        first_arrival: Signal number -> time of its first arrival in seconds of `time.monotonic()`,
            in the order of arrival.
    """

    first_arrival: dict[int, float] = field(default_factory=dict)

    @property
    def received(self) -> bool:
        """Whether this process has received a stop signal (SIGTERM, Ctrl-C, ...)."""
        return bool(self.first_arrival)

    def pass_on(self) -> None:
        """Send the recorded stop signals to this process again, so that one that arrived too late
        for the training loop to stop is not lost. Call it after the `stop_requests` block, where
        the original handlers are back.
        """
        for number in self.first_arrival:
            signal.raise_signal(number)

    def __str__(self) -> str:
        """Return the name of the stop signal that arrived first, such as "SIGTERM", for messages;
        "a signal to another process" if this one has received none.
        """
        if not self.first_arrival:
            return "a signal to another process"
        number = next(iter(self.first_arrival))
        return signal.Signals(number).name


def _replaceable_handlers() -> dict[int, Any]:
    """Return signal number -> current handler, for the signals in `STOP_SIGNALS` (SIGTERM, Ctrl-C,
    SLURM's warnings) whose handler may be replaced while a run trains.

    Signals that are ignored stay ignored. A handler of None was not set from Python, so it could
    not be set again afterwards.
    """
    numbers = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    return {
        number: handler
        for number, handler in handlers.items()
        if handler not in (signal.SIG_IGN, None)
    }


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 during the block instead of calling their
    handlers. If the same signal arrives again more than a second later, its original handler is
    called (a second Ctrl-C interrupts at once).

    Ignored signals stay ignored (SLURM's warning in a job that submitit requeues, Ctrl-C in the
    background). Outside the main thread, where Python cannot handle signals, nothing is recorded.

    Yields:
        The signals received so far; the training loop reads it after each window.
    """
    request = StopRequest()
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = _replaceable_handlers()

    def record(number: int, frame: FrameType | None) -> None:
        """Record a stop signal (SIGTERM, Ctrl-C, ...); if the same signal first arrived more than
        `SAME_REQUEST_SECONDS` ago, restore its original handler and call it. This is the signal
        handler during the block.
        """
        now = time.monotonic()
        first_arrival = request.first_arrival.setdefault(number, now)
        if now - first_arrival > SAME_REQUEST_SECONDS:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    try:
        for number in handlers:
            signal.signal(number, record)
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
