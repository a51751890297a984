"""From the gradient of a window to new weights: remove the loss scale, clip once, step once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_ga.exact.backend import Backend


@dataclass
class StepResult:
    """Result of one window and its update.

    Before an update, and under fp16, reading `loss` and `grad_norm` waits for the device.

    Attributes:
        loss_tensor: Mean loss over the targets of the window, a scalar.
        num_targets: Targets of the window over all processes.
        grad_norm_tensor: Global L2 norm of the gradient before clipping, a scalar. None without
            clipping.
        skipped: Nothing was updated: a window without targets, gradients that overflowed under
            fp16, a loss or gradient that is not finite, or an optimizer none of whose parameters
            got a gradient.
        overflowed: It was skipped because a gradient was not finite under fp16; the scale was
            lowered once.
        loss_scale: Under fp16 the scale that the gradients of this window had, on the host. None
            otherwise, or where nothing was scaled.
        nonfinite: It was skipped because its loss or a gradient was not finite (not under fp16,
            where that is an overflow).
        cause: For such a window, a sentence with the samples and the module it came from.
        retries: How often the window was computed again because memory ran out.
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
    """Remove the loss scale, clip, and step, unless the loss or a gradient is not finite.

    Not by `accelerator.clip_grad_norm_`, which removes the scale from the gradients of all prepared
    optimizers.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
        optimizer: The prepared optimizer.
        max_grad_norm: Global L2 norm to clip the gradients to. None or 0: no clipping.
        result: Of the window; gets the outcome.
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
    scaler = accelerator.scaler
    scales = scaler is not None and scaler.is_enabled()  # then it looks for overflows itself
    if not scales:
        numbers = _loss_and_norm_on_host(result, parameters)
        result.loss_tensor = numbers[0]
        if result.grad_norm_tensor is not None:
            result.grad_norm_tensor = numbers[1]
        if not _is_finite(backend, numbers, parameters, is_clipped=bool(max_grad_norm)):
            result.nonfinite = True
            result.skipped = True
            return
    if scaler is None:
        optimizer.step()
        return
    # Read before the step, where the scaler waits for the device anyway; behind it, the read would
    # wait for the optimizer too.
    result.loss_scale = scaler.get_scale()
    optimizer.step()
    if _skips_by_itself(optimizer):
        result.overflowed = scaler.get_scale() < result.loss_scale
    else:
        # Not `accelerator.optimizer_step_was_skipped`, which is about all optimizers.
        result.overflowed = optimizer.step_was_skipped
    result.skipped = result.overflowed


def _loss_and_norm_on_host(result: StepResult, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Read loss and norm of the gradients in one transfer, which waits for the device once.

    Behind the optimizer's step, reading them would wait for that too.
    """
    loss = result.loss_tensor
    norm = result.grad_norm_tensor
    if norm is None:
        norm = torch.nn.utils.get_total_norm(_own_gradients(parameters))
    return torch.stack([loss, norm.to(loss)]).cpu()


def _is_finite(
    backend: Backend, numbers: Tensor, parameters: Sequence[nn.Parameter], *, is_clipped: bool
) -> bool:
    """Whether the loss and all gradients are finite, on all ranks.

    Args:
        backend: How ranks communicate.
        numbers: Loss and norm of the gradients, on the host.
        parameters: Those with a gradient.
        is_clipped: Whether the gradients were clipped by the norm, which is that of all ranks.
    """
    loss = numbers[0]
    are_finite = numbers.isfinite().all()
    if is_clipped:
        # A norm that overflowed would have clipped every gradient to zero, so it must be finite.
        return bool(are_finite)
    if backend.is_true_on_all_shards(are_finite):
        return True
    # Perhaps only the squares overflowed, so look at each gradient.
    flags = [
        gradient.isfinite().all().to(backend.device) for gradient in _own_gradients(parameters)
    ]
    flags.append(loss.isfinite().to(backend.device))
    return backend.is_true_on_all_shards(torch.stack(flags).all())


def _own_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients, or their shards on this rank, without empty ones."""
    gradients = [local_shard(parameter.grad) for parameter in parameters]
    return [gradient for gradient in gradients if gradient.numel()]


def local_shard(gradient: Tensor) -> Tensor:
    """Return the shard of this process of a gradient in shards, or else the gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer skips steps itself: Accelerate then takes every step for one that was
    made.

    Fused optimizers do: they are called whether or not a gradient overflowed.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return getattr(optimizer, "_step_supports_amp_scaling", False)
