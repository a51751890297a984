"""How a call communicates and in which precision it computes: as the loop around it."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_ga.errors import ConfigError
from hf_ga.exact.backend import Backend, check_supported
from hf_ga.exact.forward import unwrapped
from hf_ga.exact.precision import check_precision
from hf_ga.parallel.fsdp import backend_for


class CallerBackend(Backend):
    """The backend of a loop without an accelerator: the ranks of torch's default process group, or
    this process alone, and the autocast of the caller.

    Args:
        device: The model's device.

    Raises:
        ConfigError: If the caller's autocast is fp16.
    """

    def __init__(self, device: torch.device) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.device = device
        self.num_processes = dist.get_world_size() if is_distributed else 1
        self.process_index = dist.get_rank() if is_distributed else 0
        self.autocast_dtype: torch.dtype | None = None
        if torch.is_autocast_enabled(device.type):
            self.autocast_dtype = torch.get_autocast_dtype(device.type)
        if self.autocast_dtype == torch.float16:
            raise ConfigError(
                "fp16 autocast is on, and fp16 needs a loss scale: pass accelerator="
                "Accelerator(mixed_precision='fp16') that prepared model and optimizer, or use "
                "bf16."
            )

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context with the caller's precision, for forwards and losses only."""
        if self.autocast_dtype is None:
            return nullcontext()
        # Within the caller's context, torch's cache of cast weights would outlive the optimizer's
        # step.
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=False)

    def scaled(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: there is no loss scale."""
        return tensor


def make_backend(model: nn.Module, accelerator: Accelerator | None) -> Backend:
    """Choose the backend of a call.

    Args:
        model: The model as it is passed to the call.
        accelerator: The accelerator that prepared the model, or None.

    Raises:
        ConfigError: If gradients could not be summed exactly, or would have another precision than
            the loop asks for.
    """
    base = unwrapped(model)
    device = next(base.parameters()).device
    if accelerator is not None:
        backend = _accelerators_backend(accelerator, device)
    elif hasattr(base, "_original_forward"):
        raise ConfigError(
            "the model was prepared by an Accelerator with mixed precision: pass accelerator=, "
            "which knows the loss scale."
        )
    else:
        backend = CallerBackend(device)
    _check_wrapper(model, backend)
    return backend


def _accelerators_backend(accelerator: Accelerator, device: torch.device) -> Backend:
    """Return the backend of an accelerator, or raise ConfigError if its settings do not fit."""
    # hf_ga.Accelerator, of a room that this one does not import.
    if hasattr(accelerator, "training_loop"):
        raise ConfigError(
            "hf_ga.Accelerator makes windows of its own loader's batches: use it without "
            "hf_ga.backward, or pass an accelerate.Accelerator."
        )
    check_supported(accelerator)
    check_precision(accelerator)
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            "torch.autocast is on around hf_ga.backward, but the accelerator decides the "
            "precision: use Accelerator(mixed_precision=...) alone, or leave accelerator out."
        )
    return backend_for(accelerator)


def _check_wrapper(model: nn.Module, backend: Backend) -> None:
    """Check that the model is one replica on each rank of the backend.

    Raises:
        ConfigError: If it is sharded, or a replica for other ranks.
    """
    if backend.is_sharded or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "hf_ga.backward does not support sharded parameters (FSDP, tensor parallelism): use "
            "hf_ga.Accelerator or hf_ga.train_step."
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "nn.DataParallel splits a batch by itself, with other dropout on each device: pass its "
            "`module`, or start one process for each device."
        )
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return
    number = model.process_group.size()
    if number != backend.num_processes:
        raise ConfigError(
            f"the model's DistributedDataParallel has {number} ranks, the default process group "
            f"{backend.num_processes}: gradients are summed over the default group, so wrap the "
            "model for all of its ranks."
        )
