"""Mixed precision: check that Accelerate applies the requested one and that the optimizer works
with it; the dtypes of sums.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.model.override import override

LOW_PRECISION = (torch.float16, torch.bfloat16)


def check_precision(accelerator: Accelerator) -> None:
    """Check that Accelerate applies the requested mixed precision to the forwards of windows,
    instead of silently training in another.

    Reads attributes only, and does not wait for the device.

    Raises:
        ConfigError: If fp8 is requested, or a precision that Accelerate ignores on this device
            (fp16 on a CPU).
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
    """Check that the optimizer removes the fp16 loss scale from the gradients, and that it can step
    with the gradient of a window (see `check_step`).

    Raises:
        ConfigError: If the accelerator scales the loss, but did not prepare the optimizer, or
            prepared it before it had a scaler; or if the optimizer needs a closure or sparse
            gradients.
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
    """Check that an optimizer can step with the gradient of a window, which is computed once and
    dense.

    Raises:
        ConfigError: If its step needs a closure (LBFGS), or sparse gradients (SparseAdam).
    """
    while hasattr(optimizer, "optimizer"):  # wrapped by Accelerate
        optimizer = optimizer.optimizer
    optimizer_class = type(optimizer)
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"{optimizer_class.__name__} computes the loss several times in each step, by a "
            "closure, but a window is computed once and then updated: use an optimizer whose "
            "step() needs no closure, such as AdamW."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam needs sparse gradients, but those of a window are dense tensors: use Adam "
            "or AdamW."
        )


def check_trainable(
    models: Sequence[nn.Module], parameters: Sequence[nn.Parameter], num_processes: int
) -> None:
    """Check that models can be trained exactly, whatever their loss is.

    Args:
        models: The models.
        parameters: The trainable parameters, of the models and beside them.
        num_processes: Number of processes of the run.

    Raises:
        ConfigError: If no parameter is trainable, some are fp16 or bf16, or embeddings have sparse
            gradients, or gradients or weights that depend on the micro-batch or the process.
    """
    if not parameters:
        raise ConfigError(
            "no parameter of the model is trainable: set requires_grad=True for some."
        )
    low_precision = {str(p.dtype) for p in parameters if p.dtype in LOW_PRECISION}
    if low_precision:
        raise ConfigError(
            "trainable parameters must be float32, but some are "
            f"{', '.join(sorted(low_precision))}, which rounds small updates away: call "
            "model.float(), or load it with dtype=torch.float32."
        )
    if sparse := _modules_with(models, "sparse"):
        raise ConfigError(
            f"gradients must be dense tensors, but {sparse} has sparse ones: use sparse=False."
        )
    if scaled := _modules_with(models, "scale_grad_by_freq"):
        raise ConfigError(
            f"{scaled} divides gradients by how often an index occurs in the micro-batch, so they "
            "depend on the split of the window: use scale_grad_by_freq=False."
        )
    if num_processes > 1 and (renormalised := _modules_with(models, "max_norm")):
        raise ConfigError(
            f"{renormalised} renormalises the weights that a forward looks up, on each process "
            "those of its own samples, so that the processes' weights drift apart: use "
            "max_norm=None, or one process."
        )


def _modules_with(models: Sequence[nn.Module], option: str) -> str:
    """Return the names of embeddings with an option; "" for none."""
    names = [
        name or type(module).__name__
        for model in models
        for name, module in model.named_modules()
        if hasattr(module, "num_embeddings") and getattr(module, option, None)
    ]
    return ", ".join(names)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which the losses and numbers of targets of a window's micro-batches are
    summed: float64, or float32 on MPS, which has no float64.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def at_least_float32(tensor: Tensor) -> Tensor:
    """Convert a float16 or bfloat16 tensor to float32, for example the outputs that a loss is
    computed from; other tensors are returned unchanged.
    """
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def autocast_disabled(device: torch.device) -> torch.autocast:
    """Return a context with autocast disabled, so that operations run in the dtype of their inputs,
    for a loss that is computed once for the whole window.
    """
    return torch.autocast(device.type, enabled=False)


@contextmanager
def temporary_dtype(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Convert parameters or buffers to another dtype within the block, then restore them.

    For equivalence checks in float64, for example. Only the data of the tensor objects is
    replaced, so tied parameters stay tied. The original data is put back at the end of the block:
    what the block writes to a tensor is lost.

    Args:
        tensors: The parameters and buffers. The block needs memory for a copy of each.
        dtype: Their dtype within the block.
    """
    originals = [(tensor, tensor.data) for tensor in tensors]
    try:
        for tensor, original in originals:
            tensor.data = original.to(dtype)
        yield
    finally:
        for tensor, original in originals:
            tensor.data = original


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Let a model compute in float32 within the block, so that a comparison sees little rounding.

    Disables autocast, the caller's and the one that Accelerate's `prepare` has put around the
    forward. Converts fp16 and bf16 buffers and frozen parameters to float32, and lets 4-bit layers
    of bitsandbytes compute in float32. Trainable parameters are float32 already (see
    `check_trainable`). All of this is undone at the end of the block.
    """
    device_type = next(model.parameters()).device.type
    frozen = (p for p in model.parameters() if not p.requires_grad)
    low_precision_tensors = [
        tensor for tensor in (*frozen, *model.buffers()) if tensor.dtype in LOW_PRECISION
    ]
    has_accelerate_autocast = "_original_forward" in vars(model)
    with (
        ExitStack() as stack,
        torch.autocast(device_type, enabled=False),
        temporary_dtype(low_precision_tensors, torch.float32),
    ):
        if has_accelerate_autocast:
            stack.enter_context(override(model, forward=model._original_forward))
        for module in model.modules():
            if getattr(module, "compute_dtype", None) in LOW_PRECISION:  # bitsandbytes
                stack.enter_context(override(module, compute_dtype=torch.float32))
        yield
