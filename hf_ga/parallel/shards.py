"""Weights and the optimizer's state as safetensors: each rank writes its own file, any layout reads them.

torch's distributed checkpoint does the work, with the storage in which nothing is pickled.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from hf_ga.exact.forward import unwrapped
from hf_ga.parallel.fsdp import own_name


def save_shards(model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False) -> None:
    """Write the shards of this process, or its part of what all hold; all processes must call it.

    The settings of the optimizer's groups are numbers, not tensors, and are the caller's to keep.

    Args:
        model: a parameter goes by its name in the unwrapped model. trained_only: leave frozen parameters out.
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # inside a prepared one
    made_no_step = not plain.state and not isinstance(model, FullyShardedDataParallel)  # a rank of FSDP1 may have no parameters
    state = _state(model, plain, trained_only)
    if made_no_step:  # torch has made one with gradients of zero, which the run that goes on must not count
        plain.state.clear()
        state["optimizer"] = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch.distributed is disabled: one process is meant
        distributed_checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False) -> None:
    """Read weights and optimizer in place, whatever layout wrote them: FSDP1, FSDP2, DDP or one process; all must call it.

    Raises:
        CheckpointException, OSError, RuntimeError, ValueError, KeyError: they are not of this model, or damaged.
    """
    plain, reader = getattr(optimizer, "optimizer", optimizer), HuggingFaceStorageReader(str(folder))
    state = _state(model, plain, trained_only)
    saved = reader.read_metadata().state_dict_metadata
    # Parameters whose state was not saved never had a gradient: they begin without.
    state["optimizer"] = {
        name: moments for name, moments in state["optimizer"].items() if any(f"optimizer.{name}.{k}" in saved for k in moments)
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        distributed_checkpoint.load(state, storage_reader=reader)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))  # tied weights have one name there
    _set_moments(model, plain, state["optimizer"])


def _set_moments(model: nn.Module, optimizer: Optimizer, moments: dict[str, Any]) -> None:
    """Put the optimizer's state in place; where there is none, not the zeros of the step that torch makes to know the shapes."""
    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    if not moments:  # plain SGD: torch would look for a tensor to learn the device from
        optimizer.state.clear()
        return
    options = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer, {"state": moments, "param_groups": groups}, options=options)
    names = [name for group in groups for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name not in moments:
            optimizer.state.pop(parameter, None)


def _state(model: nn.Module, optimizer: Optimizer, trained_only: bool) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    seen: set[nn.Parameter] = set()
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        if parameter in seen or (trained_only and not parameter.requires_grad):  # tied weights are kept under one name
            weights.pop(own_name(name), None)
        seen.add(parameter)
    return {"model": weights, "optimizer": moments["state"]}
