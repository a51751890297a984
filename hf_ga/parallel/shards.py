"""Weights and the optimizer's state as safetensors: each rank writes its own files, and any layout
can read them.

Uses torch's distributed checkpoint, with its safetensors storage (no pickle).
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from hf_ga.exact.forward import unwrapped
from hf_ga.parallel.fsdp import own_name

FILE_BYTES = 1 << 30  # over all ranks; each file is built in memory
MODEL = "model."  # prefix of the names of weights
MOMENTS = "optimizer."  # prefix of the names of the optimizer's tensors


def save_shards(
    model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False
) -> None:
    """Write this process's shards, or its part of replicated tensors; all processes must call it.

    Args:
        model: parameters are saved by their names in the unwrapped model. optimizer: its groups'
            settings are not saved.
        trained_only: leave frozen parameters out.
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # unwraps a prepared optimizer
    # A rank of FSDP1 may have no parameters, and so no state.
    made_no_step = not plain.state and not isinstance(model, FullyShardedDataParallel)
    tensors = _tensors(model, *get_state_dict(model, plain), trained_only)
    if made_no_step:  # torch made a step with zero gradients to create the state: undo it
        plain.state.clear()
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    files = {}
    size = 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE_BYTES
        size += tensor.size().numel() * tensor.dtype.itemsize
    # The first rank's table is used for all, and the stages of a pipeline have other tensors.
    files = {name: file for of_rank in gather_object([files]) for name, file in of_rank.items()}
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    # A single process is warned that "torch.distributed is disabled".
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        distributed_checkpoint.save(tensors, storage_writer=writer)


def load_shards(
    model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False
) -> None:
    """Read weights and optimizer in place, written by any layout (FSDP1, FSDP2, DDP, one process);
    all processes must call it.

    Raises:
        CheckpointException, OSError, RuntimeError, ValueError, KeyError: they do not fit this
            model, or are damaged.
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # unwraps a prepared optimizer
    reader = HuggingFaceStorageReader(str(folder))
    weights, state = get_state_dict(model, plain)
    saved = reader.read_metadata().state_dict_metadata
    # A parameter without saved moments never had a gradient: drop the zeros that torch created for
    # it.
    moments = {
        n: of for n, of in state["state"].items() if any(f"{MOMENTS}{n}.{k}" in saved for k in of)
    }
    tensors = _tensors(model, weights, {"state": moments}, trained_only)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        distributed_checkpoint.load(tensors, storage_reader=reader)  # in place: weights and moments
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    if moments:  # plain SGD has none: torch would look for a tensor to find the device
        set_optimizer_state_dict(
            model, plain, state | {"state": moments}, options=StateDictOptions(strict=False)
        )
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in plain.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name not in moments:
            plain.state.pop(parameter, None)


def _tensors(
    model: nn.Module, weights: dict[str, Any], state: dict[str, Any], trained_only: bool
) -> dict[str, Any]:
    """The tensors of a checkpoint. Removes tied weights, and with `trained_only` frozen ones, from
    `weights`.
    """
    seen: set[nn.Parameter] = set()
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        if parameter in seen or (trained_only and not parameter.requires_grad):
            weights.pop(own_name(name), None)
        seen.add(parameter)
    moments = {
        f"{MOMENTS}{name}.{k}": value
        for name, of_one in state["state"].items()
        for k, value in of_one.items()
    }
    return {f"{MODEL}{name}": weight for name, weight in weights.items()} | moments
