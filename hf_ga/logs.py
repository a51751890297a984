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


def is_main_process() -> bool:
    """Whether this process has rank 0, or is the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
