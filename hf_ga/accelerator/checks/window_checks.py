"""Checks that need what was before in the same window: the optimizers' options, which parameters
were frozen, and by what the losses were multiplied.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import accelerate
from torch import Tensor, nn

from hf_ga.accelerator.checks.misuse import (
    check_no_foreign_gradients,
    check_same_options,
    check_undivided,
    is_multiple,
    late_parameters,
    multiplied_by_steps,
    numeric_options,
)
from hf_ga.engine.gradient import WindowGradient


class WindowChecks:
    """Checks the backwards of one window at a time.

    Args:
        accelerator: The accelerator of the loop.
    """

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        """Start before the first window."""
        self._accelerator = accelerator
        self._options: list[dict[str, Any]] | None = None  # at the window's first backward
        self._frozen: list[nn.Parameter] = []  # when the window began
        self._is_multiplied = True  # each loss of the run, by the accumulation steps

    def begin(self) -> None:
        """Begin a window, or another one of the same batch: forget the optimizers' options."""
        self._options = None

    def note_frozen(self, models: Iterable[nn.Module]) -> None:
        """Note which parameters of prepared models are not trained in the window."""
        self._frozen = [p for m in models for p in m.parameters() if not p.requires_grad]

    def check_options(self) -> None:
        """Check that the optimizers' options are those of the window's first backward.

        Raises:
            ConfigError: If one is not.
        """
        options = numeric_options(self._accelerator._optimizers)
        if self._options is None:
            self._options = options
        check_same_options(self._options, options)

    def check_parameters(
        self, gradient: WindowGradient, now: Sequence[nn.Parameter] | None
    ) -> None:
        """Check that no parameter needs a gradient that did not when the window began, as it would
        not be summed, and that no gradient came from elsewhere.

        Args:
            gradient: The window's gradient, not of shards: FSDP2 swaps parameters, and FSDP1 keeps
                its sums in their gradients.
            now: The parameters that are trained now. None: the same ones may be.

        Raises:
            ConfigError: If one does, or one did.
        """
        is_late = any(parameter.requires_grad for parameter in self._frozen)
        is_new = now is not None and not set(gradient.parameters).issuperset(now)
        if is_late or is_new:
            raise late_parameters()
        if not gradient.shown.is_set:
            check_no_foreign_gradients(gradient.parameters, gradient.shown.earlier)

    def check_loss(self, loss: Any, num_targets: float | Tensor | None) -> None:
        """Check that a loss is not divided by the accumulation steps, and note whether it is
        multiplied by them.

        Raises:
            ConfigError: If it is divided.
        """
        num_steps = self._accelerator.gradient_accumulation_steps
        check_undivided(loss, num_steps)
        node = loss.grad_fn if isinstance(loss, Tensor) else None
        if num_targets is not None or num_steps < 2 or not is_multiple(node, num_steps):
            self._is_multiplied = False  # by chance, if only in some micro-batches

    def check_factors(self) -> None:
        """Check, at a window's end, that not all losses were multiplied by the accumulation steps.

        Raises:
            ConfigError: If they were.
        """
        if self._is_multiplied:
            raise multiplied_by_steps(self._accelerator.gradient_accumulation_steps)
