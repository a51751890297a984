"""Mixed precision: whether Accelerate does what it was asked for, fp16 on a CPU, and tensors that have another type for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hf_ga.errors import ConfigError

LOW_PRECISION = (torch.float16, torch.bfloat16)


def enable_fp16_on_cpu(accelerator: Accelerator) -> None:
    """Make `mixed_precision="fp16"` real on a CPU, where Accelerate silently computes in float32; to be called before `prepare`.

    The scaler takes what a `GradScalerKwargs` among the accelerator's `kwargs_handlers` says. On another device or in another
    precision nothing is done, nor where it was called before.

    Example:
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        enable_fp16_on_cpu(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    if accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu" or accelerator.scaler is not None:
        return
    options = accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler is not None else {}
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    # FSDP1's shards are plain tensors, of which each process sees its own; FSDP2's know of each other.
    scaler = ShardedGradScaler if plugin is not None and plugin.fsdp_version == 1 else torch.amp.GradScaler
    accelerator.scaler = scaler("cpu", **options)
    accelerator.native_amp = True


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
        "hf_ga.exact.precision.enable_fp16_on_cpu(accelerator) before prepare, or use mixed precision bf16 or no."
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


def precision_name(accelerator: Accelerator) -> str:
    """What is computed in, in words for a log.

    Example:
        precision_name(accelerator)  # 'bf16 autocast, float32 weights and gradients'
    """
    if not accelerator.native_amp:
        return "float32"
    scaled = accelerator.scaler is not None and accelerator.scaler.is_enabled()
    return f"{accelerator.mixed_precision} autocast{' with loss scaling' if scaled else ''}, float32 weights and gradients"


def at_least_float32(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 as float32; anything else as it is."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


@contextmanager
def parameters_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """All floating-point parameters in another type for a while; buffers stay. At the end each has its very own tensor again.

    It costs the memory of a copy in that type. What is written to a parameter meanwhile is lost.

    Example:
        with parameters_in(model, torch.bfloat16):
            model.save_pretrained(folder)
    """
    with _tensors_in([p for p in model.parameters() if p.is_floating_point()], dtype):
        yield


@contextmanager
def frozen_in_float32(model: nn.Module) -> Iterator[None]:
    """Frozen parameters and buffers of float16 or bfloat16 in float32 for a while; see `parameters_in`."""
    frozen = (p for p in model.parameters() if not p.requires_grad)
    with _tensors_in([t for t in (*frozen, *model.buffers()) if t.dtype in LOW_PRECISION], torch.float32):
        yield


@contextmanager
def _tensors_in(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Swaps what the tensor objects hold, so whatever shares an object goes on sharing it."""
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
    """The forward without the autocast that Accelerate put around it, or the caller has on, and no frozen half precision."""
    prepared = model.__dict__.get("forward")
    device_type = next(model.parameters()).device.type
    with torch.autocast(device_type, enabled=False), frozen_in_float32(model):
        if prepared is None or not hasattr(model, "_original_forward"):
            yield
            return
        model.forward = model._original_forward
        try:
            yield
        finally:
            model.forward = prepared


def check_trainable(model: nn.Module, trainable: list[nn.Parameter]) -> None:
    """Raise ConfigError for a model that cannot be trained exactly whatever its loss is."""
    if hasattr(model, "_orig_mod"):
        raise ConfigError("a model compiled by torch.compile is not supported yet: pass the model itself.")
    if sparse := [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]:
        raise ConfigError(f"gradients must be dense tensors, but {', '.join(sparse)} makes sparse ones: use sparse=False.")
    if not trainable:
        raise ConfigError("no parameter of the model is trainable: set requires_grad of some.")
    if low := {str(p.dtype) for p in trainable if p.dtype in LOW_PRECISION}:
        raise ConfigError(
            f"trainable parameters must be float32, some are {', '.join(sorted(low))}, in which updates get lost: call "
            "model.float(), or load it with dtype=torch.float32."
        )
