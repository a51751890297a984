"""Checks that a training loop makes its calls in the order that exact accumulation needs.

For each micro-batch of a window: fetch it, one forward, one backward. After the last one:
`optimizer.step()` and `zero_grad()`. Any other order would train with a wrong gradient without an
error, so it is refused.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.engine import Engine

# Part of several error messages: what to do about a loop with its own gradient accumulation.
MANUAL_ACCUMULATION_REMEDY = (
    "This loop accumulates by hand: pass gradient_accumulation_steps to Accelerator, put the "
    "forward and backward into `with accelerator.accumulate(model):`, and pass the undivided loss "
    "to accelerator.backward."
)


class CallOrder:
    """Tracks which calls a user's training loop has made in the current window, and refuses wrong
    ones.

    Attributes:
        index: The index in its window of the micro-batch that was handed out last.
        is_waiting: Whether the loop has not called `accelerator.backward` for that micro-batch yet.
        is_complete: Whether the loop called it for every micro-batch of the window. Also true
            before the first window.
    """

    def __init__(self) -> None:
        """Start before the first window of a user's loop, with no micro-batch handed out."""
        self.index = 0
        self.is_waiting = False
        self.is_complete = True
        self._had_backward = False  # for the current micro-batch
        self._was_interrupted = False  # the loop left the previous window by `break`
        # A gradient after the last backward, and the version counter of its tensor.
        self._gradient_after_backward: tuple[Tensor, int] | None = None

    def begin_window(self) -> None:
        """Record that a window begins, and whether the user's loop left the previous one
        unfinished.
        """
        self._was_interrupted = not self.is_complete
        self.is_complete = False

    def begin_micro_batch(self, index: int) -> None:
        """Record that the loader hands out a micro-batch to the user's loop.

        Args:
            index: The index of the micro-batch in its window (0-based).
        """
        self.index = index
        self.is_waiting = True
        self._had_backward = False

    def begin_other_batches(self) -> None:
        """Record that a prepared loader begins to yield Accelerate's own batches, as in an
        evaluation.

        If the user's loop calls `accelerator.backward` after that, the error says that there is no
        training window, not that it was called twice.
        """
        self._had_backward = False

    def note_backward(self) -> None:
        """Record that the user's loop called `accelerator.backward` for the current micro-batch."""
        self.is_waiting = False
        self._had_backward = True

    def note_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remember the first gradient, as a sample of all, after `accelerator.backward` within a
        window of the user's loop: the tensor and its version counter.

        Before the window's next backward, `check_gradients` compares them with those of then, to
        notice a `zero_grad` or another change in between.

        Args:
            parameters: The model's trained parameters.
        """
        self._gradient_after_backward = _first_gradient(parameters)

    def check_fetch(self) -> None:
        """Check, before the loader hands out a batch to the user's loop, that the loop called
        `accelerator.backward` for the previous one.

        Raises:
            ConfigError: If the loop did not call `accelerator.backward` for it.
        """
        if self.is_waiting:
            raise ConfigError(
                "a batch was fetched before accelerator.backward of the one before it. If this is "
                "an evaluation, call model.eval() before it. If the loop collects several batches, "
                f"or calls loss.backward() itself: {MANUAL_ACCUMULATION_REMEDY}"
            )

    def unexpected_backward(self, *, is_in_evaluation: bool) -> ConfigError:
        """Build the error for a call of `accelerator.backward` by the user's loop while no
        micro-batch waits for one.

        Args:
            is_in_evaluation: Whether the loader yields Accelerate's own batches because no model
                was in training mode when the loop over it began.

        Returns:
            The error, for the caller to raise.
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
        """Check that the user's loop left the parameters' gradients alone, before the backward of a
        micro-batch.

        Before the window's first backward, there must be no gradients that an optimizer would use;
        the others are removed (set to None). Before each later backward, the gradients must be
        those that the previous backward left.

        Args:
            engine: The engine of the current window.
            optimizers: All optimizers that the accelerator prepared.

        Raises:
            ConfigError: If gradients of an earlier window are left, or if gradients were changed
                within the window.
        """
        if self.index == 0:
            self._remove_gradients_of_earlier_windows(engine, optimizers)
            return
        if engine.backend.is_sharded:
            return  # FSDP makes new gradient tensors, so there is nothing to compare
        gradient_now = _first_gradient(engine.parameters)
        if not _is_same_gradient(self._gradient_after_backward, gradient_now):
            raise ConfigError(
                "gradients were changed within a window (zero_grad, or a change by hand), so "
                "those of its first micro-batches are lost: call zero_grad after "
                "optimizer.step(), and change gradients when accelerator.sync_gradients is "
                "true."
            )

    def _remove_gradients_of_earlier_windows(
        self, engine: Engine, optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Set all gradients of the model to None before the first backward of a window of the
        user's loop.

        Only gradients that no optimizer would have used may be removed: zeros, those of a window
        that the loop left by `break`, and those of parameters that no optimizer updates.

        Args:
            engine: The engine of the window that begins.
            optimizers: All optimizers that the accelerator prepared.

        Raises:
            ConfigError: If a gradient is left that an optimizer would have used, since the loop
                did not call `step` or `zero_grad`.
        """
        updated_parameters = {
            parameter
            for optimizer in optimizers
            for parameter in parameters_of_optimizer(optimizer)
        }
        for parameter in engine.parameters:
            if parameter.grad is None or self._was_interrupted:
                continue
            if updated_parameters and parameter not in updated_parameters:
                continue  # no optimizer updates it
            if bool(parameter.grad.any()):
                raise ConfigError(
                    "gradients of an earlier window are left: its optimizer.step() or zero_grad() "
                    f"was not called. {MANUAL_ACCUMULATION_REMEDY}"
                )
        for parameter in engine.parameters:
            parameter.grad = None

    def check_other_optimizer(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Check, before any torch optimizer steps, that it does not update the model while the
        window of the user's loop, and so its gradient, is not complete.

        Args:
            engine: The engine of the current window.
            optimizer: The optimizer that is about to step, prepared by the accelerator or not.

        Raises:
            ConfigError: If it would update a parameter of the model.
        """
        if self.is_complete:
            return
        trained = set(engine.parameters)
        parameters = parameters_of_optimizer(optimizer)
        if any(p in trained and p.grad is not None for p in parameters):
            raise ConfigError(
                f"{type(optimizer).__name__}.step() within a window would update with a part of "
                "the window's gradient: step the optimizer that accelerator.prepare returned; it "
                "steps when accelerator.sync_gradients is true."
            )

    def check_optimizer_step(
        self,
        engine: Engine | None,
        optimizer: torch.optim.Optimizer,
        loss_parameters: Iterable[nn.Parameter],
    ) -> None:
        """Check, before a prepared optimizer of the user's loop steps, that the gradient of the
        window is complete.

        Args:
            engine: The engine of the current window, or None before the first window.
            optimizer: The prepared optimizer.
            loss_parameters: The parameters of a `whole_batch` loss that is an nn.Module; empty
                for others.

        Raises:
            ConfigError: If there are gradients other than 0 although the loop did not call
                `accelerator.backward` for every micro-batch, or if a parameter outside of the
                model and the loss has a gradient.
        """
        with_gradient = [p for p in parameters_of_optimizer(optimizer) if p.grad is not None]
        if engine is not None and self.is_complete:
            known = {*engine.parameters, *loss_parameters}
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
                f"was not prepared). {MANUAL_ACCUMULATION_REMEDY}"
            )


def check_gradient_sync(model: nn.Module) -> None:
    """Check, before a window, that the user's loop has not turned DDP's gradient synchronization
    off.

    Args:
        model: The prepared model; one without DDP always passes.

    Raises:
        ConfigError: If the synchronization is off, by LocalSGD or by `model.no_sync()` in the loop.
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    if is_ddp and not model.require_backward_grad_sync:
        raise ConfigError(
            "model.no_sync() (LocalSGD uses it) turns off the gradient synchronization between "
            "processes, but hf_ga needs it once per window. Leave LocalSGD out. "
            f"{MANUAL_ACCUMULATION_REMEDY}"
        )


def parameters_of_optimizer(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all parameter groups of an optimizer that a user's loop with
    `hf_ga.Accelerator` steps.
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_gradient(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, int] | None:
    """Return the gradient of the first parameter that has one, and its tensor's version counter, to
    notice changes of gradients by the user's loop.

    torch raises the counter at each in-place change, so two results of this function show whether
    gradients were changed in between. None if no parameter has a gradient.
    """
    for parameter in parameters:
        if parameter.grad is not None:
            return parameter.grad, parameter.grad._version
    return None


def _is_same_gradient(before: tuple[Tensor, int] | None, now: tuple[Tensor, int] | None) -> bool:
    """Return whether two results of `_first_gradient` show the same, unchanged gradient tensor, so
    that the user's loop did not change it between two backwards of a window.

    If there was no gradient before, nothing can have been lost: that counts as the same, whatever
    there is now.
    """
    if before is None:
        return True
    if now is None:
        return False
    gradient_before, version_before = before
    gradient_now, version_now = now
    return gradient_before is gradient_now and version_before == version_now
