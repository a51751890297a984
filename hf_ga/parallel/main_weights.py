"""FSDP2 with `cpu_ram_efficient_loading`: only the main process loads the model's weights.

The other processes build the same modules on the meta device. All processes shard the modules
without weights; then the main process broadcasts one parameter after the other, of which each
process keeps its shard. (Accelerate's own loading needs the parameters' memory addresses on all
processes, and models without persistent buffers.)
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from hf_ga.errors import ConfigError
from hf_ga.model.override import override
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.processes import call_on_main, raise_on_all_ranks


@dataclass(frozen=True)
class ModelOutline:
    """The main process's model and optimizers without the values of the parameters; it is broadcast
    to the other processes.

    Attributes:
        parameters: Name of each parameter -> one of the same kind on the meta device; the same one
            for all names of a tied parameter.
        buffers: Name of each buffer -> its values on the CPU, and whether it is persistent.
        optimizer_groups: For each optimizer, for each of its parameter groups, the names of the
            parameters.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, tuple[Tensor, bool]]
    optimizer_groups: list[list[list[str]]]


def loads_on_main(accelerator: Accelerator) -> bool:
    """Whether only the main process loads the weights of a model before it is sharded: under FSDP2
    with `cpu_ram_efficient_loading`.

    Raises:
        ConfigError: If FSDP1 has that setting, which is not supported.
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


@contextmanager
def sharding_from_main(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[None]:
    """Give all processes their shards of the main process's weights, while the block calls
    `accelerator.prepare` under FSDP2 with `cpu_ram_efficient_loading`.

    Before the block, all parameters move to the meta device, so that they are sharded without
    values. After the block, the main process broadcasts the values into the shards. All processes
    must enter the block.

    Args:
        accelerator: The accelerator of the run.
        model: The model, not sharded yet. Only the main process's weights and buffers are read.
        optimizers: The optimizers of the model's parameters. Their parameters are replaced by the
            sharded ones.

    Raises:
        ConfigError: If the processes built different models; on all processes.
    """
    plugin = accelerator.state.fsdp_plugin
    outline = _broadcast_outline(accelerator, model, optimizers)
    weights: dict[str, Tensor] = {}
    if accelerator.is_main_process:
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _move_parameters_to_meta(model, outline)
    _set_optimizer_parameters(optimizers, outline, model)
    # Accelerate's own way to load weights on the main process is off.
    with override(plugin, cpu_ram_efficient_loading=False):
        yield
    _broadcast_weights(model, weights, offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy))
    _tie_parameters(model, outline)
    _set_optimizer_parameters(optimizers, outline, model)


def _broadcast_outline(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> ModelOutline:
    """Return the outline of the main process's model on all processes, after checking on each that
    it built the same model and optimizers.
    """
    outline = call_on_main(accelerator, _make_outline, model, optimizers)
    with raise_on_all_ranks(accelerator):
        _check_same_model(accelerator, model, optimizers, outline)
    return outline


def _check_same_model(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    outline: ModelOutline,
) -> None:
    """Check that this process built the same parameters and the same number of parameter groups as
    the main process.
    """
    own_parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted({*outline.parameters, *own_parameters}):
        own = _describe(own_parameters.get(name))
        main = _describe(outline.parameters.get(name))
        if own != main:
            raise ConfigError(
                f"process {accelerator.process_index} built another model than the main process: "
                f"{name} is {own} here and {main} there. Build the same "
                "model on all processes, with the same parameters frozen."
            )
    own_num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
    main_num_groups = [len(groups) for groups in outline.optimizer_groups]
    if own_num_groups != main_num_groups:
        raise ConfigError(
            f"process {accelerator.process_index} built an optimizer with another number of "
            "parameter groups than the main process: build the same one on all processes."
        )


def _make_outline(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> ModelOutline:
    """Describe the main process's model and optimizers without the values of the parameters, for
    the other processes, which do not load the weights.
    """
    names_of = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    optimizer_groups = []
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            if any(parameter not in names_of for parameter in group["params"]):
                raise ConfigError(
                    "under FSDP2 with fsdp_cpu_ram_efficient_loading an optimizer may have "
                    "parameters of the model only: remove the others from it."
                )
            groups.append([names_of[parameter][0] for parameter in group["params"]])
        optimizer_groups.append(groups)
    parameters = {}
    for parameter, names in names_of.items():
        parameters |= dict.fromkeys(names, _on_meta(parameter))
    saved_names = model.state_dict().keys()
    return ModelOutline(
        parameters=parameters,
        buffers={
            name: (buffer.cpu(), name in saved_names)
            for name, buffer in model.named_buffers(remove_duplicate=False)
        },
        optimizer_groups=optimizer_groups,
    )


def _describe(parameter: nn.Parameter | None) -> str:
    """Return shape, dtype and trainability of a parameter in words."""
    if parameter is None:
        return "missing"
    kind = "trainable" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)} {parameter.dtype} ({kind})"


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same kind on the meta device, without values."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _move_parameters_to_meta(model: nn.Module, outline: ModelOutline) -> None:
    """Before FSDP2 shards a model, replace all its parameters by ones on the meta device, without
    values, and its buffers by those of the main process.
    """
    for name, parameter in outline.parameters.items():
        _set_parameter(model, name, parameter)
    for name, (values, is_persistent) in outline.buffers.items():
        module_path, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_path)
        module.register_buffer(attribute, values, persistent=is_persistent)


def _broadcast_weights(model: nn.Module, weights: dict[str, Tensor], *, offload: bool) -> None:
    """Broadcast the main process's weights (none on the others) into the shards of all processes,
    one parameter at a time. `offload`: whether the shards are on the CPU.
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload, strict=False
    )
    with warnings.catch_warnings():
        # torch warns about its own way to find the device of the broadcast.
        warnings.filterwarnings("ignore", "`_get_pg_default_device`|Multiple backends are")
        set_model_state_dict(model, weights, options=options)


def _tie_parameters(model: nn.Module, outline: ModelOutline) -> None:
    """Tie the parameters of a model that are tied in the main process's model: all their names
    refer to the parameter of the first name.
    """
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in outline.parameters.items():
        first_name = first_names.setdefault(parameter, name)
        _set_parameter(model, name, model.get_parameter(first_name))


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace a parameter of a model, by its full name such as "layers.0.weight"."""
    module_path, _, attribute = name.rpartition(".")
    model.get_submodule(module_path).register_parameter(attribute, parameter)


def _set_optimizer_parameters(
    optimizers: Sequence[torch.optim.Optimizer], outline: ModelOutline, model: nn.Module
) -> None:
    """Replace the parameters of the optimizers by those that the model has now under the same
    names. (Accelerate finds them by addresses, which are all 0 on the meta device.)
    """
    for optimizer, groups in zip(optimizers, outline.optimizer_groups, strict=True):
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [model.get_parameter(name) for name in names]
