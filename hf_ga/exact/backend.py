"""What differs between one process, DDP and FSDP. Ranks communicate here and nowhere else in a
window.

This backend serves one process and DDP: ranks hold replicas, exchange a small status before and
    after the forwards, and sum the
gradients once per window. DDP's own reducer stays silent, and no factor of the number of ranks
enters, so ranks may have different numbers of micro-batches, or none. FSDP's is
`hf_ga.parallel.fsdp.ShardedBackend`.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import compress

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, reduce
from torch import Tensor, nn

from hf_ga.errors import ConfigError, ProcessFailed
from hf_ga.exact.early_sums import BucketedAllReduce, sum_gradients
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss
from hf_ga.exact.memory import TooLarge
from hf_ga.exact.window import Window

SUPPORTED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.FSDP,
)


@dataclass
class RankStatus:
    """What one rank computed of a window or, after `all_reduce_status`, what all ranks did.

    Attributes:
        loss: sum of the micro-batches' terms, float64 scalar on the device.
        counts: targets, one number for each mean of the loss.
        has_gradient: of each trainable parameter, whether this rank (then: any rank) has a gradient
            of it.
        failure: what went wrong on this rank.
        must_sum_again: gradients that were summed early have changed since.
    """

    loss: Tensor
    counts: Counts
    has_gradient: Sequence[bool] = ()
    failure: Exception | None = None
    must_sum_again: bool = False


class Backend:
    """One process, or replicas on several (DDP).

    Attributes:
        is_sharded: Parameters are sharded (FSDP), so that every forward and backward is a
            collective of all ranks.
        reason_not_to_split: Why a micro-batch for which memory runs out is not computed in parts.
            None: it is.
        can_rejoin: A rank that ran out of memory can make the collectives that others wait for.
        can_overlap_all_reduce: Gradients may be summed while the last backward still runs.
    """

    is_sharded = False
    reason_not_to_split: str | None = None
    can_rejoin = False
    can_overlap_all_reduce = True
    _early: BucketedAllReduce | None = None  # of this window

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.num_processes = accelerator.num_processes
        self.process_index = accelerator.process_index

    @property
    def can_split(self) -> bool:
        """Whether micro-batches over a limit that was found are computed in parts."""
        return self.can_rejoin or not self.reason_not_to_split

    def autocast(self) -> AbstractContextManager[None]:
        """Around forwards and losses: the mixed precision of the run."""
        return self.accelerator.autocast()

    def begin(self, model: nn.Module, loss: Loss) -> None:
        """Before the first forward of a window.

        Raises:
            ConfigError: If gradients would not be exact under a setting.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            # A forward through DDP without a backward (an evaluation) leaves its reducer waiting.
            model.reducer._reset_state()
            keep_process_group_alive(model)

    def sum_early(
        self, parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool] | None
    ) -> None:
        """Before the forwards of a window: sum gradients during the last backward.

        Args:
            parameters: The trainable ones.
            has_gradient: Of each, whether any rank is expected to have a gradient, the same on all
                ranks. None: not known, so the sums come after the last backward.
        """
        self._early = None
        if self.can_overlap_all_reduce and self.num_processes > 1 and has_gradient is not None:
            self._early = BucketedAllReduce(list(compress(parameters, has_gradient)))

    @property
    def sums_early(self) -> bool:
        """Whether this window's gradients are summed during its last backward."""
        return self._early is not None

    def finish_early_sums(self, status: RankStatus) -> None:
        """After the last backward of this rank, before the status of all ranks is known."""
        if self._early is not None:
            self._early.finish(has_failed=status.failure is not None)
            status.must_sum_again = self._early.must_repeat

    def reshard(self, model: nn.Module) -> None:
        """Let the model's parameters be those that the optimizer has: its shards, if any."""

    def rejoin(self, model: nn.Module) -> None:
        """After memory ran out where `can_rejoin`, before the micro-batch is repeated."""

    def sync(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Around each forward and backward."""
        if is_last and self._early is not None:
            return self._early.during_backward()
        return nullcontext()

    def backward(self, term: Tensor | float, weight: int) -> None:
        """Make the backward of a micro-batch's term, times the scale of fp16.

        Not by `accelerator.backward`, which divides by gradient_accumulation_steps: terms are
        already divided by targets.

        Args:
            term: A scalar.
            weight: 0: do nothing.
        """
        if weight and isinstance(term, Tensor) and term.requires_grad:  # else it is a constant
            self.scaled(term).backward()

    def scaled(self, tensor: Tensor) -> Tensor:
        """Multiply a tensor by the loss scale of fp16."""
        scaler = self.accelerator.scaler
        return tensor if scaler is None else scaler.scale(tensor)

    def collect(self, call: Call, loss: Tensor, counts: Counts, status: RankStatus) -> None:
        """After the backward of a micro-batch: add its loss, a scalar, and what its forward counted
        to the status.
        """
        status.loss += loss
        if counts:
            status.counts = sum_counts(status.counts, counts)

    def equalize_calls(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Return the calls to make: where forwards are collectives, as many as the other ranks
        make.
        """
        return calls

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """Add up the status of all ranks: one small all-reduce in float64. On one process, the
        status itself.

        Raises:
            The rank's own failure; ProcessFailed: another rank's, with its message. TooLarge:
            nothing else than memory that ran
                out on a rank; the smallest micro-batch that failed.
        """
        own = status.failure
        if self.num_processes == 1:
            if own is not None:
                raise own
            return status
        row = [own is not None, 0.0, status.must_sum_again, *status.counts, *status.has_gradient]
        row = torch.tensor(row, dtype=torch.float64, device=self.device)
        row[1] = status.loss
        dist.all_reduce(row)
        failed, _, must_sum_again, *numbers = row.tolist()
        if failed:
            if self._early is not None:
                self._early.drop()
            _raise_on_all_ranks(own)
        counts = numbers[: len(status.counts)]
        given = numbers[len(status.counts) :]
        self.check_partial_gradients(given)
        return replace(
            status,
            loss=row[1],
            counts=tuple(counts),
            has_gradient=tuple(map(bool, given)),
            must_sum_again=bool(must_sum_again),
        )

    def check_partial_gradients(self, num_ranks: Sequence[float]) -> None:
        """Check that the gradients of all parameters can be summed.

        Args:
            num_ranks: For each parameter, how many ranks have a gradient of it.

        Raises:
            ConfigError: If gradients that only some ranks have cannot be summed.
        """

    def max_over_ranks(self, number: int) -> int:
        """Return the largest of a number that each rank has."""
        if self.num_processes == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def all_reduce(self, tensor: Tensor, status: RankStatus) -> Tensor:
        """Sum a tensor over all ranks, which each computed in the window so far."""
        if not self.is_sharded:  # where a rank that fails ends at once
            # A rank that failed meanwhile takes part in this collective instead.
            self.all_reduce_status(status)
        if self.num_processes == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Sum the gradients over all ranks.

        Args:
            model: The prepared model.
            status: Of all ranks.
            unused: Names of parameters without a gradient in the proof.
        """
        if self.num_processes == 1:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        still_to_sum = list(status.has_gradient)
        if self._early is not None and status.must_sum_again:
            self._early.drop()
        elif self._early is not None:
            self._early.apply()
            summed = {p for bucket in self._early.buckets for p in bucket}
            for index, parameter in enumerate(parameters):
                if parameter in summed:
                    if not still_to_sum[index]:
                        parameter.grad = None  # no rank had one
                    still_to_sum[index] = False
        sum_gradients(parameters, still_to_sum)

    def clip(self, model: nn.Module, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients of `parameters` to a global L2 norm of at most `max_norm`; returns
        the norm before.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def is_true_on_all_shards(self, value: Tensor | bool) -> bool:
        """Whether a condition on this rank's gradients is true on all ranks. Replicas hold the same
        gradients.
        """
        return bool(value)


class LocalBackend(Backend):
    """This process alone, in the precision of the caller: for the forwards and backwards of a
    proof, which needs no accelerator.

    Args:
        device: The model's device.
    """

    reason_not_to_split = (
        "It is one of the few samples of the proof: lower max_length, or turn on "
        "gradient_checkpointing"
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_processes = 1
        self.process_index = 0

    def autocast(self) -> AbstractContextManager[None]:
        """Leave the caller's precision."""
        return nullcontext()

    def begin(self, model: nn.Module, loss: Loss) -> None:
        """Do nothing."""

    def scaled(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself: there is no loss scale."""
        return tensor

    def all_reduce(self, tensor: Tensor, status: RankStatus) -> Tensor:
        """Return the tensor itself."""
        return tensor


def check_supported(accelerator: Accelerator) -> None:
    """Refuse what cannot be reduced exactly.

    Raises:
        ConfigError: If the backend reduces gradients in another way (DeepSpeed, Megatron-LM, ...),
            processes do not know of each other, or they need the same samples (tensor, context,
            sequence parallelism).
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched > 1:
        raise ConfigError(
            f"{launched} processes were launched, but Accelerate sees "
            f"{accelerator.num_processes}, so each would train alone: on a machine without a GPU "
            "use Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true."
        )
    sizes = getattr(accelerator, "parallelism_config", None)
    dimensions = ("tp_size", "cp_size", "sp_size")
    shared = [name for name in dimensions if (getattr(sizes, name, 1) or 1) > 1]
    if shared or accelerator.distributed_type not in SUPPORTED:
        raise ConfigError(
            f"unsupported: {', '.join(shared) or accelerator.distributed_type.value}. hf_ga "
            "splits windows over all processes and averages over targets: use "
            f"{', '.join(t.value for t in SUPPORTED)} (accelerate_configs/fsdp2.yaml shards "
            "weights and optimizer as ZeRO does), and leave tp_size, cp_size and sp_size at 1."
        )


def keep_process_group_alive(model: nn.parallel.DistributedDataParallel) -> None:
    """Let a model under DDP end without hanging.

    Python frees an object's attributes in the order in which they were set. The process group,
    freed last, releases the GIL while gloo's threads end; the reducer's destructor keeps it, and
    hangs if they need it for a tensor.
    """
    model.outlives_reducer = model.process_group


def sum_over_ranks(accelerator: Accelerator, numbers: Sequence[float]) -> tuple[float, ...]:
    """Sum numbers over the ranks, in float64 (exact for integers up to 2**53). Waits for the
    device.
    """
    if accelerator.num_processes == 1:
        return tuple(numbers)
    own = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    return tuple(reduce(own, "sum").tolist())


def sum_counts(*counts: Counts) -> Counts:
    """Add up the counts of several means, each by itself."""
    return tuple(map(sum, zip(*counts, strict=True)))


def _raise_on_all_ranks(own: Exception | None) -> None:
    """Raise an error on all ranks, as one of them has failed.

    Args:
        own: The failure of this rank. None: it did not fail.

    Raises:
        Exception: The own failure.
        ProcessFailed: If another rank failed.
        TooLarge: If the only failures are micro-batches that did not fit, and can be cut.
    """
    can_go_on = own is None or isinstance(own, TooLarge)
    text = f"{type(own).__name__}: {own}"
    text = text.encode(errors="replace").decode()  # printable characters only
    failures = [None] * dist.get_world_size()
    dist.all_gather_object(failures, own if can_go_on else text)
    for rank, failure in enumerate(failures):
        if isinstance(failure, str):
            raise ProcessFailed(f"process {rank} failed: {failure}") if can_go_on else own
    raise TooLarge(min(failure.num_elements for failure in failures if failure is not None))
