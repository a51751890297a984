"""FSDP, version 1 and 2: gradients reduced in float32 once per window, clipping and weights over
all shards, on CPUs too.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_ga.errors import ConfigError, LossNotAdditive
from hf_ga.exact.backend import Backend, RankStatus, sum_over_ranks
from hf_ga.exact.engine import FILLER, stand_in
from hf_ga.exact.forward import gradients_apart
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import LOW_PRECISION
from hf_ga.exact.same_bits import ChunkBackend
from hf_ga.exact.update import own_part
from hf_ga.exact.window import Window
from hf_ga.parallel.rejoin import Progress, can_rejoin, units_of

WRAPPERS = (
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)  # name components that wrappers add


def backend_for(accelerator: Accelerator, *, same_bits: bool = False) -> Backend:
    """The backend of the exact step for this accelerator. same_bits: for windows that are cut into
    chunks.

    Raises:
        ConfigError: same bits under FSDP.
    """
    if not is_sharded(accelerator):
        return ChunkBackend(accelerator) if same_bits else Backend(accelerator)
    if same_bits:
        raise ConfigError(
            "FSDP does not support same_bits, because it adds the ranks' gradients in another "
            "order: use DDP, or omit same_bits."
        )
    return ShardedBackend(accelerator)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether parameters are sharded (FSDP)."""
    return accelerator.distributed_type == DistributedType.FSDP


class ShardedBackend(Backend):
    """FSDP 1 and 2. Forwards and backwards are collectives, so all ranks run the same number of
    them. FSDP averages gradients over ranks, so terms are multiplied by the number of ranks.
    """

    is_sharded = True
    can_sum_early = False  # FSDP reduces them itself
    reason_not_to_cut = (
        "Under FSDP it cannot be cut here, as a process that fails cannot rejoin the others: make "
        "it smaller "
        "(per_device_train_batch_size, in an evaluation per_device_eval_batch_size; the results "
        "stay the same)"
    )

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.plugin = accelerator.state.fsdp_plugin
        self.can_rejoin = can_rejoin(accelerator)
        self._progress = Progress()

    def begin(self, model: nn.Module, loss: Loss) -> None:
        """Check that FSDP reduces gradients exactly, and let FSDP2 reduce gradients that only some
        ranks have.

        Raises:
            ConfigError: gradients would be reduced in half precision, or not reduced (ignored
                modules).
        """
        if self.plugin.ignored_modules is not None:
            raise ConfigError(
                "FSDP does not reduce the gradients of fsdp_ignored_modules: remove that setting."
            )
        _check_policy(self.plugin.mixed_precision_policy)
        if loss.uses_parameters:
            raise ConfigError(
                "under FSDP whole_batch cannot use parameters directly, which are sharded: let the "
                "model's forward return them among its outputs (a temperature as a scalar)."
            )
        if hasattr(model, "set_reduce_scatter_unused_params"):  # FSDP2, torch >= 2.13
            model.set_reduce_scatter_unused_params(True)
        if self.can_rejoin:
            self._progress.attach(model)

    def shard_again(self, model: nn.Module) -> None:
        """A forward without a backward (an evaluation) leaves some units of FSDP2 gathered."""
        for unit in units_of(model):
            unit.reshard()

    def rejoin(self, model: nn.Module) -> None:
        """Prepare to make what the other ranks wait for, after this one failed."""
        self._progress.repeat(model)

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Reduce in the last backward only, or in every one with Accelerate's `sync_each_batch`.
        FSDP1 accumulates in the compute dtype, so in half precision it reduces in every backward.
        """
        self._progress.start_micro_batch()
        policy = self.plugin.mixed_precision_policy
        in_low_precision = (
            self.plugin.fsdp_version == 1
            and policy is not None
            and policy.param_dtype in LOW_PRECISION
        )
        if (
            is_last
            or in_low_precision
            or self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        ):
            return nullcontext()
        # Not by the object: `hf_ga.Accelerator` refuses the method, which users call by hand.
        return Accelerator.no_sync(self.accelerator, model)

    def backward(self, term: Tensor | float, weight: int) -> None:
        """Run the backward even with weight 0: it is a collective."""
        if not weight and not (
            isinstance(term, Tensor) and term.requires_grad and bool(term.isfinite())
        ):
            raise LossNotAdditive(
                "under FSDP loss_fn must return a finite sum computed from the outputs, even for "
                "a batch without targets "
                f"(0 times a logit), got {term}."
            )
        super().backward(term * (weight * self.num_processes), weight=1)

    def equalize(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Repeat the first call with weight 0 up to the maximum number of calls over ranks."""
        most = window.request.most_micro_batches
        if window.state.max_elements is not None:  # micro-batches are cut, on each rank by itself
            most = self.most_on_a_rank(len(calls))
        missing = most - len(calls)
        if not missing:
            return calls
        fillers = [_filler(window, calls, loss)] * missing
        return [*fillers, *calls]

    def check_use(self, num_ranks: Sequence[float]) -> None:
        """See the base class."""
        mixed_up = self.accelerator.is_fsdp2 and not hasattr(
            FSDPModule, "set_reduce_scatter_unused_params"
        )
        if mixed_up and any(0 < n < self.num_processes for n in num_ranks):
            raise ConfigError(
                "some parameters have a gradient on some processes only, which FSDP2 of this "
                "torch version reduces incorrectly: "
                "use torch 2.13 or newer, FSDP1 or DDP."
            )

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """FSDP has reduced them; set the zero gradients of unused parameters to None, so that the
        optimizer does not decay them.
        """
        if not unused:
            return
        parameters = [p for name, p in model.named_parameters() if own_name(name) in unused]
        sizes = [0.0 if p.grad is None else float(own_part(p.grad).abs().sum()) for p in parameters]
        sizes = sum_over_ranks(self.accelerator, sizes)
        for parameter, size in zip(parameters, sizes, strict=True):
            if not size:
                parameter.grad = None

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip to the norm over all shards."""
        if isinstance(model, FullyShardedDataParallel):
            with gradients_apart(
                [*set(model.parameters()) - set(parameters)]
            ):  # FSDP1 clips all gradients of the model
                return model.clip_grad_norm_(max_norm)
        norm = super().clip(model, parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """All-reduce: each rank sees its own shards only."""
        return not sum_over_ranks(self.accelerator, [float(not value)])[0]


def _filler(window: Window, calls: list[Call], loss: Loss) -> Call:
    """A call that is made only because other ranks make one."""
    first = calls[0] if calls else stand_in(window, loss)
    return replace(first, weight=0, index=FILLER)


def own_name(name: str) -> str:
    """Name of a parameter or module in the unwrapped model."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _check_policy(policy: Any) -> None:
    """Check the dtypes of FSDP's mixed precision.

    Raises:
        ConfigError: If gradients would be reduced, or losses rounded, in half precision.
    """
    if policy is None:
        return
    # What is left out is the dtype of the parameters; FSDP1 has no dtype of outputs.
    dtypes = {
        "reduce_dtype": policy.reduce_dtype or policy.param_dtype,
        "output_dtype": getattr(policy, "output_dtype", None),
    }
    for name, dtype in dtypes.items():
        if dtype in LOW_PRECISION:
            raise ConfigError(
                f"FSDP must reduce gradients in float32 and keep the dtype of losses, but its "
                f"{name} is {dtype} (Accelerate's default under mixed precision). Call "
                "hf_ga.prepare(accelerator, model, optimizer) instead of accelerator.prepare."
            )
