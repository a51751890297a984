"""From the gradient of a window to new weights: remove the loss scale, clip once, step once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_ga.exact.backend import Backend


@dataclass
class StepResult:
    """What a step did. Before an update, and under fp16, reading `loss` and `grad_norm` waits for
    the device.

    Attributes:
        num_targets: targets of the window over all processes.
        skipped: nothing was updated: a window without targets, gradients that overflowed under
            fp16, a loss or gradient that is not finite, or an optimizer none of whose parameters
            got a gradient.
        overflowed: it was skipped because a gradient was not finite under fp16; the scale was
            lowered once.
        loss_scale: under fp16 the scale that the gradients of this window had, on the host; None
            else, or where nothing was scaled.
        nonfinite: it was skipped because its loss or a gradient was not finite (not under fp16,
            where that is an overflow).
        cause: then, which samples and which module it came from, as a sentence.
        retries: how often the window was computed again because memory ran out.
    """

    loss_tensor: Tensor
    num_targets: int | float
    grad_norm_tensor: Tensor | None = None
    skipped: bool = False
    overflowed: bool = False
    loss_scale: float | None = None
    nonfinite: bool = False
    cause: str | None = None
    retries: int = 0

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the window; inf or NaN if a forward overflowed."""
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the gradient before clipping, without the loss scale; None without
        clipping. It is inf or NaN for a window that overflowed.
        """
        return None if self.grad_norm_tensor is None else float(self.grad_norm_tensor)


def update(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    result: StepResult,
) -> None:
    """Remove the loss scale, clip, step; writes the outcome to `result`. No step where the loss or
    a gradient is not finite.

    Not `accelerator.clip_grad_norm_`: it removes the scale from the gradients of all prepared
        optimizers.
    """
    accelerator = backend.accelerator
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    # Without any gradient a scaler raises an AssertionError. Only FSDP1 may give a rank none of the
    # parameters and another rank some.
    if backend.is_true_on_all_shards(not parameters):
        result.skipped = True
        return
    accelerator.unscale_gradients(optimizer)
    if max_grad_norm:
        result.grad_norm_tensor = backend.clip(model, parameters, max_grad_norm)
    scales = (
        accelerator.scaler is not None and accelerator.scaler.is_enabled()
    )  # then the scaler looks for overflows itself
    if not scales and not _is_finite(backend, parameters, result):
        result.nonfinite = result.skipped = True
        return
    if accelerator.scaler is None:
        optimizer.step()
        return
    # Read before the step, where the scaler waits for the device anyway; behind it, the read would
    # wait for the optimizer too.
    result.loss_scale = accelerator.scaler.get_scale()
    optimizer.step()
    # Of this optimizer: `accelerator.optimizer_step_was_skipped` is about the last steps of all of
    # them.
    result.overflowed = optimizer.step_was_skipped
    if _skips_by_itself(optimizer):
        result.overflowed = accelerator.scaler.get_scale() < result.loss_scale
    result.skipped = result.overflowed


def _is_finite(backend: Backend, parameters: Sequence[nn.Parameter], result: StepResult) -> bool:
    """Whether loss and gradients are finite, on all ranks. Waits for the device once, and reads
    loss and norm in the same transfer: behind the optimizer's step, reading them would wait for
    that too.

    A norm to clip to must be finite itself: one that overflows float32 would clip every gradient to
        zero. Without clipping, a norm
    that overflows is no answer, so each gradient is looked at.
    """
    loss = result.loss_tensor
    if result.grad_norm_tensor is not None:
        result.loss_tensor, result.grad_norm_tensor = numbers = torch.stack(
            [loss, result.grad_norm_tensor.to(loss)]
        ).cpu()
        return bool(numbers.isfinite().all())
    gradients = [part for p in parameters if (part := own_part(p.grad)).numel()]
    result.loss_tensor, _ = numbers = torch.stack(
        [loss, torch.nn.utils.get_total_norm(gradients).to(loss)]
    ).cpu()
    if backend.is_true_on_all_shards(numbers.isfinite().all()):
        return True
    each = [loss.isfinite(), *(g.isfinite().all().to(loss.device) for g in gradients)]
    return backend.is_true_on_all_shards(torch.stack(each).all())


def own_part(gradient: Tensor) -> Tensor:
    """Of a gradient in shards, the shard of this process."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Fused optimizers are called whether or not a gradient overflowed, so Accelerate takes every
    step for one that was made.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return getattr(optimizer, "_step_supports_amp_scaling", False)
