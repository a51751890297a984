"""Saving and loading a checkpoint's weights and optimizer state as safetensors: each rank writes
files of its own, and any number of processes and kind of parallelism can read them.

Uses torch's distributed checkpoint, with its safetensors storage (no pickle).
"""

import warnings
from collections.abc import Collection
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
from hf_ga.parallel.fsdp import unwrapped_name

FILE_BYTES = 1 << 30  # maximum size of a file over all ranks; each file is built in memory
MODEL = "model."  # prefix of the saved names of weights
MOMENTS = "optimizer."  # prefix of the saved names of the optimizer's tensors


def save_shards(
    model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False
) -> None:
    """Save a checkpoint's weights and optimizer state. Each process writes its own shards, or its
    part of replicated tensors, so all processes must call it.

    Args:
        model: The prepared model. Its parameters are saved by their names in the unwrapped model.
        optimizer: The optimizer of the model's parameters. The settings of its parameter groups
            (learning rate, ...) are not saved.
        folder: The folder to write the files into.
        trained_only: Whether to omit frozen parameters.
    """
    bare_optimizer = _unwrap_optimizer(optimizer)
    # A rank of FSDP1 may have no parameters, and so no state although it has made steps.
    has_made_no_step = not bare_optimizer.state and not isinstance(model, FullyShardedDataParallel)
    weights, optimizer_state = get_state_dict(model, bare_optimizer)
    _remove_unsaved_weights(model, weights, trained_only)
    tensors = _named_tensors(weights, optimizer_state["state"])
    if has_made_no_step:
        # `get_state_dict` has made a step with zero gradients to create the state. Undo it, and
        # save weights only.
        bare_optimizer.state.clear()
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    writer = HuggingFaceStorageWriter(str(folder), _assign_files(tensors), save_distributed=True)
    # On a single process torch warns that "torch.distributed is disabled".
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        distributed_checkpoint.save(tensors, storage_writer=writer)


def load_shards(
    model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False
) -> None:
    """Load weights and optimizer state in place from files that `save_shards` wrote, under the same
    or another kind of parallelism (one process, DDP, FSDP1, FSDP2, pipeline). All processes must
    call it.

    A parameter for which the files contain no optimizer state (it never had a gradient) has none
    afterwards.

    Args:
        model: The prepared model.
        optimizer: The optimizer of the model's parameters.
        folder: The folder with the files.
        trained_only: The same as in `save_shards`.

    Raises:
        CheckpointException, OSError, RuntimeError, ValueError, KeyError: If the files do not fit
            this model, or are damaged.
    """
    bare_optimizer = _unwrap_optimizer(optimizer)
    reader = HuggingFaceStorageReader(str(folder))
    weights, optimizer_state = get_state_dict(model, bare_optimizer)
    saved_names = reader.read_metadata().state_dict_metadata
    # torch has created zero moments for all parameters: keep those that the files have.
    moments = {
        name: tensors
        for name, tensors in optimizer_state["state"].items()
        if any(f"{MOMENTS}{name}.{key}" in saved_names for key in tensors)
    }
    _remove_unsaved_weights(model, weights, trained_only)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # Overwrites the tensors of `weights` and `moments`.
        distributed_checkpoint.load(_named_tensors(weights, moments), storage_reader=reader)
    set_model_state_dict(model, weights, options=StateDictOptions(strict=False))
    if moments:  # plain SGD has none: torch would look for a tensor to find the device
        set_optimizer_state_dict(
            model,
            bare_optimizer,
            optimizer_state | {"state": moments},
            options=StateDictOptions(strict=False),
        )
    _remove_state_of_others(bare_optimizer, optimizer_state, moments)


def _remove_state_of_others(
    optimizer: Optimizer, optimizer_state: dict[str, Any], loaded: Collection[str]
) -> None:
    """Remove the state of all parameters from an optimizer, in place, except of those whose state
    was loaded from a distributed checkpoint: torch has created zeros for the others.

    Args:
        optimizer: torch's optimizer.
        optimizer_state: Its state dict, in which parameters have names; in the order of the
            optimizer's parameter groups.
        loaded: Names of the parameters whose state was loaded.
    """
    names = [name for group in optimizer_state["param_groups"] for name in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        if name not in loaded:
            optimizer.state.pop(parameter, None)


def _unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return torch's optimizer inside an `AcceleratedOptimizer`, which torch's distributed
    checkpoint needs; any other optimizer itself.
    """
    return getattr(optimizer, "optimizer", optimizer)


def _assign_files(tensors: dict[str, Any]) -> dict[str, int]:
    """Assign the tensors of a distributed checkpoint to numbered files of about `FILE_BYTES`
    (1 GiB). All processes must call it.

    Args:
        tensors: Name -> tensor, of this rank.

    Returns:
        Name -> number of the file, from 1, for the tensors of all ranks.
    """
    files: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        files[name] = 1 + num_bytes // FILE_BYTES
        num_bytes += tensor.size().numel() * tensor.dtype.itemsize
    # torch uses the first rank's table for all ranks, but each stage of a pipeline has other
    # tensors: merge the tables of all ranks.
    files_of_all_ranks: dict[str, int] = {}
    for files_of_rank in gather_object([files]):
        files_of_all_ranks |= files_of_rank
    return files_of_all_ranks


def _remove_unsaved_weights(model: nn.Module, weights: dict[str, Any], trained_only: bool) -> None:
    """Remove from a state dict, in place, the weights that a distributed checkpoint does not
    contain: a tied parameter under all its names but the first, and, with `trained_only`, frozen
    parameters.

    Args:
        model: The prepared model.
        weights: Its state dict: name in the unwrapped model -> tensor.
        trained_only: Whether to remove frozen parameters.
    """
    earlier_parameters: set[nn.Parameter] = set()
    for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
        is_tied_copy = parameter in earlier_parameters
        is_omitted = trained_only and not parameter.requires_grad
        if is_tied_copy or is_omitted:
            weights.pop(unwrapped_name(name), None)
        earlier_parameters.add(parameter)


def _named_tensors(weights: dict[str, Any], moments: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the tensors of weights and optimizer state in one dict, by the names that they have in
    a distributed checkpoint: `model.<parameter>` and `optimizer.<parameter>.<key>`.

    Args:
        weights: Name of a parameter or buffer -> tensor.
        moments: Name of a parameter -> key in the optimizer's state ("exp_avg") -> tensor.

    >>> _named_tensors({"lm_head.weight": 1}, {"lm_head.weight": {"exp_avg": 2}})
    {'model.lm_head.weight': 1, 'optimizer.lm_head.weight.exp_avg': 2}
    """
    tensors = {f"{MODEL}{name}": weight for name, weight in weights.items()}
    for name, state in moments.items():
        for key, value in state.items():
            tensors[f"{MOMENTS}{name}.{key}"] = value
    return tensors
