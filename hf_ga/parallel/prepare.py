"""Preparing a model for training on several processes: FSDP on CPUs, gradient reduction in float32,
which modules FSDP2 wraps; and gathering full weights from shards.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hf_ga.model.forward import is_of_transformers
from hf_ga.model.override import override
from hf_ga.parallel.backend import keep_process_group_alive
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_weights import loads_on_main, sharding_from_main


def enable_fp16_on_cpu(accelerator: Accelerator) -> None:
    """Enable `mixed_precision="fp16"` on a CPU, where Accelerate silently computes in float32: give
    the accelerator a gradient scaler and turn autocast on. Call it before `prepare`.

    The scaler is made with the `GradScalerKwargs` among the accelerator's `kwargs_handlers`. Does
    nothing on other devices, in other precisions, or if the accelerator has a scaler already.

    Example:
        accelerator = Accelerator(mixed_precision="fp16", cpu=True)
        enable_fp16_on_cpu(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    if (
        accelerator.mixed_precision != "fp16"
        or accelerator.device.type != "cpu"
        or accelerator.scaler is not None
    ):
        return
    options: dict[str, Any] = {}
    if accelerator.scaler_handler is not None:
        options = accelerator.scaler_handler.to_kwargs()
    scaler_class: type[torch.amp.GradScaler] = torch.amp.GradScaler
    if is_sharded(accelerator) and not accelerator.is_fsdp2:
        # FSDP1's shards are plain tensors, so its scaler must ask all ranks for overflows. FSDP2's
        # shards are DTensors, for which torch does that itself.
        scaler_class = ShardedGradScaler
    accelerator.scaler = scaler_class("cpu", **options)
    accelerator.native_amp = True  # Accelerate's switch for autocast


def enable_fsdp_on_cpu(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None = None
) -> None:
    """Enable FSDP on CPU processes, where Accelerate silently trains with DDP. Call it before
    `prepare`. Does nothing on GPUs, on a single process, or if FSDP is not requested.

    Args:
        accelerator: The accelerator, whose state (which all accelerators share) is changed.
        plugin: The FSDP settings. Default: those of `accelerate launch --use_fsdp`, if it was
            launched so.

    Example:
        accelerator = Accelerator(cpu=True)
        enable_fsdp_on_cpu(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    is_launched_with_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    is_requested = plugin is not None or is_launched_with_fsdp
    if not is_requested or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    if plugin is None:
        plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    # Accelerators that are created later copy from the first of these states.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")  # FSDP1 does not accept a CPU with an index


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """Call `accelerator.prepare(model, optimizer)`; under FSDP, with gradients reduced in float32
    (see `exact_sharding`). Under DDP, also keep the model from hanging when it is freed.

    Returns:
        The prepared model and optimizer.
    """
    with exact_sharding(accelerator, [model], [optimizer]):
        model, optimizer = accelerator.prepare(model, optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        keep_process_group_alive(model)
    return model, optimizer


@contextmanager
def exact_sharding(
    accelerator: Accelerator,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[None]:
    """Configure FSDP for exact gradients while the block calls `accelerator.prepare`; without FSDP,
    do nothing.

    The settings of the accelerator's FSDP plugin stay changed: gradients are reduced in float32,
    FSDP2 wraps only modules that it is able to wrap, and FSDP1 uses the original parameters. With
    `cpu_ram_efficient_loading`, the main process's weights are distributed to the shards of all
    processes. Layers that FSDP2's activation checkpointing computes again draw the same random
    numbers.

    Args:
        accelerator: The accelerator that prepares.
        models: The models that the block prepares, not wrapped yet.
        optimizers: The optimizers that the block prepares.
    """
    if not is_sharded(accelerator):
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    from_main = loads_on_main(accelerator)
    with ExitStack() as stack:
        for model in models:
            configure_fsdp(plugin, model)
            uses_cache = getattr(getattr(model, "config", None), "use_cache", False)
            if plugin.activation_checkpointing and uses_cache:
                # A recomputed forward would append its keys to the cache a second time.
                model.config.use_cache = False
            if plugin.fsdp_version == 1:
                plugin.use_orig_params = True  # keeps the optimizer's parameters valid
                continue
            if from_main and not isinstance(model, FSDPModule):
                stack.enter_context(sharding_from_main(accelerator, model, optimizers))
            stack.enter_context(_without_shared_parameter_names(model))
        if plugin.fsdp_version == 2:
            stack.enter_context(_checkpointing_with_same_draws())
        yield


@contextmanager
def every_prepare_exact(accelerator: Accelerator) -> Iterator[None]:
    """During the block, let every `accelerator.prepare` configure FSDP for exact gradients. This is
    for a loop that calls `accelerator.prepare` itself, such as Trainer's.
    """
    original_prepare = accelerator.prepare

    def prepare_exactly(*args: Any, **kwargs: Any) -> Any:
        """Call the original `accelerator.prepare` within `exact_sharding`, which configures FSDP
        for exact gradients.
        """
        models = [value for value in args if isinstance(value, nn.Module)]
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        with exact_sharding(accelerator, models, optimizers):
            return original_prepare(*args, **kwargs)

    with override(accelerator, prepare=prepare_exactly):
        yield


def configure_fsdp(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Change the settings of FSDP in place: reduce gradients in float32 and, for FSDP2, keep the
    dtype of the outputs and choose modules that it can wrap.

    Accelerate's default for both dtypes is the compute dtype. With bf16, FSDP2 would round a
    float32 loss to 8 bits, and with it the weight of the micro-batch in the window's gradient.

    Args:
        plugin: The accelerator's FSDP settings.
        model: The model that will be sharded, for its modules.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        dtypes = {"reduce_dtype": torch.float32}
        if plugin.fsdp_version == 2:
            dtypes["output_dtype"] = None
        plugin.mixed_precision_policy = replace(policy, **dtypes)
    if plugin.fsdp_version == 2:
        _set_classes_to_wrap(plugin, model)


def _set_classes_to_wrap(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Let FSDP2 wrap the classes in the `_no_split_modules` of a transformers model, unless the
    user chose them.

    Not those that contain the input embeddings, as in BERT: Accelerate wraps these separately, and
    fails if a listed class contains them.
    """
    if plugin.transformer_cls_names_to_wrap is not None or not is_of_transformers(model):
        return
    embeddings = model.get_input_embeddings()
    classes_with_embeddings = {
        type(module).__name__
        for module in model.modules()
        if any(submodule is embeddings for submodule in module.modules())
    }
    default_classes = set(model._no_split_modules or ())
    plugin.transformer_cls_names_to_wrap = sorted(default_classes - classes_with_embeddings)


@contextmanager
def _checkpointing_with_same_draws() -> Iterator[None]:
    """Let layers that the block wraps for activation checkpointing draw the same random numbers
    when they are computed again. Accelerate leaves that out under FSDP2.
    """
    wrap = checkpointing.checkpoint_wrapper

    def wrap_with_same_draws(module: nn.Module, **options: Any) -> nn.Module:
        """Wrap a layer as torch does."""
        return wrap(module, **{**options, "preserve_rng_state": True})

    with override(checkpointing, checkpoint_wrapper=wrap_with_same_draws):
        yield


@contextmanager
def _without_shared_parameter_names(model: nn.Module) -> Iterator[None]:
    """While FSDP2 shards a model in the block, remove parameters from a module that are also those
    of one of its submodules; afterwards, set them to the submodule's sharded ones.

    BERT's masked-LM head, for example, shares the bias of its decoder. FSDP2 would add such a
    parameter to two groups and fail.
    """
    owners = {
        parameter: (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
    }
    shared = []
    for module in model.modules():
        submodules = set(module.modules())
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            owner, name_in_owner = owners[parameter]
            if owner is not module and owner in submodules:
                shared.append((module, name, owner, name_in_owner))
    for module, name, _, _ in shared:
        del module._parameters[name]
    try:
        yield
    finally:
        for module, name, owner, name_in_owner in shared:
            module._parameters[name] = owner._parameters[name_in_owner]


def full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Return the full, unsharded weights of a prepared model, by their names in the unwrapped
    model. All processes must call it.

    Returns:
        Name -> tensor. Under FSDP the weights are gathered on the CPU of the main process, and the
        result is empty on the other processes.
    """
    if not is_sharded(accelerator) or accelerator.device.type != "cpu":
        return accelerator.get_state_dict(model)
    # On a CPU, torch does not copy weights that it "offloads" to the CPU: they would be in memory
    # that FSDP1 frees. So gather without offloading, and copy.
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if not accelerator.is_main_process:
        return {}
    return {name: tensor.clone() for name, tensor in weights.items()}
