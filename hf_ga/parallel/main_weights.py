"""FSDP2 with `cpu_ram_efficient_loading`: until it is sharded, only the main process holds the
model's weights.

The other processes build the same modules on the meta device. All processes shard the modules
without weights; then the main process broadcasts one parameter after the other, of which each
process keeps its shard. (Accelerate's own loading needs addresses of the parameters on all
processes, and models without persistent buffers.)
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_ga.errors import ConfigError
from hf_ga.exact.override import override
from hf_ga.parallel.fsdp import is_sharded, own_name
from hf_ga.parallel.processes import raise_on_all_ranks


@dataclass(frozen=True)
class Outline:
    """What is known of a model besides the values of its parameters.

    Attributes:
        parameters: Of each, its shape, its dtype, and whether it is trained.
        tied: Names of parameters that are one.
        buffers: Of each, its values on the CPU, and whether it is saved with the model.
        groups: Of each optimizer, the names of the parameters in each of its groups.
    """

    parameters: dict[str, tuple[torch.Size, torch.dtype, bool]]
    tied: list[list[str]]
    buffers: dict[str, tuple[Tensor, bool]]
    groups: list[list[list[str]]]


def loads_on_main(accelerator: Accelerator) -> bool:
    """Whether only the main process holds the weights of a model that is not sharded yet.

    Raises:
        ConfigError: If FSDP1 is to load so.
    """
    if not is_sharded(accelerator):
        return False
    plugin = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading and plugin.fsdp_version == 1:
        raise ConfigError(
            "FSDP1 does not support fsdp_cpu_ram_efficient_loading: set it to false, or set "
            "fsdp_version to 2."
        )
    return bool(plugin.cpu_ram_efficient_loading)


def holds_weights(accelerator: Accelerator) -> bool:
    """Whether this process holds the weights of a model that is not sharded yet."""
    return accelerator.is_main_process or not loads_on_main(accelerator)


def empty_elsewhere(accelerator: Accelerator) -> AbstractContextManager[None]:
    """Around building a model: its parameters are on the meta device, and need no memory, where
    this process holds no weights.
    """
    return nullcontext() if holds_weights(accelerator) else init_empty_weights()


@contextmanager
def sharding_from_main(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Around `accelerator.prepare`: the weights of the main process reach the shards of all.

    Args:
        accelerator: The accelerator of the run.
        model: Not sharded yet; only the main process's weights are read.
        optimizers: Of the model's parameters.

    Raises:
        ConfigError: If the processes built different models, or a tensor of the model is neither a
            parameter nor a buffer; on all processes.
    """
    plugin = accelerator.state.fsdp_plugin
    outline = _agreed_outline(accelerator, model, optimizers)
    weights: dict[str, Tensor] = {}
    if accelerator.is_main_process:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _remove_weights(model, outline)
    _set_optimized(optimizers, outline, model)
    with override(plugin, cpu_ram_efficient_loading=False):
        yield
    _load(model, weights, offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy))
    _tie(model, outline)
    _set_optimized(optimizers, outline, model)
    with raise_on_all_ranks(accelerator):
        _check_complete(model)


def _agreed_outline(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Outline:
    """The main process's outline of a model.

    Raises:
        ConfigError: If another process has other parameters, or the optimizers have parameters of
            something else; on all processes.
    """
    outline: Outline | None = None
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process:
            outline = _outline(model, optimizers)
    (outline,) = broadcast_object_list([outline])
    own = _described(model)
    differing = [
        name
        for name in sorted({*outline.parameters, *own})
        if outline.parameters.get(name) != own.get(name)
    ]
    with raise_on_all_ranks(accelerator):
        if differing:
            name = differing[0]
            raise ConfigError(
                f"process {accelerator.process_index} built another model than the main process: "
                f"{name} is {own.get(name)} here and {outline.parameters.get(name)} there. Build "
                "the same model on all processes, with the same parameters frozen."
            )
        if [len(o.param_groups) for o in optimizers] != [len(of) for of in outline.groups]:
            raise ConfigError(
                f"process {accelerator.process_index} built an optimizer with another number of "
                "parameter groups than the main process: build the same one on all processes."
            )
    return outline


def _outline(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Outline:
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    saved = model.state_dict().keys()
    parameters = [[group["params"] for group in optimizer.param_groups] for optimizer in optimizers]
    if any(p not in names for groups in parameters for group in groups for p in group):
        raise ConfigError(
            "under FSDP2 with fsdp_cpu_ram_efficient_loading an optimizer may have parameters of "
            "the model only: leave the others out."
        )
    return Outline(
        parameters=_described(model),
        tied=[several for several in names.values() if len(several) > 1],
        buffers={
            name: (buffer.cpu(), name in saved)
            for name, buffer in model.named_buffers(remove_duplicate=False)
        },
        groups=[[[names[p][0] for p in group] for group in groups] for groups in parameters],
    )


def _described(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    """See `Outline.parameters`."""
    return {
        name: (parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _remove_weights(model: nn.Module, outline: Outline) -> None:
    """Put all parameters on the meta device. Buffers are those of the main process."""
    for name, (shape, dtype, is_trained) in outline.parameters.items():
        empty = torch.empty(shape, dtype=dtype, device="meta")
        _set_parameter(model, name, nn.Parameter(empty, requires_grad=is_trained))
    _tie(model, outline)
    for name, (values, is_saved) in outline.buffers.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_buffer(own, values, persistent=is_saved)


def _load(model: nn.Module, weights: dict[str, Tensor], *, offload: bool) -> None:
    """Broadcast the main process's weights into the shards of all, one parameter at a time.

    Args:
        model: Sharded, on the meta device.
        weights: By name; empty on the other processes.
        offload: Whether the shards lie in the memory of the CPU.
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload, strict=False
    )
    with warnings.catch_warnings():
        # about the device of the broadcast, which torch finds in an old way
        warnings.filterwarnings("ignore", "`_get_pg_default_device`|Multiple backends are")
        set_model_state_dict(model, weights, options=options)


def _tie(model: nn.Module, outline: Outline) -> None:
    """Make one parameter of those that are one on the main process."""
    for first, *others in outline.tied:
        for name in others:
            _set_parameter(model, name, model.get_parameter(first))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_parameter(own, parameter)


def _set_optimized(
    optimizers: Sequence[torch.optim.Optimizer], outline: Outline, model: nn.Module
) -> None:
    """Let optimizers have the parameters that the model has now. (Accelerate finds them by their
    addresses, which are all 0 on the meta device.)
    """
    for optimizer, groups in zip(optimizers, outline.groups, strict=True):
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [model.get_parameter(name) for name in names]


def _check_complete(model: nn.Module) -> None:
    """Check that no tensor of a model is without values.

    Raises:
        ConfigError: If one is: an attribute of a module that is no buffer.
    """
    named = chain(
        model.named_parameters(),
        model.named_buffers(),
        (
            (f"{name}.{attribute}".removeprefix("."), value)
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor)
        ),
    )
    empty = [own_name(name) for name, tensor in named if tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{empty[0]} has no values, because this process built the model on the meta device, "
            "and it is neither a parameter nor a buffer: register it as a buffer, or build the "
            "model on all processes outside of torch.device('meta')."
        )
