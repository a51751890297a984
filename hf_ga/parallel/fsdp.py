"""FSDP, version 1 and 2: gradients reduced in float32 and once a window, clipping and weights over all shards, also on a CPU."""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
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

from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.backend import Backend, RankStatus, keep_process_group_alive, sum_over_ranks
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import LOW_PRECISION
from hf_ga.exact.window import Window


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


def backend_for(accelerator: Accelerator, *, reduce_each_micro_batch: bool = False) -> Backend:
    """The backend of the exact step for this accelerator.

    Args:
        reduce_each_micro_batch: under FSDP, reduce the gradients after every micro-batch: see `hf_ga.backward_window`.
    """
    return ShardedBackend(accelerator, reduce_each_micro_batch) if is_sharded(accelerator) else Backend(accelerator)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether parameters lie in shards (FSDP)."""
    return accelerator.distributed_type == DistributedType.FSDP


class ShardedBackend(Backend):
    """FSDP 1 and 2. Every forward and backward is a collective, so all ranks make equally many; gradients are averaged over ranks,
    so terms are multiplied by their number.
    """

    is_sharded = True

    def __init__(self, accelerator: Accelerator, reduce_each_micro_batch: bool = False) -> None:
        super().__init__(accelerator)
        self.plugin, self.reduce_each_micro_batch = accelerator.state.fsdp_plugin, reduce_each_micro_batch

    def begin(self, model: nn.Module, loss: Loss) -> None:
        """Refuse an FSDP that loses bits on the way, and let FSDP2 reduce gradients that only some ranks have.

        Raises:
            ConfigError: gradients would be summed in half precision, or those of ignored modules not at all, or this torch mixes up
                gradients that only some ranks have.
        """
        if self.plugin.ignored_modules is not None:
            raise ConfigError(
                "FSDP must sum the gradients of all parameters, but skips those of fsdp_ignored_modules: leave that setting out."
            )
        policy = self.plugin.mixed_precision_policy
        if policy is not None and _sum_type(policy) in LOW_PRECISION:
            raise ConfigError(
                f"FSDP must sum gradients in float32, but its reduce_dtype is {_sum_type(policy)} (Accelerate's default under "
                "mixed precision). Call hf_ga.prepare(accelerator, model, optimizer) instead of accelerator.prepare."
            )
        if hasattr(model, "set_reduce_scatter_unused_params"):  # FSDP2, torch >= 2.13
            model.set_reduce_scatter_unused_params(True)
        elif isinstance(model, FSDPModule) and loss.num_means > 1:  # a rank without targets of one mean does not use its part
            raise ConfigError("a loss that is a sum of several means needs torch 2.13 or newer under FSDP2: use FSDP1 or DDP.")

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Reduce in the last backward only. FSDP1 accumulates in the type that is computed in, so in half precision it always
        reduces.
        """
        if is_last or self.reduce_each_micro_batch or self._accumulates_in_low_precision():
            return nullcontext()
        return self.accelerator.no_sync(model)

    def backward(self, term: Tensor | float, weight: int) -> None:
        """Also without weight: the other ranks take part in it."""
        if not weight and not (isinstance(term, Tensor) and term.requires_grad and bool(term.isfinite())):
            raise LossNotAdditive(
                "under FSDP loss_fn must return a finite sum that is computed from the outputs, also for a batch without targets "
                f"(0 times a logit), got {term}."
            )
        self.accelerator.backward(term * (weight * self.accelerator.num_processes))

    def equalize(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Repeat the first call, with weight 0, until there are as many as on the rank that has most."""
        if missing := window.request.most_micro_batches - len(calls):
            calls = [*[replace(calls[0] if calls else _stand_in(window, loss), weight=0)] * missing, *calls]
        return calls

    def check_use(self, num_ranks: Sequence[float]) -> None:
        """See the base class."""
        mixed_up = self.accelerator.is_fsdp2 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        if mixed_up and any(0 < n < self.accelerator.num_processes for n in num_ranks):
            raise ConfigError(
                "some parameters got a gradient on some processes only, which FSDP2 of this torch mixes up: use torch 2.13 or "
                "newer, FSDP1 or DDP."
            )

    def all_reduce(self, tensor: Tensor, status: RankStatus) -> Tensor:
        """A rank that fails ends at once, so no status is exchanged."""
        if self.accelerator.num_processes > 1:
            dist.all_reduce(tensor)
        return tensor

    def reduce_gradients(self, model: nn.Module, status: RankStatus, unused: Collection[str]) -> None:
        """FSDP has reduced them; zeros that it made for parameters of no use are removed, or the optimizer would decay those."""
        if not unused:
            return
        parameters = [p for name, p in model.named_parameters() if _own_name(name) in unused]
        gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        sizes = sum_over_ranks(self.accelerator, [0.0 if g is None else float(g.abs().sum()) for g in gradients])
        for parameter, size in zip(parameters, sizes, strict=True):
            if not size:
                parameter.grad = None

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """The norm is taken over all shards."""
        if isinstance(model, FullyShardedDataParallel):
            others = [(p, p.grad) for p in set(model.parameters()) - set(parameters)]
            for parameter, _ in others:  # FSDP1 clips all gradients of the model
                parameter.grad = None
            norm = model.clip_grad_norm_(max_norm)
            for parameter, gradient in others:
                parameter.grad = gradient
            return norm
        norm = super().clip(model, parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """Each rank knows of its own shards."""
        return not sum_over_ranks(self.accelerator, [float(not value)])[0]

    def _accumulates_in_low_precision(self) -> bool:
        policy = self.plugin.mixed_precision_policy
        return self.plugin.fsdp_version == 1 and policy is not None and policy.param_dtype in LOW_PRECISION


def _stand_in(window: Window, loss: Loss) -> Call:
    """The first sample of the window that has targets: its loss is a number.

    Raises:
        ConfigError: none has, although target_counts say so.
    """
    for offset in range(window.num_samples):
        micro_batch = window.split([np.array([offset])]).micro_batches[0]
        if loss.counts_in_forward:
            return Call(micro_batch)
        if any(counts := loss.count(micro_batch.batch, 1)):
            return Call(micro_batch, counts=counts)
    raise ConfigError(
        f"window {window.index} of epoch {window.epoch} has no targets, but target_counts say {window.expected_targets}: correct "
        "target_counts, or leave them out."
    )


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
