"""Mixed precision: whether Accelerate applies the requested one, and the dtypes of sums."""

import inspect

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_ga.errors import ConfigError

LOW_PRECISION = (torch.float16, torch.bfloat16)


def check_precision(accelerator: Accelerator) -> None:
    """Refuse a precision that would silently be another one.

    Reads attributes only: no device is waited for.

    Raises:
        ConfigError: If it is fp8, or one that Accelerate leaves out (fp16 on a CPU).
    """
    requested = accelerator.mixed_precision
    scaler = accelerator.scaler
    is_bf16 = requested == "bf16"
    is_scaled_fp16 = requested == "fp16" and scaler is not None
    is_applied = accelerator.native_amp and (is_bf16 or is_scaled_fp16)
    if requested != "no" and not is_applied:
        raise ConfigError(
            f"mixed precision {requested} is not supported on the device "
            f"{accelerator.device.type} by this Accelerator (autocast {accelerator.native_amp}, "
            f"scaler {scaler}): use bf16 or no, or for fp16 on a CPU call "
            "hf_ga.parallel.prepare.enable_fp16_on_cpu(accelerator) before prepare."
        )


def check_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would take scaled gradients for the true ones, or that cannot step
    with the gradient of a window.

    Raises:
        ConfigError: If the accelerator scales the loss, and the optimizer was not prepared by it
            (or before it had its scaler). See also `check_step`.
    """
    check_step(optimizer)
    if accelerator.scaler is None or getattr(optimizer, "scaler", None) is accelerator.scaler:
        return
    raise ConfigError(
        "under fp16 the optimizer must remove the loss scale from the gradients, but this "
        f"{type(optimizer).__name__} does not use the accelerator's scaler: call model, optimizer "
        "= accelerator.prepare(model, optimizer), after enable_fp16_on_cpu."
    )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step with the gradient of a window.

    Raises:
        ConfigError: If its step needs a closure (LBFGS), or sparse gradients (SparseAdam).
    """
    while hasattr(optimizer, "optimizer"):  # wrapped by Accelerate
        optimizer = optimizer.optimizer
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{kind.__name__} computes the loss several times in each step, by a closure, but a "
            "window is computed once and then updated: use an optimizer whose step() needs no "
            "closure, such as AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam needs sparse gradients, but those of a window are dense tensors: use Adam "
            "or AdamW."
        )


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which losses and counts are added up: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32; other dtypes are unchanged."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def not_autocast(device: torch.device) -> torch.autocast:
    """Return a context in which operations have the precision of their inputs."""
    return torch.autocast(device.type, enabled=False)
