"""Finds learning rate schedules that a loop steps in each iteration, and not once a window.

The learning rates of one window may not show it: `StepLR` changes them only now and then, which may
be between two windows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hf_ga.errors import ConfigError
from hf_ga.model.override import replaced


class ScheduleCheck:
    """Notes in which iteration of a window each scheduler steps, prepared or not."""

    def __init__(self) -> None:
        """Start before the first window."""
        self._number = 0  # of the current iteration
        self._stepped: dict[int, tuple[LRScheduler, int]] = {}  # by identity: (it, iteration)

    def begin_window(self) -> None:
        """Forget the window before."""
        self._stepped.clear()

    def iteration(self) -> AbstractContextManager[None]:
        """Return a context, around an iteration of the loop, in which steps are noted.

        Raises:
            ConfigError: In the context, if a scheduler steps that did so in another iteration of
                the window. As many steps as it likes in one iteration are no error.
        """
        self._number += 1
        methods = [(owner, "step", self._noting(vars(owner)["step"])) for owner in _owners()]
        return replaced(methods)

    def _noting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method `step` of a class of schedulers, which notes its calls."""

        @wraps(step)
        def noted(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            """Note the step, and do it."""
            is_being_made = getattr(scheduler, "_step_count", None) == 0
            if not is_being_made:
                self._note(scheduler)
            return step(scheduler, *args, **kwargs)

        return noted

    def _note(self, scheduler: LRScheduler) -> None:
        """Note a step of a scheduler. ConfigError if it is not the first iteration with one."""
        _, number = self._stepped.setdefault(id(scheduler), (scheduler, self._number))
        if number != self._number:
            raise ConfigError(
                f"the {type(scheduler).__name__} steps in several iterations of one window, so its "
                "learning rates depend on the number of iterations, and with that on the split. "
                "Pass the scheduler to accelerator.prepare, or step it only if "
                "accelerator.sync_gradients; in a loop by hand, where the optimizer steps."
            )


def _owners(base: type = LRScheduler) -> Iterator[type]:
    """Yield the classes of schedulers that define how they step."""
    if "step" in vars(base):
        yield base
    for subclass in base.__subclasses__():
        yield from _owners(subclass)
