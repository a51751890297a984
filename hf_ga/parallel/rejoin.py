"""A rank that ran out of memory under FSDP2 makes the collectives that the others wait for.

All ranks make the same all-gathers and reduce-scatters in each forward and backward. After a
failure, torch (2.13) resets what FSDP keeps of the forward, and the rank computes the micro-batch
again, with one sample in place of its own. The collectives that it took part in before are answered
on this rank alone; all following ones are real. All ranks drop what comes out, so it need not be
right.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def can_rejoin(accelerator: Accelerator) -> bool:
    """Whether this version of torch, and how the model is sharded, allow it."""
    if not accelerator.is_fsdp2 or not hasattr(FSDPModule, "reset_iter_state"):
        return False
    # Replicas of shards sum their gradients in a collective that cannot be answered here.
    return not getattr(accelerator.parallelism_config, "dp_replicate_enabled", False)


class Progress:
    """How many collectives of a micro-batch this rank took part in.

    Attributes:
        num_made: With the other ranks.
        num_asked: In the current try, those that were answered on this rank included.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self.num_asked = 0
        self._is_repeated = False

    def attach(self, model: nn.Module) -> None:
        """Count the collectives of a model, in place of any that were set before.

        Args:
            model: Sharded by FSDP2.
        """
        for unit in units_of(model):
            unit.set_custom_all_gather(CountedAllGather(self))
            unit.set_custom_reduce_scatter(CountedReduceScatter(self))

    def start_micro_batch(self) -> None:
        """Count from 0; if it is repeated, from what was made before."""
        if not self._is_repeated:
            self.num_made = 0
        self.num_asked = 0
        self._is_repeated = False

    def repeat(self, model: nn.Module) -> None:
        """After a failure: the next micro-batch is the one that failed.

        Args:
            model: The root that was sharded.
        """
        model.reset_iter_state()
        self._is_repeated = True

    def is_made(self) -> bool:
        """Count a collective; whether this rank took part in it before."""
        self.num_asked += 1
        return self.num_asked <= self.num_made


class _Counted:
    """A collective of FSDP2. See `FSDPModule.set_custom_all_gather`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Counted):
    """torch's own, or this rank's shard in place of all others, which are weights, too."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.progress.is_made():
            own = input_tensor.clone()  # a view of the output
            output_tensor.view(group.size(), -1).copy_(own.view(1, -1))
            return None
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        self.progress.num_made += 1
        return work


class CountedReduceScatter(_Counted):
    """torch's own, or zeros."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.progress.is_made():
            output_tensor.zero_()
            return None
        work = dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )
        self.progress.num_made += 1
        return work


def units_of(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters FSDP2 gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
