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
from hf_ga.exact.engine import FILLER_INDEX, stand_in_call
from hf_ga.exact.forward import gradients_apart
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import LOW_PRECISION
from hf_ga.exact.same_bits import ChunkBackend
from hf_ga.exact.update import local_shard
from hf_ga.exact.window import Window
from hf_ga.parallel.rejoin import Progress, can_rejoin, units_of

# Parts that wrappers add to the names of modules and parameters.
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def backend_for(accelerator: Accelerator, *, same_bits: bool = False) -> Backend:
    """Return the backend of the exact step for an accelerator.

    Args:
        accelerator: The accelerator that prepares the model.
        same_bits: Whether windows are cut into chunks, so that results have the same bits for every
            number of ranks.

    Raises:
        ConfigError: If `same_bits` is set under FSDP.
    """
    if not is_sharded(accelerator):
        if same_bits:
            return ChunkBackend(accelerator)
        return Backend(accelerator)
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
    """The backend for FSDP1 and FSDP2.

    Forwards and backwards are collectives, so all ranks run the same number of them. FSDP averages
    gradients over ranks, so terms are multiplied by the number of ranks.

    Args:
        accelerator: An accelerator with an FSDP plugin.
    """

    is_sharded = True
    # FSDP reduces gradients itself.
    can_overlap_all_reduce = False
    reason_not_to_split = (
        "Under FSDP it cannot be cut here, as a process that fails cannot rejoin the others: make "
        "it smaller (per_device_train_batch_size, in an evaluation per_device_eval_batch_size; the "
        "results stay the same)"
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
            ConfigError: If gradients would be reduced in half precision, or not be reduced (ignored
                modules), or the loss uses parameters, which are sharded.
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
        # A method of FSDP2 since torch 2.13.
        if hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        if self.can_rejoin:
            self._progress.attach(model)

    def reshard(self, model: nn.Module) -> None:
        """A forward without a backward (an evaluation) leaves some units of FSDP2 gathered."""
        for unit in units_of(model):
            unit.reshard()

    def rejoin(self, model: nn.Module) -> None:
        """Prepare to make what the other ranks wait for, after this one failed."""
        self._progress.repeat(model)

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the last backward only, or in every one with Accelerate's
        `sync_each_batch`. FSDP1 accumulates in the compute dtype, so in half precision it reduces
        in every backward.
        """
        self._progress.start_micro_batch()
        if is_last or self._accumulates_in_low_precision():
            return nullcontext()
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        # Not by the object: `hf_ga.Accelerator` refuses the method, which users call by hand.
        return Accelerator.no_sync(self.accelerator, model)

    def _accumulates_in_low_precision(self) -> bool:
        """Whether FSDP would add the gradients of micro-batches in half precision."""
        policy = self.plugin.mixed_precision_policy
        if self.plugin.fsdp_version != 1 or policy is None:
            return False
        return policy.param_dtype in LOW_PRECISION

    def backward(self, term: Tensor | float, weight: int) -> None:
        """Run the backward even with weight 0: it is a collective.

        Raises:
            LossNotAdditive: If a term of weight 0 cannot be multiplied by 0 and have a backward.
        """
        # Only where the weight is 0, as the check waits for the device.
        if not weight and not _has_finite_backward(term):
            raise LossNotAdditive(
                "under FSDP loss_fn must return a finite sum computed from the outputs, even for "
                f"a batch without targets (0 times a logit), got {term}."
            )
        super().backward(term * (weight * self.num_processes), weight=1)

    def equalize_calls(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Repeat the first call with weight 0, up to the largest number of calls of any rank."""
        most = window.request.max_micro_batches
        if window.state.max_elements is not None:  # micro-batches are cut, on each rank by itself
            most = self.max_over_ranks(len(calls))
        missing = most - len(calls)
        if not missing:
            return calls
        fillers = [_filler(window, calls, loss)] * missing
        return [*fillers, *calls]

    def check_partial_gradients(self, num_ranks: Sequence[float]) -> None:
        """Check that FSDP reduces the gradients that only some ranks have.

        Args:
            num_ranks: For each parameter, the number of ranks that have a gradient of it.

        Raises:
            ConfigError: If there are such gradients under an FSDP2 that reduces them incorrectly.
        """
        is_fixed = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        if is_fixed or not self.accelerator.is_fsdp2:
            return
        if any(0 < n < self.num_processes for n in num_ranks):
            raise ConfigError(
                "some parameters have a gradient on some processes only, which FSDP2 of this "
                "torch version reduces incorrectly: use torch 2.13 or newer, FSDP1 or DDP."
            )

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Set the zero gradients of unused parameters to None, so that the optimizer does not decay
        them. FSDP itself has reduced all gradients.
        """
        if not unused:
            return
        parameters = [p for name, p in model.named_parameters() if own_name(name) in unused]
        own_sizes = [_sum_of_sizes(p.grad) for p in parameters]
        sizes = sum_over_ranks(self.accelerator, own_sizes)
        for parameter, size in zip(parameters, sizes, strict=True):
            if not size:
                parameter.grad = None

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip to the norm over all shards."""
        if isinstance(model, FullyShardedDataParallel):
            # FSDP1 clips all gradients of the model, those of other optimizers too.
            others = set(model.parameters()) - set(parameters)
            with gradients_apart(list(others)):
                return model.clip_grad_norm_(max_norm)
        norm = super().clip(model, parameters, max_norm)
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        return norm

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """Ask all ranks, because each sees its own shards only."""
        (num_false,) = sum_over_ranks(self.accelerator, [float(not value)])
        return num_false == 0


def _sum_of_sizes(gradient: Tensor | None) -> float:
    """Add the absolute values of this rank's part of a gradient; 0 if there is none."""
    if gradient is None:
        return 0.0
    return float(local_shard(gradient).abs().sum())


def _has_finite_backward(term: Tensor | float) -> bool:
    """Whether 0 times a term gives zero gradients."""
    return isinstance(term, Tensor) and term.requires_grad and bool(term.isfinite())


def _filler(window: Window, calls: list[Call], loss: Loss) -> Call:
    """Return a call that is made only because other ranks make one."""
    first = calls[0] if calls else stand_in_call(window, loss)
    return replace(first, weight=0, index=FILLER_INDEX)


def own_name(name: str) -> str:
    """Return the name that a parameter or module has in the unwrapped model."""
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
