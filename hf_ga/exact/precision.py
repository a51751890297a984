"""Mixed precision: whether Accelerate computes what it was asked for, and in what types sums are taken."""

import torch
from accelerate import Accelerator
from torch import Tensor

from hf_ga.errors import ConfigError

LOW_PRECISION = (torch.float16, torch.bfloat16)


def check_precision(accelerator: Accelerator) -> None:
    """Refuse a precision that would silently be another one. Reads attributes only: no device is waited for.

    Raises:
        ConfigError: fp8, or mixed precision that Accelerate leaves out (fp16 on a CPU).
    """
    asked = accelerator.mixed_precision
    if asked == "fp8":
        raise ConfigError("mixed precision must be no, bf16 or fp16, but is fp8, which is not supported yet: choose one of them.")
    if asked == "no" or (accelerator.native_amp and (asked != "fp16" or accelerator.scaler is not None)):
        return
    raise ConfigError(
        f"mixed precision must be computed as asked for, but it is {asked} on the device {accelerator.device.type}, where "
        f"Accelerate computes in float32 (autocast {accelerator.native_amp}, scaler {accelerator.scaler}). Call "
        "hf_ga.parallel.prepare.enable_fp16_on_cpu(accelerator) before prepare, or use mixed precision bf16 or no."
    )


def check_optimizer(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would take scaled gradients for the true ones.

    Raises:
        ConfigError: the accelerator scales the loss, and the optimizer was not prepared by it (or before it had its scaler).
    """
    if accelerator.scaler is None or getattr(optimizer, "scaler", None) is accelerator.scaler:
        return
    raise ConfigError(
        "under fp16 the optimizer must remove the loss scale from the gradients, but this "
        f"{type(optimizer).__name__} does not know the accelerator's scaler: it was not prepared by this accelerator, or before "
        "enable_fp16_on_cpu. Call model, optimizer = accelerator.prepare(model, optimizer)."
    )


def sum_dtype(device: torch.device) -> torch.dtype:
    """In what type losses and counts are added up: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; anything else as it is."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
