"""Messages of the main process, also in a loop without an accelerator, where the loggers of
Accelerate raise an error.
"""

import logging
import os
from typing import Any

import torch.distributed as dist


class MainProcessLogger(logging.LoggerAdapter):
    """A logger that is silent on all processes but the main one."""

    def isEnabledFor(self, level: int) -> bool:
        """Return whether a message of this level is shown on this process."""
        return super().isEnabledFor(level) and is_main_process()

    def process(self, message: Any, options: Any) -> tuple[Any, Any]:
        """Return a message and its options unchanged."""
        return message, options


def get_logger(name: str) -> MainProcessLogger:
    """Return the logger of a module.

    Args:
        name: The name of the module.
    """
    return MainProcessLogger(logging.getLogger(name), {})


class Warnings:
    """The warnings of a run, each of which is given once.

    Args:
        logger: Gives them.
    """

    def __init__(self, logger: MainProcessLogger) -> None:
        """Start without a warning."""
        self._logger = logger
        self._given: set[str] = set()

    def once(self, message: str, *, topic: str | None = None, on_all_ranks: bool = False) -> None:
        """Give a warning, unless it was given before.

        Args:
            message: The warning.
            topic: What it is about, if its text has values that vary. Each topic is warned of once.
            on_all_ranks: Whether each rank gives it, and not only the main process.
        """
        topic = topic or message
        if topic in self._given:
            return
        self._given.add(topic)
        logger = self._logger.logger if on_all_ranks else self._logger
        logger.warning(message)


def is_main_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
