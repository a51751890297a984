"""Hooks that the library puts on a user's modules for longer than a forward."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """A function as a hook of a module, which has no effect in a copy of the module.

    Loops copy and save models within a window: `copy.deepcopy`, `AveragedModel`, `torch.save`. What
    the function belongs to, such as graphs of a micro-batch, must not be copied with them.

    Args:
        function: What the hook calls, with its own arguments.

    Example:
        handle = model.register_forward_hook(Hook(self._record))
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap the function."""
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function, and return what it returns to torch."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Copy or pickle as a method that takes any arguments and returns None, of Python's own: a
        saved model can be loaded without hf_ga.
        """
        return getattr, (nullcontext(), "__exit__")
