"""SIGTERM, SIGINT (Ctrl-C) and SLURM's warning signals during training: recorded, and handled at
the end of a window.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

# SLURM can warn with the last two, which Windows lacks.
NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
# Seconds in which a repeated signal is ignored: launchers forward signals that their processes also
# received directly.
SAME_REQUEST = 1.0


@dataclass
class StopRequest:
    """The signals that this process received.

    Attributes:
        first: Signal number -> time of its first arrival in seconds of `time.monotonic()`, in the
            order of arrival.
    """

    first: dict[int, float] = field(default_factory=dict)

    @property
    def received(self) -> bool:
        """Whether this process should stop."""
        return bool(self.first)

    def pass_on(self) -> None:
        """Raise unhandled signals again, with the original handlers."""
        for number in self.first:
            signal.raise_signal(number)

    def __str__(self) -> str:
        if not self.first:
            return "a signal to another process"
        number = next(iter(self.first))
        return signal.Signals(number).name


def _handlers() -> dict[int, Any]:
    """Return signal number -> present handler, of the signals that are not ignored."""
    numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
    found = {number: signal.getsignal(number) for number in numbers}
    # None: a handler that was not set from Python, and cannot be set again.
    kept_out = (signal.SIG_IGN, None)
    return {number: handler for number, handler in found.items() if handler not in kept_out}


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Only record signals during the block. The same signal again, more than a second later, calls
    the original handler.

    Ignored signals stay ignored (SLURM's warning in a job that submitit requeues, Ctrl-C in the
    background). Outside the main thread, where Python cannot handle signals, the block does
    nothing.

    Yields:
        The signals received so far.
    """
    request = StopRequest()
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = _handlers()

    def record(number: int, frame: FrameType | None) -> None:
        """Note a signal: the handler during the block."""
        now = time.monotonic()
        first_arrival = request.first.setdefault(number, now)
        if now - first_arrival > SAME_REQUEST:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    try:
        for number in handlers:
            signal.signal(number, record)
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
