"""Full precision for proofs: temporary dtype changes, and checks for models that cannot be trained
exactly.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.forward import check_not_wrapped
from hf_ga.exact.override import override
from hf_ga.exact.precision import LOW_PRECISION


@contextmanager
def tensors_in(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Run the block with parameters or buffers in another dtype; then restore the original tensors.

    Needs the memory of a copy in that dtype. Writes to a tensor within the block are lost. Swaps
    the data of the tensor objects, so shared objects stay shared.
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
    """Disable autocast (Accelerate's and the caller's), and convert frozen half precision and the
    products of 4-bit weights to float32.
    """
    device_type = next(model.parameters()).device.type
    frozen = (p for p in model.parameters() if not p.requires_grad)
    low = [tensor for tensor in (*frozen, *model.buffers()) if tensor.dtype in LOW_PRECISION]
    is_wrapped = "_original_forward" in vars(model)
    with (
        ExitStack() as stack,
        torch.autocast(device_type, enabled=False),
        tensors_in(low, torch.float32),
    ):
        if is_wrapped:
            stack.enter_context(override(model, forward=model._original_forward))
        for module in model.modules():
            if getattr(module, "compute_dtype", None) in LOW_PRECISION:  # bitsandbytes
                stack.enter_context(override(module, compute_dtype=torch.float32))
        yield


def check_trainable(model: nn.Module, trainable: list[nn.Parameter]) -> None:
    """Raise ConfigError for a model that cannot be trained exactly with any loss."""
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
    low = {str(p.dtype) for p in trainable if p.dtype in LOW_PRECISION}
    if low:
        raise ConfigError(
            f"trainable parameters must be float32, but some are {', '.join(sorted(low))}, which "
            "rounds small updates away: call "
            "model.float(), or load it with dtype=torch.float32."
        )
