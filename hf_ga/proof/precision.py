"""Full precision for proofs: tensors that have another type for a while, and models that cannot be trained exactly."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.precision import LOW_PRECISION


@contextmanager
def tensors_in(tensors: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Parameters or buffers in another type for a while; at the end each holds its very own values again.

    It costs the memory of a copy in that type. What is written to a tensor meanwhile is lost. Swaps what the tensor objects hold,
    so whatever shares an object goes on sharing it.
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
    """The forward without the autocast that Accelerate put around it, or the caller has on, and no frozen half precision."""
    device_type = next(model.parameters()).device.type
    frozen = (p for p in model.parameters() if not p.requires_grad)
    low = [tensor for tensor in (*frozen, *model.buffers()) if tensor.dtype in LOW_PRECISION]
    is_wrapped = "_original_forward" in model.__dict__
    plain = patch.object(model, "forward", model._original_forward) if is_wrapped else nullcontext()
    with torch.autocast(device_type, enabled=False), tensors_in(low, torch.float32), plain:
        yield


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
