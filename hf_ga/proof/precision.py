"""Full precision for proofs: temporary dtype changes, and checks for models that cannot be trained
exactly.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from hf_ga.errors import ConfigError
from hf_ga.exact.forward import check_not_wrapped
from hf_ga.exact.override import override
from hf_ga.exact.precision import LOW_PRECISION, temporary_dtype


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Let a model compute in float32 within the block, so that a proof sees little rounding.

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


def check_trainable(model: nn.Module, trainable: list[nn.Parameter]) -> None:
    """Before a proof, check that a model can be trained exactly, whatever its loss is.

    Args:
        model: The unwrapped model.
        trainable: Its parameters that require gradients.

    Raises:
        ConfigError: If the model is wrapped by `torch.compile`, has layers with sparse gradients,
            has parameters on the meta device, or has no trainable parameters or trainable fp16 or
            bf16 parameters.
    """
    check_not_wrapped(model)
    sparse = [
        name for name, module in model.named_modules() if getattr(module, "sparse", False) is True
    ]
    if sparse:
        raise ConfigError(
            f"gradients must be dense tensors, but {', '.join(sparse)} has sparse ones: use "
            "sparse=False."
        )
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError(
            "the model has no weights on this process (they are on the meta device), so nothing "
            "can be proven here. Under FSDP2 with fsdp_cpu_ram_efficient_loading pass windows to "
            "hf_ga.prepare: the main process proves, and the others get the result."
        )
    if not trainable:
        raise ConfigError(
            "no parameter of the model is trainable: set requires_grad=True for some."
        )
    low_precision = {str(p.dtype) for p in trainable if p.dtype in LOW_PRECISION}
    if low_precision:
        raise ConfigError(
            "trainable parameters must be float32, but some are "
            f"{', '.join(sorted(low_precision))}, which rounds small updates away: call "
            "model.float(), or load it with dtype=torch.float32."
        )
