"""Saving and loading a checkpoint's weights and optimizer state as safetensors: each rank writes
files of its own, and any number of processes and kind of parallelism can read them.

Uses torch's distributed checkpoint, with its safetensors storage (no pickle).
"""

import json
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.futures import Future
from torch.optim import Optimizer

from hf_ga.model.forward import unwrapped
from hf_ga.parallel.fsdp import unwrapped_name

FILE_BYTES = 1 << 30  # size of a file; tensors of a GPU are copied file by file
MODEL = "model."  # prefix of the saved names of weights
MOMENTS = "optimizer."  # prefix of the saved names of the optimizer's tensors


def named_state(
    model: nn.Module, optimizer: Optimizer, *, trained_only: bool = False
) -> dict[str, Any]:
    """Return a checkpoint's weights and optimizer state, by name. All processes must call it.

    Args:
        model: The prepared model. Its parameters are named as in the unwrapped model.
        optimizer: The optimizer of the model's parameters. The settings of its parameter groups
            (learning rate, ...) are not returned.
        trained_only: Whether to omit frozen parameters.

    Returns:
        Name -> tensor, whole or this rank's shards.
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
    return tensors


def write_shards(
    tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors as safetensors. Each process writes its own shards, or its part of replicated
    tensors, so all processes must call it.

    Args:
        tensors: Name -> tensor, from `named_state`.
        folder: The folder to write the files into.
        group: How the processes communicate. None: in torch's default group.
    """
    writer = _ShardsWriter(str(folder), save_distributed=True)
    # What torch says on a single process. Not for a block only: this may be a thread, and the
    # filters are those of the process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    distributed_checkpoint.save(tensors, storage_writer=writer, process_group=group)


class _ShardsWriter(HuggingFaceStorageWriter):
    """Writes the same tensors as torch's class, in files of about 1 GiB, and lets threads run:
    torch's class holds Python's lock while it builds the bytes of a file.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors; see torch's class."""
        files: dict[int, list[WriteItem]] = {}
        num_bytes = 0
        for item in plan.items:
            files.setdefault(1 + num_bytes // FILE_BYTES, []).append(item)
            tensor = item.tensor_data
            num_bytes += tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize
        for number, items in files.items():
            name = _gen_file_name(number, max(files), plan.storage_data["shard_index"])
            _write_file(Path(self.path) / name, items, planner)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # torch needs none: the files say what they contain
        return written


def _write_file(path: Path, items: list[WriteItem], planner: SavePlanner) -> None:
    """Write parts of tensors, and their offsets in the whole tensors, as a safetensors file, and
    flush it to the disk.
    """
    tensors: dict[str, Tensor] = {}
    offsets: dict[str, Any] = {}
    for item in items:
        name = item.index.fqn
        tensor = planner.resolve_data(item).detach().cpu().contiguous()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # safetensors refuses views that overlap
        tensors[name] = tensor
        offsets[name] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})
    path.chmod(mode)  # safetensors lets nobody but the owner read its files
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_shards(
    model: nn.Module, optimizer: Optimizer, folder: Path, *, trained_only: bool = False
) -> None:
    """Load weights and optimizer state in place from what `write_shards` wrote, under the same
    or another kind of parallelism (one process, DDP, FSDP1, FSDP2, pipeline). All processes must
    call it.

    A parameter for which the files contain no optimizer state (it never had a gradient) has none
    afterwards.

    Args:
        model: The prepared model.
        optimizer: The optimizer of the model's parameters.
        folder: The folder with the files.
        trained_only: The same as in `named_state`.

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
