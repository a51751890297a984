"""Weights and optimizer under FSDP, through torch's distributed checkpoint: each rank writes its own file, any layout reads it.
Also reads into shards what a run without FSDP wrote.

The metadata of that format is a pickle, so callers verify its hash first (`recovery/checkpoint.py` does).
"""

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from hf_ga.errors import CheckpointError

# Adafactor's state is factored along the axes of whole matrices; Adagrad makes its own before the weights are sharded.
NOT_SHARDED = (torch.optim.Adafactor, torch.optim.Adagrad)


def save_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Write the shards of this process; all processes must call it. A parameter goes by its name in the unwrapped model."""
    distributed_checkpoint.save(_state(model, optimizer), checkpoint_id=folder)


def load_shards(model: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """Read weights and optimizer in place, whatever layout wrote them: FSDP1, FSDP2, DDP or one process; all must call it.

    Raises:
        CheckpointException, OSError, RuntimeError, ValueError, KeyError: they are not of this model, or damaged.
    """
    state = _state(model, optimizer)
    moments = state["optimizer"]["state"]
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    untouched = [name for name, of_one in moments.items() if not any(f"optimizer.state.{name}.{k}" in saved for k in of_one)]
    for name in untouched:
        del moments[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        distributed_checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    _set_moments(model, optimizer, state["optimizer"], full=False)


def load_whole(model: nn.Module, optimizer: Optimizer, weights: Path, moments: Path) -> None:
    """Read what a run without FSDP wrote into the shards of this process; all processes must call it.

    Both files are mapped into memory, not read at once: a process holds its shards and one whole tensor at a time.

    Args:
        model, optimizer: prepared, under FSDP1 or FSDP2. weights: a safetensors file. moments: a plain optimizer's `state_dict()`.

    Raises:
        RuntimeError, ValueError, OSError, SafetensorError, UnpicklingError: they are not of this model, or damaged.
    """
    groups = get_optimizer_state_dict(model, _plain(optimizer))["param_groups"]
    named = _named(torch.load(moments, weights_only=True, map_location="cpu", mmap=True), groups)
    set_model_state_dict(model, read_weights(weights), options=StateDictOptions(full_state_dict=True))
    _set_moments(model, optimizer, named, full=True)


def check_shardable(optimizer: Optimizer, folder: Path) -> None:
    """Raise CheckpointError where the state of this kind of optimizer cannot be cut into shards."""
    if isinstance(_plain(optimizer), NOT_SHARDED):
        raise CheckpointError(
            f"{folder} is of a run with {type(_plain(optimizer)).__name__}, whose state FSDP cannot cut into shards (nor can FSDP "
            "train with it): resume without FSDP."
        )


def read_weights(file: Path) -> dict[str, Tensor]:
    """All weights of a safetensors file, those too that were written once because they go by two names (tied embeddings)."""
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        tied = {name: source for name, source in (opened.metadata() or {}).items() if source in tensors}
    tensors |= {name: tensors[source] for name, source in tied.items()}
    return dict(sorted(tensors.items()))  # one order on all processes, which send each other one tensor after the other


def _named(saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A plain optimizer's state under the names of the parameters, which it has as numbers in the order of its groups."""
    numbers = [[*group["params"]] for group in saved["param_groups"]]
    names = [[*group["params"]] for group in groups]
    if [len(group) for group in numbers] != [len(group) for group in names]:
        raise ValueError("the optimizer's groups have other numbers of parameters than this run's.")
    name_of = dict(zip(chain(*numbers), chain(*names), strict=True))
    return {
        "state": {name_of[number]: state for number, state in saved["state"].items()},
        "param_groups": [{**group, "params": own} for group, own in zip(saved["param_groups"], names, strict=True)],
    }


def _set_moments(model: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, full: bool) -> None:
    """Put the optimizer's state in place. Parameters that have none never had a gradient: they begin without, not with the zeros of
    one step that torch makes to know the shapes.
    """
    plain = _plain(optimizer)
    if not state["state"]:  # plain SGD: torch would look for a tensor to learn the device from
        plain.load_state_dict(state)
        return
    set_optimizer_state_dict(model, plain, state, options=StateDictOptions(full_state_dict=full, strict=False))
    names = [name for group in get_optimizer_state_dict(model, plain)["param_groups"] for name in group["params"]]
    parameters = [parameter for group in plain.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name not in state["state"]:
            plain.state.pop(parameter, None)


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, _plain(optimizer))
    return {"model": weights, "optimizer": moments}


def _plain(optimizer: Any) -> Optimizer:
    """The one inside a prepared one."""
    return getattr(optimizer, "optimizer", optimizer)
