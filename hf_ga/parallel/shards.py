"""Weights and optimizer in torch's distributed checkpoint: each rank writes its own file, any layout reads it.

The metadata of that format is a pickle, so callers verify its hash first (`recovery/checkpoint.py` does).
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as distributed_checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
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


def save_shards(model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False) -> None:
    """Write the shards of this process, or its part of what all hold; all processes must call it.

    Args:
        model: a parameter goes by its name in the unwrapped model. trained_only: leave frozen parameters out.
    """
    plain = _plain(optimizer)
    made_no_step = not plain.state and not isinstance(model, FullyShardedDataParallel)  # a rank of FSDP1 may have no parameters
    state = _state(model, plain, trained_only)
    if made_no_step:  # torch has made one with gradients of zero, which the run that goes on must not count
        plain.state.clear()
        state["optimizer"]["state"] = {}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch.distributed is disabled: one process is meant
        distributed_checkpoint.save(state, checkpoint_id=folder)


def load_shards(model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False) -> None:
    """Read weights and optimizer in place, whatever layout wrote them: FSDP1, FSDP2, DDP or one process; all must call it.

    Raises:
        CheckpointException, OSError, RuntimeError, ValueError, KeyError: they are not of this model, or damaged.
    """
    plain = _plain(optimizer)
    state = _state(model, plain, trained_only)
    moments = state["optimizer"]["state"]
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    untouched = [name for name, of_one in moments.items() if not any(f"optimizer.state.{name}.{k}" in saved for k in of_one)]
    for name in untouched:
        del moments[name]
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        distributed_checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not trained_only))
    _set_moments(model, plain, state["optimizer"])


def _set_moments(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put the optimizer's state in place. Parameters that have none never had a gradient: they begin without, not with the zeros of
    one step that torch makes to know the shapes.
    """
    if not state["state"]:  # plain SGD: torch would look for a tensor to learn the device from
        optimizer.load_state_dict(state)
        return
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    names = [name for group in get_optimizer_state_dict(model, optimizer)["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name not in state["state"]:
            optimizer.state.pop(parameter, None)


def _state(model: nn.Module, optimizer: Optimizer, trained_only: bool) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    if trained_only:  # torch's own option keeps the second name of a tied parameter
        for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                del weights[name]
    return {"model": weights, "optimizer": moments}


def _plain(optimizer: Any) -> Optimizer:
    """The one inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)
