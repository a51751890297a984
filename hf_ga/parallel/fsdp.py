"""The backend for FSDP, version 1 and 2, on GPUs and CPUs: gradients are reduced in float32 once
per window, and clipped by their norm over all shards.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_ga.errors import ConfigError
from hf_ga.model.forward import fresh_gradients
from hf_ga.model.precision import LOW_PRECISION
from hf_ga.parallel.backend import Backend, ChunkBackend, sum_over_ranks
from hf_ga.parallel.rejoin import CollectiveCounter, can_rejoin, fsdp2_units

# Parts that the wrappers of FSDP1 and activation checkpointing add to the names of modules and
# parameters.
WRAPPER_PARTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def backend_for(accelerator: Accelerator, *, same_bits: bool = False) -> Backend:
    """Return the backend by which the ranks of an accelerator communicate in a window: a
    `ShardedBackend` under FSDP, otherwise a plain or a same-bits backend.

    Args:
        accelerator: The accelerator that prepares the model.
        same_bits: Whether windows are split into chunks, so that results have the same bits for
            every number of ranks.

    Raises:
        ConfigError: If `same_bits` is set under FSDP.
    """
    if not is_sharded(accelerator):
        if same_bits:
            return ChunkBackend(accelerator)
        return Backend(accelerator)
    if same_bits:
        raise ConfigError(
            "FSDP does not support same_bits, because it adds the ranks' gradients in an order of "
            "its own: use DDP, or omit same_bits."
        )
    return ShardedBackend(accelerator)


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether an accelerator shards the parameters of the models that it prepares (FSDP1 or
    FSDP2).
    """
    return accelerator.distributed_type == DistributedType.FSDP


class ShardedBackend(Backend):
    """The backend for FSDP1 and FSDP2: how ranks with sharded parameters compute a window.

    Forwards and backwards are collectives, so all ranks run the same number of them. FSDP averages
    gradients over the ranks, so each micro-batch's term of the loss is multiplied by the number of
    ranks.

    Args:
        accelerator: An accelerator with an FSDP plugin.
    """

    is_sharded = True
    reason_not_to_split = (
        "Under FSDP it cannot be split here, because a process that fails cannot rejoin the "
        "others: make it smaller (per_device_train_batch_size, in an evaluation "
        "per_device_eval_batch_size; the results stay the same)"
    )

    def __init__(self, accelerator: Accelerator) -> None:
        """Read the FSDP settings of the accelerator."""
        super().__init__(accelerator)
        self.averages_over = self.num_processes
        self.plugin = accelerator.state.fsdp_plugin
        self.can_rejoin = can_rejoin(accelerator)  # after a rank ran out of memory
        self._counter = CollectiveCounter()  # of FSDP2's collectives in a micro-batch

    def begin(self, model: nn.Module) -> None:
        """Check, before the forwards of a window, that FSDP reduces gradients exactly. Configure
        FSDP2 to also reduce gradients that only some ranks have, and count its collectives, so that
        a rank that runs out of memory can rejoin the others.

        Args:
            model: The prepared model.

        Raises:
            ConfigError: If FSDP would reduce gradients in half precision, or not reduce some at
                all (`ignored_modules`).
        """
        if self.plugin.ignored_modules is not None:
            raise ConfigError(
                "FSDP does not reduce the gradients of fsdp_ignored_modules: remove that setting."
            )
        _check_policy(self.plugin.mixed_precision_policy)
        # A method of FSDP2 since torch 2.13.
        if hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        if self.can_rejoin:
            self._counter.attach(model)

    def reshard(self, model: nn.Module) -> None:
        """Shard the parameters of all FSDP2 modules again. A forward without a backward (an
        evaluation) leaves some of them gathered.
        """
        for unit in fsdp2_units(model):
            unit.reshard()

    def rejoin(self, model: nn.Module) -> None:
        """Under FSDP2, prepare to repeat a micro-batch that ran out of memory on this rank, so that
        the rank makes the collectives for which the others wait.
        """
        self._counter.prepare_repetition(model)

    def begin_micro_batch(self) -> None:
        """Reset the count of the collectives of a micro-batch."""
        self._counter.start_micro_batch()

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Return the context manager for the forward and backward of one micro-batch, which decides
        whether FSDP reduces the gradients in this backward.

        Gradients are reduced in the last backward of a window. They are reduced in every backward
        with Accelerate's `sync_each_batch`, and under FSDP1 in half precision, because FSDP1 would
        accumulate unreduced gradients in the compute dtype.

        Args:
            model: The prepared model.
            is_last: Whether it is the last micro-batch of the window.
        """
        is_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        if is_last or is_each or self._accumulates_in_low_precision():
            if hasattr(model, "set_requires_gradient_sync"):
                # Under FSDP2. Trainer's loop has turned it off, but for its own last micro-batch.
                model.set_requires_gradient_sync(True)
            return nullcontext()
        # Called on the class, because the method of `hf_ga.Accelerator` does nothing.
        return Accelerator.no_sync(self.accelerator, model)

    def _accumulates_in_low_precision(self) -> bool:
        """Whether FSDP would accumulate the gradients of micro-batches in half precision: FSDP1
        with a policy whose compute dtype is fp16 or bf16.
        """
        policy = self.plugin.mixed_precision_policy
        if self.plugin.fsdp_version != 1 or policy is None:
            return False
        return policy.param_dtype in LOW_PRECISION

    def check_partial_gradients(self, num_ranks: Sequence[float]) -> None:
        """Check that this version of FSDP reduces the gradients of all parameters correctly, also
        of those that have a gradient on some ranks only.

        Args:
            num_ranks: For each parameter, the number of ranks that have a gradient of it.

        Raises:
            ConfigError: If there are such parameters under FSDP2 of a torch version that reduces
                their gradients incorrectly.
        """
        # Added in torch 2.13 to reduce them correctly; `begin` turns it on.
        is_fixed = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        if is_fixed or not self.accelerator.is_fsdp2:
            return
        if any(0 < num_with_gradient < self.num_processes for num_with_gradient in num_ranks):
            raise ConfigError(
                "some parameters have a gradient on some processes only, which FSDP2 of this "
                "torch version reduces incorrectly: use torch 2.13 or newer, FSDP1 or DDP."
            )

    def drop_unused(self, model: nn.Module, unused: Collection[str]) -> None:
        """Set the gradients of unused parameters to None if they are zero on all ranks, so that the
        optimizer does not decay these parameters. A collective.

        Args:
            model: The prepared model.
            unused: Names of parameters that got no gradient in a trial.
        """
        if not unused:
            return
        parameters = [p for name, p in model.named_parameters() if unwrapped_name(name) in unused]
        own_sums = []
        for parameter in parameters:
            gradient = parameter.grad
            own_sums.append(0.0 if gradient is None else float(local_shard(gradient).abs().sum()))
        sums = sum_over_ranks(self.accelerator, own_sums)
        for parameter, sum_of_absolute_values in zip(parameters, sums, strict=True):
            if not sum_of_absolute_values:
                parameter.grad = None

    def sum_over_replicas(
        self, parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool]
    ) -> None:
        """Do nothing: FSDP has reduced the gradients in the backwards."""

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradients of `parameters` to a global L2 norm of at most `max_norm`, and return
        their norm over all shards before clipping.
        """
        if isinstance(model, FullyShardedDataParallel):
            # FSDP1 clips all gradients of the model: hide those that belong to other optimizers.
            others = set(model.parameters()) - set(parameters)
            with fresh_gradients(list(others)):
                return model.clip_grad_norm_(max_norm)
        norm = super().clip(model, parameters, max_norm)
        if isinstance(norm, DTensor):
            return norm.full_tensor()
        return norm


def unwrapped_name(name: str) -> str:
    """Return the name that a parameter or module has in the unwrapped model: without the parts that
    FSDP1 and activation checkpointing add.

    >>> unwrapped_name("layers.0._fsdp_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _check_policy(policy: Any) -> None:
    """Check that FSDP's mixed precision, of version 1 or 2, neither reduces gradients nor rounds
    losses in half precision.
    """
    if policy is None:
        return
    # Without a reduce_dtype, gradients are reduced in the dtype of the parameters. FSDP1 has no
    # output_dtype.
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


def local_shard(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient (FSDP), or the gradient itself if it is not sharded,
    to check after a window whether it is finite.
    """
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
