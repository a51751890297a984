"""The optimizer step of a window: unscale (fp16) and clip the gradients, update the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_ga.parallel.backend import Backend
from hf_ga.parallel.fsdp import local_shard


@dataclass
class StepResult:
    """Result of one window and its optimizer step.

    Before the optimizer step, and under fp16, reading `loss` or `grad_norm` waits for the device.

    Attributes:
        loss_tensor: Mean loss over the targets of the window, a scalar.
        num_targets: Number of targets of the window over all processes.
        grad_norm_tensor: Global L2 norm of the gradient before clipping, a scalar. None without
            clipping.
        skipped: Whether no weights were updated. That is so if the window has no targets, gradients
            overflowed under fp16, the loss or a gradient was not finite, or no parameter of the
            optimizer got a gradient.
        overflowed: Whether the update was skipped because a gradient was not finite under fp16. The
            loss scale was then lowered once.
        loss_scale: The loss scale of fp16 that this window's gradients had, on the host. None
            without fp16, and if nothing was scaled.
        nonfinite: Whether the update was skipped because the loss or a gradient was not finite,
            without fp16 (with fp16, see `overflowed`).
        cause: If `nonfinite`, a sentence that names the samples and the module that caused it, if
            a search was made. None otherwise.
        retries: How many times the window was computed again because memory ran out.
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
        """Mean loss over the targets of the window, inf or NaN if a forward overflowed. Before the
        optimizer step, and under fp16, reading it waits for the device.
        """
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the window's gradient before clipping, without the loss scale of fp16.

        None without clipping. Inf or NaN if a gradient overflowed.
        """
        return None if self.grad_norm_tensor is None else float(self.grad_norm_tensor)


def update(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float | None,
    result: StepResult,
) -> None:
    """Unscale (fp16) and clip the gradient of a window, then step the optimizer.

    No weights are updated if a gradient (or without fp16 the loss) is not finite, or if no
    parameter of the optimizer has a gradient.

    `accelerator.clip_grad_norm_` is not used, as it would unscale the gradients of all prepared
    optimizers.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
        optimizer: The prepared optimizer.
        max_grad_norm: Global L2 norm to clip the gradients to. None or 0: no clipping.
        result: Result of the window. The outcome of the step is written to it.
    """
    accelerator = backend.accelerator
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]
    # Without any gradient, a GradScaler would raise an AssertionError. Under FSDP1, a rank may hold
    # no part of any parameter, so ask all ranks.
    if backend.is_true_on_all_shards(not parameters):
        result.skipped = True
        return
    accelerator.unscale_gradients(optimizer)
    if max_grad_norm:
        result.grad_norm_tensor = backend.clip(model, parameters, max_grad_norm)
    scaler = accelerator.scaler
    checks_gradients = scaler is not None and scaler.is_enabled()  # the scaler finds overflows
    if not checks_gradients:
        loss_and_norm = _loss_and_norm_on_host(result, parameters)
        result.loss_tensor = loss_and_norm[0]
        if result.grad_norm_tensor is not None:
            result.grad_norm_tensor = loss_and_norm[1]
        if not _is_finite(backend, loss_and_norm, parameters, is_clipped=bool(max_grad_norm)):
            result.nonfinite = True
            result.skipped = True
            return
    if scaler is None:
        optimizer.step()
        return
    # Read before the step, where the scaler waits for the device anyway. After the step, the read
    # would wait for the optimizer, too.
    result.loss_scale = scaler.get_scale()
    optimizer.step()
    if _handles_overflow_itself(optimizer):
        result.overflowed = scaler.get_scale() < result.loss_scale
    else:
        # `accelerator.optimizer_step_was_skipped` would be about all optimizers.
        result.overflowed = optimizer.step_was_skipped
    result.skipped = result.overflowed


def _loss_and_norm_on_host(result: StepResult, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Copy loss and gradient norm (without clipping, that of this rank) to the host in one
    transfer, shape (2,). After the optimizer step it would wait for that, too.
    """
    loss = result.loss_tensor
    norm = result.grad_norm_tensor
    if norm is None:
        norm = torch.nn.utils.get_total_norm(_local_gradients(parameters))
    return torch.stack([loss, norm.to(loss)]).cpu()


def _is_finite(
    backend: Backend,
    loss_and_norm: Tensor,
    parameters: Sequence[nn.Parameter],
    *,
    is_clipped: bool,
) -> bool:
    """Return whether the loss and all gradients are finite on all ranks. The norm is the global one
    if the gradients were clipped, otherwise that of this rank's shards.
    """
    loss = loss_and_norm[0]
    are_finite = loss_and_norm.isfinite().all()
    if is_clipped:
        # A norm that overflowed would have clipped every gradient to zero, so it must be finite.
        return bool(are_finite)
    if backend.is_true_on_all_shards(are_finite):
        return True
    # An infinite norm may only mean that the squares overflowed, so check each gradient.
    flags = [
        gradient.isfinite().all().to(backend.device) for gradient in _local_gradients(parameters)
    ]
    flags.append(loss.isfinite().to(backend.device))
    return backend.is_true_on_all_shards(torch.stack(flags).all())


def _local_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters for the optimizer step of a window: under FSDP this rank's
    shards of them, without empty ones.
    """
    gradients = [local_shard(parameter.grad) for parameter in parameters]
    return [gradient for gradient in gradients if gradient.numel()]


def _handles_overflow_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's `step` itself skips an update if gradients overflowed (fp16).

    Fused optimizers do: the GradScaler always calls their `step`. So Accelerate's
    `step_was_skipped` is always False for them.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return getattr(optimizer, "_step_supports_amp_scaling", False)
