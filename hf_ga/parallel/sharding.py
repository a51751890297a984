"""FSDP, version 1 and 2: real on a CPU, gradients reduced in float32 and once a window, clipping and weights over all shards."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_ga.errors import ConfigError
from hf_ga.exact.precision import LOW_PRECISION
from hf_ga.exact.reduce import is_sharded, sum_over_processes


def enable_fsdp_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None = None) -> None:
    """Make FSDP real on CPU processes, where Accelerate silently trains with DDP; to be called before `prepare`.

    Args:
        plugin: left out, it is what `accelerate launch --use_fsdp` asked for; without that nothing is done, nor on a GPU.

    Example:
        accelerator = Accelerator(cpu=True)
        enable_fsdp_on_cpu(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    asked = plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if not asked or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    plugin = plugin or FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):  # a later Accelerator copies from the first
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")  # FSDP1 takes no index of a CPU


def reduce_in_float32(accelerator: Accelerator) -> None:
    """Let FSDP sum gradients in float32, where Accelerate sets the type that is computed in; to be called before `prepare`."""
    plugin = accelerator.state.fsdp_plugin if is_sharded(accelerator) else None
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is not None and policy is not None and _sum_type(policy) in LOW_PRECISION:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32)


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
    """`accelerator.prepare(model, optimizer)`, with sums in float32, units that can be wrapped, one name a parameter under FSDP.

    Raises:
        ConfigError: FSDP1 without use_orig_params, whose optimizer would not know the parameters.
    """
    if not is_sharded(accelerator):
        model, optimizer = accelerator.prepare(model, optimizer)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            keep_process_group_alive(model)
        return model, optimizer
    reduce_in_float32(accelerator)
    plugin = accelerator.state.fsdp_plugin
    if plugin.activation_checkpointing and getattr(getattr(model, "config", None), "use_cache", False):
        model.config.use_cache = False  # keys that are computed again would be appended to the cache of the first time
    if plugin.fsdp_version == 1:
        if not plugin.use_orig_params:
            raise ConfigError("FSDP1 needs fsdp_use_orig_params: true, or the optimizer would not know the parameters it updates.")
        return accelerator.prepare(model, optimizer)
    _choose_units(plugin, model)
    with _one_name_each(model):
        return accelerator.prepare(model, optimizer)


def keep_process_group_alive(model: nn.parallel.DistributedDataParallel) -> None:
    """Let a model under DDP end without hanging.

    Python frees an object's entries in the order in which they came. The process group's own object, freed last, gives the GIL back
    while gloo's threads end; the reducer's destructor holds it, and hangs where they need it for a tensor.
    """
    model.outlives_reducer = model.process_group


def check_sharding(accelerator: Accelerator) -> None:
    """Refuse an FSDP that loses bits on the way.

    Raises:
        ConfigError: gradients would be summed in half precision, or those of ignored modules not at all.
    """
    if not is_sharded(accelerator):
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.ignored_modules is not None:
        raise ConfigError(
            "FSDP must sum the gradients of all parameters, but leaves those of fsdp_ignored_modules alone: leave that setting out."
        )
    policy = plugin.mixed_precision_policy
    if policy is not None and _sum_type(policy) in LOW_PRECISION:
        raise ConfigError(
            f"FSDP must sum gradients in float32, but its reduce_dtype is {_sum_type(policy)} (Accelerate's default under mixed "
            "precision). Call hf_ga.parallel.sharding.reduce_in_float32(accelerator) before prepare."
        )


def gradient_sync(accelerator: Accelerator, model: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Around a forward and backward: whether FSDP reduces the gradients in it. Nothing to do without FSDP: DDP is not asked at all.

    FSDP1 adds gradients up in the type that is computed in, so in half precision it always reduces.
    """
    if not is_sharded(accelerator) or wanted or _adds_up_in_low_precision(accelerator):
        return nullcontext()
    return accelerator.no_sync(model)


def allow_unequal_use(model: nn.Module, sum_of_means: bool) -> None:
    """Let FSDP2 reduce gradients of parameters that only some processes used; without that it mixes up gradients.

    Args:
        sum_of_means: a process without targets of one part of the loss does not use that part.

    Raises:
        ConfigError: this torch cannot, and the loss needs it.
    """
    if not isinstance(model, FSDPModule):
        return
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)
    elif sum_of_means:
        raise ConfigError("a loss that is a sum of several means needs torch 2.13 or newer under FSDP2: use FSDP1 or DDP.")


def drop_unused(accelerator: Accelerator, model: nn.Module, unused: Collection[str]) -> None:
    """Take the zero gradients away that FSDP made for parameters of no use, or the optimizer would decay them.

    Args:
        unused: names of those that got no gradient in the proof; one that has one now keeps it.
    """
    if not is_sharded(accelerator) or not unused:
        return
    parameters = [p for name, p in model.named_parameters() if _own_name(name) in unused]
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    sizes = sum_over_processes(accelerator, [0.0 if g is None else float(g.abs().sum()) for g in gradients])
    for parameter, size in zip(parameters, sizes, strict=True):
        if not size:
            parameter.grad = None


def clip_gradients(model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` to an L2 norm, over all shards, of at most `max_norm`; returns the norm before."""
    if isinstance(model, FullyShardedDataParallel):
        others = [(p, p.grad) for p in set(model.parameters()) - set(parameters)]
        for parameter, _ in others:  # FSDP1 knows only all gradients of the model
            parameter.grad = None
        norm = model.clip_grad_norm_(max_norm)
        for parameter, gradient in others:
            parameter.grad = gradient
        return norm
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _choose_units(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """The layers that FSDP2 shards as units, where none are named: as the model says, but none that holds its input embeddings.

    Accelerate makes a unit of the embeddings by itself, and fails where BERT and its kin name those among the layers.
    """
    if plugin.transformer_cls_names_to_wrap is not None or not isinstance(model, PreTrainedModel):
        return
    embeddings = model.get_input_embeddings()
    holders = {type(m).__name__ for m in model.modules() if any(part is embeddings for part in m.modules())}
    plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holders)


@contextmanager
def _one_name_each(model: nn.Module) -> Iterator[None]:
    """A parameter that a module shares with one of its own submodules (the bias of BERT's masked-LM head, which is its decoder's)
    goes by the submodule's name alone for a while: FSDP2 would put it in two groups, and refuse that.
    """
    owners = {parameter: (module, name) for module in model.modules() for name, parameter in module._parameters.items()}
    shared = [
        (module, name, owners[parameter])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and owners[parameter][0] is not module and owners[parameter][0] in set(module.modules())
    ]
    for module, name, _ in shared:
        del module._parameters[name]
    try:
        yield
    finally:
        for module, name, (owner, own_name) in shared:
            module._parameters[name] = owner._parameters[own_name]


def full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Whole weights under the names of the unwrapped model: under FSDP gathered, on the CPU of the main process (empty on others).

    All processes must call it.
    """
    if not isinstance(model, FullyShardedDataParallel) or accelerator.device.type != "cpu":
        return accelerator.get_state_dict(model)
    # On a CPU nothing is moved away, so "offloaded" weights would lie in memory that FSDP1 frees.
    whole = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        weights = model.state_dict()
    return {name: tensor.clone() for name, tensor in weights.items()} if accelerator.is_main_process else {}


def _own_name(name: str) -> str:
    """Of a parameter in the unwrapped model."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _sum_type(policy: MixedPrecision | MixedPrecisionPolicy) -> torch.dtype | None:
    return policy.reduce_dtype or policy.param_dtype  # left out, it is the type that is computed in


def _adds_up_in_low_precision(accelerator: Accelerator) -> bool:
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    return plugin.fsdp_version == 1 and policy is not None and policy.param_dtype in LOW_PRECISION
