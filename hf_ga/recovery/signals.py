"""SIGTERM, SIGINT (Ctrl-C) and SLURM's warnings during training: noted, and acted on at the end of a window."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")  # SLURM can be asked to warn with the last two, which Windows lacks
# Seconds in which the same request may come twice: a launcher passes on to its processes what they got themselves.
SAME_REQUEST = 1.0


@dataclass
class StopRequest:
    """The signals that this process got.

    Attributes:
        first: number of each signal -> when it first came, in seconds of `time.monotonic()`; in order of arrival.
    """

    first: dict[int, float] = field(default_factory=dict)

    @property
    def came(self) -> bool:
        """Whether this process is to stop."""
        return bool(self.first)

    def pass_on(self) -> None:
        """Raise the signals again, now that nothing notes them: for those that nobody acted on."""
        for number in self.first:
            signal.raise_signal(number)

    def __str__(self) -> str:
        return signal.Signals(next(iter(self.first))).name if self.first else "a signal to another process"


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """In this block a signal is only noted. The same one again, more than a second later, acts as it did before.

    Ignored signals stay ignored (SLURM's warning in a job that submitit queues again, Ctrl-C in the background). Outside of the
    main thread, where Python cannot handle signals, nothing changes.
    """
    request, handlers = StopRequest(), {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        handlers = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) not in (signal.SIG_IGN, None)}  # None: of C

    def note(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - request.first.setdefault(number, time.monotonic()) > SAME_REQUEST:
            signal.signal(number, handlers[number])
            signal.raise_signal(number)

    try:
        for number in handlers:
            signal.signal(number, note)
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
