"""Running out of memory: a size of micro-batches that fits is found by failing, and is the same on all ranks.

A micro-batch is measured by its padded elements: samples x width of its largest tensor, as most of its memory follows from them.
Any split of a window is the same update, so a window in which memory ran out is computed again in smaller micro-batches, and the
run is the one it would have been.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_ga.errors import OutOfMemory
from hf_ga.exact.batches import MicroBatch, count_tokens, widest


class Size(NamedTuple):
    """Of a micro-batch: elements of its largest tensor, padding included, and its samples."""

    elements: int
    samples: int

    def __str__(self) -> str:
        return f"{self.samples} x {self.elements // self.samples} tokens"


class TooLarge(Exception):
    """A micro-batch did not fit on some rank. Raised on all of them in the same collective, and caught where the window begins.

    Attributes:
        size: of the smallest micro-batch that failed.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(str(size))
        self.size = size


@dataclass
class MemoryLimit:
    """How large a micro-batch may be, learnt from failures: the same on all ranks, which exchange each failure.

    Attributes:
        elements: most padded elements in one micro-batch; None: nothing has failed.
        num_retries: how often a window was computed again. too_large: the micro-batch that failed last.
    """

    elements: int | None = None
    num_retries: int = 0
    too_large: Size | None = None

    def after_failure(self, size: Size) -> None:
        """A micro-batch of this size did not fit: half of it is the new limit."""
        self.num_retries, self.too_large, self.elements = self.num_retries + 1, size, size.elements // 2

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: a resumed run splits its windows as the run that never stopped."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, too_large=Size(*state["too_large"]))

    def __str__(self) -> str:
        return (
            f"out of memory in micro-batches of {self.too_large}: from now on at most {self.elements} tokens (padding included) in "
            "one; the update is the same"
        )


def size_of(micro_batch: MicroBatch) -> Size:
    """Of the largest tensor with one row a sample."""
    return Size(widest(micro_batch.batch, len(micro_batch)), len(micro_batch))


def is_out_of_memory(error: Exception) -> bool:
    """On a GPU, or on a CPU whose allocator fails before the system ends the process."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)


def too_large_for(rank: int, micro_batch: MicroBatch, *, evaluating: bool = False) -> OutOfMemory:
    """The error where nothing can be cut: a single sample, or under FSDP, where a failing rank cannot rejoin the others."""
    size = size_of(micro_batch)
    if len(micro_batch) == 1:
        return OutOfMemory(
            f"sample {micro_batch.sample_ids[0]} with {count_tokens(micro_batch.batch, 1)} tokens ({size.elements} with padding) "
            f"does not fit into the memory of process {rank} by itself: lower max_length, turn on gradient_checkpointing, or use "
            "bf16, a smaller model or a device with more memory."
        )
    remedy = "per_device_eval_batch_size, same result" if evaluating else "per_device_train_batch_size, same update"
    return OutOfMemory(
        f"a micro-batch of {size} = {size.elements} tokens (padding included) does not fit into the memory of process {rank}. "
        f"Under FSDP it cannot be cut, as a process that fails cannot rejoin the others: make it smaller ({remedy})."
    )
