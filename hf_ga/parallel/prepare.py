"""Preparing a model for training: FSDP on CPUs, reduction in float32, FSDP2 units; and gathering
full weights from shards.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import PreTrainedModel

from hf_ga.exact.backend import keep_process_group_alive
from hf_ga.exact.override import override
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.main_weights import loads_on_main, sharding_from_main


def enable_fp16_on_cpu(accelerator: Accelerator) -> None:
    """Enable `mixed_precision="fp16"` on a CPU, where Accelerate silently computes in float32. Call
    it before `prepare`.

    The scaler uses the `GradScalerKwargs` among the accelerator's `kwargs_handlers`. Does nothing
    on other devices, in other precisions, or if called again.

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
    options = (
        accelerator.scaler_handler.to_kwargs() if accelerator.scaler_handler is not None else {}
    )
    # FSDP1's shards are plain local tensors; FSDP2's are DTensors, whose reductions are
    # collectives.
    scaler = (
        ShardedGradScaler
        if is_sharded(accelerator) and not accelerator.is_fsdp2
        else torch.amp.GradScaler
    )
    accelerator.scaler = scaler("cpu", **options)
    accelerator.native_amp = True


def enable_fsdp_on_cpu(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin | None = None
) -> None:
    """Enable FSDP on CPU processes, where Accelerate silently trains with DDP. Call it before
    `prepare`.

    Args:
        plugin: default: the one of `accelerate launch --use_fsdp`. Does nothing without it, or on a
            GPU.

    Example:
        accelerator = Accelerator(cpu=True)
        enable_fsdp_on_cpu(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
    """
    requested = (
        plugin is not None or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    )
    if not requested or accelerator.distributed_type != DistributedType.MULTI_CPU:
        return
    plugin = plugin or FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    for state in (PartialState(), accelerator.state):  # later Accelerators copy from the first
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")  # FSDP1 does not accept a CPU index


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, Any]:
    """`accelerator.prepare(model, optimizer)`; under FSDP with reduction in float32 and units that
    FSDP2 can wrap.
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
    """Around `accelerator.prepare`: under FSDP, reduction in float32 and units that FSDP2 can wrap;
    with `cpu_ram_efficient_loading`, shards of the main process's weights.

    Args:
        accelerator: The accelerator that prepares.
        models: The models that it prepares, not wrapped yet.
        optimizers: The optimizers that it prepares.
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
                model.config.use_cache = False  # recomputed keys would be appended to the cache
            if plugin.fsdp_version == 1:
                plugin.use_orig_params = True  # keeps the optimizer's parameters valid
                continue
            if from_main and not isinstance(model, FSDPModule):
                stack.enter_context(sharding_from_main(accelerator, model, optimizers))
            stack.enter_context(_one_name_each(model))
        yield


@contextmanager
def every_prepare_exact(accelerator: Accelerator) -> Iterator[None]:
    """Within the block, `accelerator.prepare` shards as `prepare` does: for somebody else's loop,
    which calls it.
    """
    original = accelerator.prepare

    def exact(*args: Any, **kwargs: Any) -> Any:
        models = [value for value in args if isinstance(value, nn.Module)]
        optimizers = [value for value in args if isinstance(value, torch.optim.Optimizer)]
        with exact_sharding(accelerator, models, optimizers):
            return original(*args, **kwargs)

    with override(accelerator, prepare=exact):
        yield


def configure_fsdp(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Let FSDP reduce gradients in float32 and keep the dtype of losses, and FSDP2 wrap BERT and
    similar models.

    Accelerate's default for both is the compute dtype. FSDP2 would round a float32 loss to it, and
    so the weight of a micro-batch in the gradient: to 8 bits in bf16.
    """
    policy = plugin.mixed_precision_policy
    if policy is not None:
        exact = {"reduce_dtype": torch.float32}
        if plugin.fsdp_version == 2:
            exact["output_dtype"] = None
        plugin.mixed_precision_policy = replace(policy, **exact)
    if plugin.fsdp_version == 2:
        _choose_units(plugin, model)


def _choose_units(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> None:
    """Choose FSDP2's default units: the model's `_no_split_modules`, except any that contains its
    input embeddings.

    Accelerate wraps the embeddings separately, and fails if the model lists them too (BERT and
    similar models).
    """
    if plugin.transformer_cls_names_to_wrap is not None or not isinstance(model, PreTrainedModel):
        return
    embeddings = model.get_input_embeddings()
    holders = {
        type(m).__name__ for m in model.modules() if any(part is embeddings for part in m.modules())
    }
    plugin.transformer_cls_names_to_wrap = sorted(set(model._no_split_modules or ()) - holders)


@contextmanager
def _one_name_each(model: nn.Module) -> Iterator[None]:
    """Within the block, remove a module's second name for a parameter of one of its submodules
    (BERT's masked-LM head shares its decoder's bias): FSDP2 would add the parameter to two groups
    and fail.
    """
    owners = {
        parameter: (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
    }
    shared = [
        (module, name, owners[parameter])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
        and owners[parameter][0] is not module
        and owners[parameter][0] in set(module.modules())
    ]
    for module, name, _ in shared:
        del module._parameters[name]
    try:
        yield
    finally:
        for module, name, (owner, own_name) in shared:
            module._parameters[name] = owner._parameters[own_name]


def full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Full weights by their names in the unwrapped model: under FSDP gathered on the CPU of the
    main process (empty on others).

    All processes must call it.
    """
    if not is_sharded(accelerator) or accelerator.device.type != "cpu":
        return accelerator.get_state_dict(model)
    # On a CPU "offloaded" weights are not copied, so they would be in memory that FSDP1 frees.
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return (
        {name: tensor.clone() for name, tensor in weights.items()}
        if accelerator.is_main_process
        else {}
    )
