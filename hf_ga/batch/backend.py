"""The backend of `hf_ga.backward`: it communicates and computes with the ranks and the precision of
the loop that calls it.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from hf_ga.errors import ConfigError
from hf_ga.model.forward import unwrapped
from hf_ga.model.precision import check_precision
from hf_ga.parallel.backend import Backend, LocalBackend, check_supported
from hf_ga.parallel.fsdp import backend_for


def caller_backend(device: torch.device) -> LocalBackend:
    """Return the backend of `hf_ga.backward` in a loop without an accelerator. It uses the ranks of
    torch's default process group (or this process alone), and the dtype of the autocast that is on
    around the call.

    Args:
        device: The model's device.

    Raises:
        ConfigError: If the caller's autocast is fp16.
    """
    settings: dict[str, Any] = {}
    if dist.is_initialized():
        settings |= {"num_processes": dist.get_world_size(), "process_index": dist.get_rank()}
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        if dtype == torch.float16:
            raise ConfigError(
                "fp16 autocast is on, and fp16 needs a loss scale: pass accelerator="
                "Accelerator(mixed_precision='fp16') that prepared model and optimizer, or use "
                "bf16."
            )
        # Within the caller's context, torch would still use its cache of cast weights after the
        # optimizer's step has changed them.
        autocast = partial(torch.autocast, device.type, dtype, cache_enabled=False)
        settings |= {"mixed_precision": "bf16", "autocast": autocast}
    return LocalBackend(device, **settings)


def make_backend(model: nn.Module, accelerator: Accelerator | None) -> Backend:
    """Return the backend for one call of `hf_ga.backward`: the accelerator's, or that of the
    caller's process group and autocast.

    Args:
        model: The model as it is passed to the call.
        accelerator: The accelerator that prepared the model, or None.

    Raises:
        ConfigError: If the gradients of the ranks could not be summed exactly, or if the precision
            would not be the one that the loop asks for.
    """
    base_model = unwrapped(model)
    device = next(base_model.parameters()).device
    if accelerator is not None:
        backend = _backend_of_accelerator(accelerator, device)
    elif hasattr(base_model, "_original_forward"):
        raise ConfigError(
            "the model was prepared by an Accelerator with mixed precision: pass accelerator=, "
            "which knows the loss scale."
        )
    else:
        backend = caller_backend(device)
    _check_wrapper(model, backend)
    return backend


def _backend_of_accelerator(accelerator: Accelerator, device: torch.device) -> Backend:
    """Return the backend of the user's accelerator, if its settings are supported, it is not an
    `hf_ga.Accelerator`, and no `torch.autocast` is on around the call.
    """
    # True for hf_ga.Accelerator, which this subpackage must not import.
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
            "precision: use Accelerator(mixed_precision=...) alone, or omit accelerator."
        )
    return backend_for(accelerator)


def _check_wrapper(model: nn.Module, backend: Backend) -> None:
    """Check that every rank holds a full replica of the model: no shards, no `nn.DataParallel`, DDP
    over as many ranks as the backend has.
    """
    if backend.is_sharded or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ConfigError(
            "hf_ga.backward does not support sharded parameters (FSDP, tensor parallelism): use "
            "hf_ga.Accelerator or hf_ga.train_step."
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError(
            "nn.DataParallel splits a batch by itself, with different dropout on each device: pass "
            "its `module`, or start one process for each device."
        )
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return
    num_ranks = model.process_group.size()
    if num_ranks != backend.num_processes:
        raise ConfigError(
            f"the model's DistributedDataParallel has {num_ranks} ranks, the default process group "
            f"has {backend.num_processes}: gradients are summed over the default group, so wrap "
            "the model for all of its ranks."
        )
