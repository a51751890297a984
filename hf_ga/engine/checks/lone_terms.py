"""Terms of a loss that a process never computes, although others do in each window: of a loop that
computes them on its main process only, or by tasks that each process has for itself.
"""

from collections.abc import Collection, Iterable
from typing import Any

from hf_ga.logs import Warnings, get_logger

NUM_WINDOWS = 16  # in a row: a term that few samples have may be missing in some by chance


class LoneTerms:
    """Counts the windows in a row in which this process lacked a term that others had."""

    def __init__(self) -> None:
        """Start before the first window."""
        self._num_missed: dict[Any, int] = {}
        self._warnings = Warnings(get_logger(__name__))

    def note(self, here: Collection[Any], anywhere: Iterable[Any]) -> None:
        """Note the terms of a window; warn once, on each process, if it has missed one for long.

        Args:
            here: The terms on this process. If empty, it had no samples, which says nothing.
            anywhere: Those on any process.
        """
        if not here:
            return
        missed = set(anywhere) - set(here)
        self._num_missed = {key: self._num_missed.get(key, 0) + 1 for key in missed}
        if NUM_WINDOWS in self._num_missed.values():
            self._warnings.once(
                f"hf_ga: in {NUM_WINDOWS} windows in a row, this process had no part of a term of "
                "the loss that another process had in each of them. If the loop computes it on "
                "some processes only (accelerator.is_main_process), the update depends on their "
                "number: compute it for the samples of all processes.",
                on_all_ranks=True,
            )
