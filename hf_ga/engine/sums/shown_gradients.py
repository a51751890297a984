"""What a window sets in `.grad`, where the loop, hooks and the optimizer find it, and what was
there before.
"""

from collections.abc import Sequence

from torch import Tensor, nn

Gradients = list[Tensor | None]


class ShownGradients:
    """`.grad` of the parameters, before a window and during it.

    Args:
        parameters: The trainable parameters.

    Attributes:
        earlier: `.grad` before the window.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin a window."""
        self._parameters = parameters
        self.begin()

    def begin(self) -> None:
        """Begin a window: what is in `.grad` now was there before."""
        self.earlier = self._now()
        self._shown: list[tuple[Tensor, int] | None] | None = None  # (gradient, its version)

    @property
    def is_set(self) -> bool:
        """Whether the window has set `.grad`."""
        return self._shown is not None

    def set(self, gradients: Gradients) -> None:
        """Set `.grad` to gradients, where they are not None."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient
        self._note(gradients)

    def set_beside_earlier(self, gradients: Gradients) -> None:
        """Set `.grad` to gradients, where they are not None, plus what was there before."""
        for parameter, gradient, earlier in zip(
            self._parameters, gradients, self.earlier, strict=True
        ):
            if gradient is not None:
                parameter.grad = gradient if earlier is None else earlier + gradient
        self._note(self._now())

    def withdraw(self) -> None:
        """Set `.grad` back to what it was before the window."""
        set_gradients(self._parameters, self.earlier)
        self._shown = None

    def is_changed(self) -> bool:
        """Whether the loop has changed `.grad` since the window set it."""
        return any(_is_changed(now, *shown) for now, shown in self._pairs())

    def is_zeroed(self) -> bool:
        """Whether the loop has set to None or 0 what the window set; it may have been 0 there."""
        pairs = self._pairs()
        return bool(pairs) and all(
            now is None or (_is_changed(now, *shown) and not bool(now.any()))
            for now, shown in pairs
        )

    def _now(self) -> Gradients:
        """Return what is in `.grad` now."""
        return [parameter.grad for parameter in self._parameters]

    def _note(self, gradients: Gradients) -> None:
        """Remember gradients that are in `.grad` now."""
        self._shown = [None if g is None else (g, g._version) for g in gradients]

    def _pairs(self) -> list[tuple[Tensor | None, tuple[Tensor, int]]]:
        """Return what is in `.grad` now, with what the window set there."""
        if self._shown is None:
            return []
        pairs = zip(self._now(), self._shown, strict=True)
        return [(now, shown) for now, shown in pairs if shown is not None]


def set_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Set `.grad` of all parameters."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _is_changed(now: Tensor | None, shown: Tensor, version: int) -> bool:
    """Whether a gradient is another one, or was written to, since it was shown."""
    return now is not shown or shown._version != version
