"""How ranks communicate in a window: the differences between one process, DDP and FSDP.

Within a window, ranks communicate here and nowhere else. `Backend` serves one process and DDP: all
ranks hold replicas of the model, exchange a small status before and after the forwards, and sum the
gradients once per window. DDP's own reducer is not used, and the gradients are not divided by the
number of ranks, so ranks may have different numbers of micro-batches, or none.

The backend for FSDP is `hf_ga.parallel.fsdp.ShardedBackend`.
"""

import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, reduce, send_to_device
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn

from hf_ga.errors import ConfigError, ProcessFailed
from hf_ga.loading.memory import TooLarge
from hf_ga.parallel.gradient_sums import sum_gradients

SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)


ALIGNMENT = 64  # bytes; torch's CPU allocator aligns all tensors to that


@dataclass
class RankStatus:
    """What one rank computed in a window. `Backend.all_reduce_status` makes it that of all ranks.

    Attributes:
        loss: Sum of the loss terms of the micro-batches, a float64 scalar on the device. 0: the
            ranks only agree on failures.
        counts: Number of targets, one for each mean of the loss.
        has_gradient: For each trainable parameter, whether this rank (after the all-reduce: any
            rank) has a gradient of it.
        failure: The exception that occurred on this rank, or None.
    """

    loss: Tensor | float = 0.0
    counts: tuple[float, ...] = ()
    has_gradient: Sequence[bool] = ()
    failure: Exception | None = None


class Backend:
    """How ranks communicate in a window: a single process, or DDP ranks that each hold a replica of
    the model.

    Subclasses implement other kinds of parallelism (FSDP, pipelines, same bits).

    Attributes:
        is_sharded: Whether each rank holds only a part of the parameters (FSDP, pipeline), so that
            every forward and backward is a collective of all ranks.
        is_stage: Whether this rank holds a stage of the model (a pipeline), and a schedule runs its
            backwards: gradients are in `.grad` at the window's end.
        averages_over: Number of ranks over which gradients are averaged in the backwards (FSDP). 1:
            they are not.
        reason_not_to_split: The reason why a micro-batch that runs out of memory cannot be split
            into smaller ones, as text for the error message. None: it is split.
        can_rejoin: Whether a rank that ran out of memory can still run the collectives that the
            other ranks wait for (FSDP2).
    """

    is_sharded = False
    is_stage = False
    averages_over = 1
    reason_not_to_split: str | None = None
    can_rejoin = False

    def __init__(self, accelerator: Accelerator) -> None:
        """Read the device, the number of ranks and the index of this rank from the accelerator, to
        communicate in the windows.
        """
        self.accelerator = accelerator
        self.device = accelerator.device
        self.num_processes = accelerator.num_processes
        self.process_index = accelerator.process_index

    @property
    def can_split(self) -> bool:
        """Whether micro-batches of a window are split into smaller ones if memory runs out."""
        return self.can_rejoin or self.reason_not_to_split is None

    @property
    def has_loss_scale(self) -> bool:
        """Whether losses are multiplied by the loss scale of fp16."""
        return self.accelerator.scaler is not None

    @property
    def is_mixed(self) -> bool:
        """Whether forwards run in mixed precision."""
        return self.accelerator.mixed_precision != "no"

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context for the window's forwards and losses in the mixed precision of the
        accelerator.
        """
        return self.accelerator.autocast()

    def begin(self, model: nn.Module) -> None:
        """Prepare a window; the engine calls this before its first forward.

        Under DDP, resets the state of DDP's reducer, which hf_ga does not use.

        Args:
            model: The prepared model.

        Raises:
            ConfigError: If gradients would not be exact with the current settings.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # A forward through DDP without a backward (an evaluation) leaves its reducer waiting.
            model.reducer._reset_state()
            keep_process_group_alive(model)

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters, so that only this rank's shards remain, which the optimizer
        updates (FSDP2). A no-op for other backends.
        """

    def rejoin(self, model: nn.Module) -> None:
        """Prepare to run a micro-batch again, in which this rank ran out of memory (FSDP2).

        The engine calls it if `can_rejoin`, so that this rank takes part in the collectives that
        the other ranks wait for. A no-op for other backends.
        """

    def place(self, batch: Any) -> Any:
        """Return a copy of a batch on the device, which may be changed: the batch itself may be
        computed again.
        """
        if self.device.type == "cpu":  # `to` copies nothing there
            return recursively_apply(torch.clone, batch)
        return send_to_device(batch, self.device, non_blocking=True)

    def begin_micro_batch(self) -> None:
        """Prepare for the forwards and backwards of a micro-batch."""

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one forward and backward, in which gradients may be all-reduced.

        Args:
            model: The prepared model.
            is_last: Whether this is the last micro-batch of the window on this rank.
        """
        return nullcontext()

    def run_backward(
        self, loss: Tensor, hooks: AbstractContextManager[None], *, retain_graph: bool = False
    ) -> None:
        """Run the backward of a micro-batch's loss, times the loss scale of fp16.

        Args:
            loss: The loss, a scalar.
            hooks: A context in which the backward leaves out the loss's divisions.
            retain_graph: As in `Tensor.backward`.
        """
        with hooks:
            self.scaled(loss).backward(retain_graph=retain_graph)

    def scaled(self, tensor: Tensor) -> Tensor:
        """Multiply a term of the window's loss by the loss scale of fp16. A no-op without fp16."""
        scaler = self.accelerator.scaler
        return tensor if scaler is None else scaler.scale(tensor)

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """Sum the status of all ranks in a window (loss, target counts, failures) in one small
        float64 all-reduce; raise if any rank failed.

        On a single process, return the status itself.

        Args:
            status: The status of this rank.

        Returns:
            The status of all ranks: sums of losses and counts, and for each parameter whether any
            rank has a gradient of it.

        Raises:
            Exception: The exception of this rank, if it failed.
            ProcessFailed: If another rank failed, with its message.
            TooLarge: If ranks ran out of memory, but nothing else failed; with the size of the
                smallest micro-batch that did not fit.
            ConfigError: If gradients that only some ranks have cannot be summed.
        """
        failure = status.failure
        if self.num_processes == 1:
            if failure is not None:
                raise failure
            return status
        numbers = torch.tensor(
            [
                failure is not None,
                0.0,  # the loss, set below without a copy to the host
                *status.counts,
                *status.has_gradient,
            ],
            dtype=torch.float64,
            device=self.device,
        )
        numbers[1] = status.loss
        dist.all_reduce(numbers)
        num_failed, _, *rest = numbers.tolist()
        if num_failed:
            self._raise_on_all_ranks(failure)
        counts = rest[: len(status.counts)]
        # For each parameter, how many ranks have a gradient of it.
        num_ranks = rest[len(status.counts) :]
        self.check_partial_gradients(num_ranks)
        return replace(
            status,
            loss=numbers[1],
            counts=tuple(counts),
            has_gradient=tuple(map(bool, num_ranks)),
        )

    def _raise_on_all_ranks(self, local_failure: Exception | None) -> None:
        """Raise an exception on every rank after at least one of them failed: this rank's own,
        `ProcessFailed` with that of another, or `TooLarge` if no other one occurred. A collective.
        """
        is_recoverable = local_failure is None or isinstance(local_failure, TooLarge)
        message = f"{type(local_failure).__name__}: {local_failure}"
        message = message.encode(errors="replace").decode()  # printable characters only
        failures = self.gather_objects(local_failure if is_recoverable else message)
        for rank, failure in enumerate(failures):
            if isinstance(failure, str):
                if not is_recoverable:
                    raise local_failure
                raise ProcessFailed(f"process {rank} failed: {failure}")
        raise TooLarge(min(failure.num_elements for failure in failures if failure is not None))

    @contextmanager
    def failing_on_all_ranks(self) -> Iterator[None]:
        """Raise an error of the block on all ranks. A collective, outside of the block.

        Raises:
            ProcessFailed: If another rank failed.
            TooLarge: If ranks ran out of memory, but nothing else failed.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        self.all_reduce_status(RankStatus(failure=failure))

    def check_partial_gradients(self, num_ranks: Sequence[float]) -> None:
        """Check that gradients of a window that only some ranks have can be summed.

        In this class they always can.

        Args:
            num_ranks: For each parameter, how many ranks have a gradient of it.

        Raises:
            ConfigError: If they cannot be summed.
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a value of each rank, which can be pickled, in the order of the ranks. A
        collective.
        """
        if self.num_processes == 1:
            return [value]
        values: list[Any] = [None] * self.num_processes
        dist.all_gather_object(values, value)
        return values

    def max_over_ranks(self, number: int) -> int:
        """Return the maximum of an integer over all ranks, in a window; all ranks must call it."""
        if self.num_processes == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def all_reduce(self, tensor: Tensor, status: RankStatus) -> Tensor:
        """Sum a tensor over all ranks, in the middle of a window.

        Args:
            tensor: The tensor of this rank. It is not changed.
            status: The status of this rank. DDP ranks exchange it first, as a rank that failed
                already waits in that exchange, and then all of them raise.

        Raises:
            ProcessFailed: If another rank failed.
        """
        # With shards, a rank that fails ends at once, so no exchange is needed.
        if not self.is_sharded:
            self.all_reduce_status(status)
        if self.num_processes == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def drop_unused(self, model: nn.Module, unused: Collection[str]) -> None:
        """Set the zero gradients of unused parameters to None. In this class they have none.

        Args:
            model: The prepared model.
            unused: Names of parameters that got no gradient in a trial.
        """

    def sum_over_replicas(
        self, parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool]
    ) -> None:
        """Replace the gradients of parameters by their sums over all ranks, which hold replicas.

        Args:
            parameters: The trainable parameters.
            has_gradient: For each parameter, whether any rank has a gradient of it.
        """
        if self.num_processes > 1:
            sum_gradients(parameters, has_gradient)

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradients of a window to a global L2 norm of at most `max_norm`.

        Args:
            model: The prepared model. Not used here, but by backends for sharded gradients.
            parameters: The parameters whose gradients are clipped in place.
            max_norm: The largest norm to leave unchanged.

        Returns:
            The norm before clipping, a scalar.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """Return whether a condition on the gradients of a window holds on all ranks.

        Without shards all ranks hold the same gradients, so they need not communicate. With shards
        it is a collective.

        Args:
            value: The condition on this rank, a bool or a tensor with one element.
        """
        if not self.is_sharded:
            return bool(value)
        (num_false,) = sum_over_ranks(self.accelerator, [float(not value)])
        return num_false == 0


class LocalBackend(Backend):
    """The backend of this process alone, without an accelerator: to try a loss before training.

    Forwards run in the precision of the caller, without a loss scale.

    Args:
        device: The model's device.
        settings: What is otherwise than so, as attributes of an accelerator.
    """

    def __init__(self, device: torch.device, **settings: Any) -> None:
        """Set up a backend of a single process on a device."""
        stand_in = SimpleNamespace(
            device=device,
            num_processes=1,
            process_index=0,
            mixed_precision="no",
            scaler=None,
            autocast=nullcontext,
        )
        vars(stand_in).update(settings)
        super().__init__(stand_in)


class ChunkBackend(Backend):
    """Backend for one process or DDP in which every micro-batch is a chunk of the window."""

    reason_not_to_split = (
        "It is a chunk of same_bits, whose size is part of the result: turn on "
        "gradient_checkpointing, use a device with more memory, or start a different run with a "
        "smaller same_bits"
    )

    def begin(self, model: nn.Module) -> None:
        """Prepare a window: align weights and buffers in memory.

        Warns if a CPU process has several threads, as the bits then depend on their number.
        """
        super().begin(model)
        if self.device.type == "cpu" and torch.get_num_threads() > 1:
            warnings.warn(
                f"bits depend on the number of threads, {torch.get_num_threads()} in this "
                "process: call torch.set_num_threads(1), or use the same number in every process "
                "and run.",
                stacklevel=2,
            )
        for tensor in (*model.parameters(), *model.buffers()):
            # The bits of MKL's matrix products depend on the alignment of the matrices, and weights
            # that were loaded from a safetensors file may begin anywhere.
            if tensor.data_ptr() % ALIGNMENT:
                tensor.data = tensor.data.clone()


def check_supported(accelerator: Accelerator) -> None:
    """Check that a window's gradients can be summed exactly with the accelerator's parallelism.

    Raises:
        ConfigError: If the accelerator reduces gradients itself (DeepSpeed, Megatron-LM, ...), if
            several processes share the same samples (tensor, context or sequence parallelism), or
            if several processes were launched, but Accelerate runs each of them alone.
    """
    num_launched = int(os.environ.get("WORLD_SIZE", "1"))
    if num_launched > 1 and accelerator.num_processes != num_launched:
        raise ConfigError(
            f"{num_launched} processes were launched, but Accelerate sees "
            f"{accelerator.num_processes}, so each would train alone: on a machine without a GPU "
            "use Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true."
        )
    parallelism = getattr(accelerator, "parallelism_config", None)
    unsupported_sizes = [
        name
        for name in ("tp_size", "cp_size", "sp_size")
        if (getattr(parallelism, name, 1) or 1) > 1
    ]
    if unsupported_sizes or accelerator.distributed_type not in SUPPORTED:
        unsupported = ", ".join(unsupported_sizes) or accelerator.distributed_type.value
        raise ConfigError(
            f"unsupported: {unsupported}. hf_ga splits windows over all processes and averages "
            f"over targets: use {', '.join(t.value for t in SUPPORTED)} "
            "(accelerate_configs/fsdp2.yaml shards weights and optimizer as ZeRO does), and leave "
            "tp_size, cp_size and sp_size at 1."
        )


def keep_process_group_alive(model: nn.parallel.DistributedDataParallel) -> None:
    """Set a second reference to DDP's process group, so that the model is freed without hanging.

    Called at the beginning of every window. Python frees the attributes of an object in the order
    in which they were set. With the new reference, which is set last, the process group is freed
    after DDP's reducer. Otherwise the reducer's destructor would free it while holding the GIL, and
    hang if gloo's threads need the GIL to free a tensor.
    """
    model.outlives_reducer = model.process_group


def sum_over_ranks(accelerator: Accelerator, numbers: Sequence[float]) -> tuple[float, ...]:
    """Sum several numbers over all ranks, each separately (counts, flags), in one all-reduce.

    In float64, so exact for integers up to 2**53. Waits for the device.

    Args:
        accelerator: The accelerator.
        numbers: The numbers of this rank, equally many on all ranks.

    Returns:
        The sums, as many as there are numbers.
    """
    if accelerator.num_processes == 1:
        return tuple(numbers)
    local = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    return tuple(reduce(local, "sum").tolist())
