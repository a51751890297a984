"""Checks that a loop makes its calls in the order that exact accumulation needs.

For each micro-batch of a window: fetch it, one forward, one backward. After the last one:
`optimizer.step()` and `zero_grad()`. Any other order would train a wrong gradient silently, so it
is refused.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.engine import Engine

BY_HAND = (
    "This loop accumulates by hand: pass gradient_accumulation_steps to Accelerator, put the "
    "forward and backward into `with accelerator.accumulate(model):`, and pass the undivided loss "
    "to accelerator.backward."
)


class CallOrder:
    """Where a loop is within its window.

    Attributes:
        index: Of the last micro-batch in its window.
        is_waiting: That micro-batch was handed out, and its backward is still to come.
        is_complete: All micro-batches of the window had their backward.
    """

    def __init__(self) -> None:
        self.index = 0
        self.is_waiting = False
        self.is_complete = True
        self._had_backward = False
        self._was_interrupted = False  # the window before was left by `break`
        self._gradient: tuple[Tensor, int] | None = None  # after the last backward

    def begin_window(self) -> None:
        """Called when a window begins."""
        self._was_interrupted = not self.is_complete
        self.is_complete = False

    def begin_micro_batch(self, index: int) -> None:
        """Called when a micro-batch is handed out."""
        self.index = index
        self.is_waiting = True
        self._had_backward = False

    def begin_other_batches(self) -> None:
        """Called when a loader hands out Accelerate's own batches."""
        self._had_backward = False

    def note_backward(self) -> None:
        """Called when the micro-batch had its backward."""
        self.is_waiting = False
        self._had_backward = True

    def note_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the gradients after a backward that is not the window's last."""
        self._gradient = _first_gradient(parameters)

    def check_fetch(self) -> None:
        """Before a batch is handed out: the one before had its backward.

        Raises:
            ConfigError: If it had not.
        """
        if self.is_waiting:
            raise ConfigError(
                "a batch was fetched before accelerator.backward of the one before it. If this is "
                "an evaluation, call model.eval() before it. If the loop collects several batches, "
                f"or calls loss.backward() itself: {BY_HAND}"
            )

    def unexpected_backward(self, *, is_in_evaluation: bool) -> ConfigError:
        """Return the error of a backward for which no micro-batch waits.

        Args:
            is_in_evaluation: The loader began while no model was in training mode.
        """
        if self._had_backward:
            return ConfigError(
                "accelerator.backward was called twice for one batch: add the losses up and call "
                "it once."
            )
        if is_in_evaluation:
            return ConfigError(
                "accelerator.backward needs a batch of a training window, but the model was in "
                "evaluation mode when the loader began (from_pretrained returns it so): call "
                "model.train() before the training loop. To train without dropout, set its "
                "probabilities to 0."
            )
        return ConfigError(
            "accelerator.backward needs a batch of a prepared DataLoader that was not used yet: "
            "pass the training DataLoader to accelerator.prepare, call backward once for each of "
            "its batches, and keep the iterator: `iterator = iter(loader)`, not next(iter(loader))."
        )

    def check_gradients(self, engine: Engine, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Before a backward: the only gradients are those of the window's earlier micro-batches.

        Gradients that no optimizer would use are removed: those of a window that was left, and
        those of parameters that no optimizer has.

        Args:
            engine: Of the window.
            optimizers: All that were prepared.

        Raises:
            ConfigError: If gradients were changed within the window, or are left of an earlier one.
        """
        if self.index == 0:
            self._remove_gradients_of_earlier_windows(engine, optimizers)
            return
        if engine.backend.is_sharded:
            return  # FSDP makes its gradients anew
        if not _is_unchanged(self._gradient, _first_gradient(engine.parameters)):
            raise ConfigError(
                "gradients were changed within a window (zero_grad, or a change by hand), so "
                "those of its first micro-batches are lost: call zero_grad after "
                "optimizer.step(), and change gradients when accelerator.sync_gradients is "
                "true."
            )

    def _remove_gradients_of_earlier_windows(
        self, engine: Engine, optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Remove gradients that no optimizer would use.

        Raises:
            ConfigError: If an optimizer would use some.
        """
        updated = {p for optimizer in optimizers for p in parameters_of_optimizer(optimizer)}
        for parameter in engine.parameters:
            if parameter.grad is None:
                continue
            has_no_optimizer = bool(updated) and parameter not in updated
            is_used = not self._was_interrupted and not has_no_optimizer
            if is_used and bool(parameter.grad.any()):
                raise ConfigError(
                    "gradients of an earlier window are left: its optimizer.step() or zero_grad() "
                    f"did not come. {BY_HAND}"
                )
        for parameter in engine.parameters:
            parameter.grad = None

    def check_other_optimizer(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Before a step of any optimizer of torch: it does not update the model within a window.

        Raises:
            ConfigError: If it does.
        """
        if self.is_complete:
            return
        trained = set(engine.parameters)
        parameters = parameters_of_optimizer(optimizer)
        if any(p in trained and p.grad is not None for p in parameters):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() within a window would update with a part of "
                "its gradient: step the optimizer that accelerator.prepare returned; it steps when "
                "accelerator.sync_gradients is true."
            )

    def check_step(
        self,
        engine: Engine | None,
        optimizer: torch.optim.Optimizer,
        parameters_of_loss: Iterable[nn.Parameter],
    ) -> None:
        """Before a prepared optimizer's step: all micro-batches of the window had their backward.

        Args:
            engine: Of the window. None: there was none yet.
            optimizer: The prepared optimizer.
            parameters_of_loss: Those of a `whole_batch` that is a module.

        Raises:
            ConfigError: If a backward is missing and there are gradients, or if there are gradients
                of parameters outside of the model.
        """
        with_gradient = [p for p in parameters_of_optimizer(optimizer) if p.grad is not None]
        if engine is not None and self.is_complete:
            known = {*engine.parameters, *parameters_of_loss}
            if any(parameter not in known for parameter in with_gradient):
                raise ConfigError(
                    "the optimizer has parameters with a gradient that are not in the prepared "
                    "model (a head, a temperature), which are not summed over the window: make "
                    "them part of the model."
                )
            return
        if any(bool(parameter.grad.any()) for parameter in with_gradient):
            raise ConfigError(
                "optimizer.step() came before accelerator.backward of every micro-batch of the "
                "window (loss.backward() bypasses the accelerator, and so does a DataLoader that "
                f"was not prepared). {BY_HAND}"
            )


def check_syncs(model: nn.Module) -> None:
    """Before a window: nobody else has turned the summing of gradients off.

    Raises:
        ConfigError: If somebody has: LocalSGD, or a loop that uses `model.no_sync()`.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if is_ddp and not model.require_backward_grad_sync:
        raise ConfigError(
            "model.no_sync() (LocalSGD uses it) leaves gradients of the processes apart, but "
            f"hf_ga sums them once per window. Leave LocalSGD out. {BY_HAND}"
        )


def parameters_of_optimizer(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return all parameters in an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_gradient(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, int] | None:
    """Return the first gradient that there is, and the number of its changes."""
    for parameter in parameters:
        if parameter.grad is not None:
            return parameter.grad, parameter.grad._version
    return None


def _is_unchanged(before: tuple[Tensor, int] | None, now: tuple[Tensor, int] | None) -> bool:
    if before is None or now is None:
        return before is None
    gradient, num_changes = before
    gradient_now, num_changes_now = now
    return gradient is gradient_now and num_changes == num_changes_now
