"""How a rank that ran out of memory under FSDP2 rejoins the others: it makes the collectives for
which they wait.

All ranks make the same all-gathers and reduce-scatters in each forward and backward. After a
failure, torch (2.13) resets the state that FSDP keeps during a forward, and the rank repeats the
micro-batch with a single sample. The collectives that it had already made with the others are
replaced by zeros; all following ones are real. All ranks discard the results, so they need
not be correct.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def can_rejoin(accelerator: Accelerator) -> bool:
    """Whether a rank that ran out of memory can rejoin the others: under FSDP2 with a torch version
    that has `reset_iter_state` (2.13), and without replicas of the shards (HSDP).
    """
    if not accelerator.is_fsdp2 or not hasattr(FSDPModule, "reset_iter_state"):
        return False
    # Under HSDP, replicas sum their gradients in a further collective, which cannot be replaced.
    return not getattr(accelerator.parallelism_config, "dp_replicate_enabled", False)


class CollectiveCounter:
    """Counts the collectives of FSDP2 in a micro-batch, so that a rank that repeats the micro-batch
    knows which of them it has already made with the other ranks.

    Attributes:
        num_made: Number of the micro-batch's collectives that this rank has made with the others.
        num_requested: Number of collectives that FSDP has requested in the current try of the
            micro-batch, including those that were replaced by zeros.
    """

    def __init__(self) -> None:
        """Start with no collective of FSDP2 counted."""
        self.num_made = 0
        self.num_requested = 0
        self._num_kept = 0  # of those made, if the next try repeats a micro-batch

    def attach(self, model: nn.Module) -> None:
        """Count all collectives that FSDP2 makes for a model from now on: replace torch's own, and
        any custom ones that were set before, by ones that are counted.

        Args:
            model: The model, sharded by FSDP2.
        """
        for unit in fsdp2_units(model):
            unit.set_custom_all_gather(CountedCollective(self, dist.all_gather_single))
            unit.set_custom_reduce_scatter(CountedCollective(self, dist.reduce_scatter_single))

    def start_micro_batch(self) -> None:
        """Reset the counts of FSDP2's collectives before the forward of a micro-batch. If it is the
        repetition of one that ran out of memory, the number of collectives that this rank has
        already made with the others is kept.
        """
        self.num_made = self._num_kept
        self.num_requested = 0
        self._num_kept = 0

    def prepare_repetition(self, model: nn.Module) -> None:
        """Prepare the repetition of a micro-batch that ran out of memory under FSDP2: reset the
        state that FSDP keeps of its forward, and let the next `start_micro_batch` keep the number
        of collectives that were made.

        Args:
            model: The root module that FSDP2 sharded.
        """
        model.reset_iter_state()
        self._num_kept = self.num_made


class CountedCollective:
    """A custom collective of FSDP2 that is counted: torch's own or, for one that was already made
    before a failure, zeros. See `FSDPModule.set_custom_all_gather`.

    Args:
        counter: The counter of the micro-batch, which all collectives of a model share.
        make: torch's function: (output, input, group, ...) -> the work handle.
    """

    def __init__(self, counter: CollectiveCounter, make: Callable[..., dist.Work | None]) -> None:
        """Store the counter and torch's function."""
        self.counter = counter
        self.make = make

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer for the output; FSDP2 calls it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, **options: Any
    ) -> dist.Work | None:
        """Write the result for this rank into `output_tensor`.

        Returns:
            The work handle of an asynchronous collective, otherwise None.
        """
        counter = self.counter
        counter.num_requested += 1
        if counter.num_requested <= counter.num_made:  # in a try before
            # Results of a repeated micro-batch are discarded, so any finite numbers will do.
            output_tensor.zero_()
            return None
        work = self.make(output_tensor, input_tensor, **options)
        counter.num_made += 1
        return work


def fsdp2_units(model: nn.Module) -> list[FSDPModule]:
    """Return the submodules of a model that `fully_shard` was applied to: FSDP2 gathers the
    parameters of each of them in one all-gather.
    """
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
