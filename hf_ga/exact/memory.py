"""Running out of memory: a size of micro-batches that fits is found by failing, and is the same on
all ranks.

A micro-batch is measured by its padded elements: samples x width of its largest tensor, as most of
its memory follows from them. Any split of a window is the same update, so a window in which memory
ran out is computed again in smaller micro-batches, and the run is the one it would have been.
"""

from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_ga.errors import OutOfMemory
from hf_ga.exact.batches import MicroBatch, count_tokens, widest


@dataclass(eq=False)
class TooLarge(Exception):
    """A micro-batch did not fit on some rank. Raised on all of them in the same collective, and
    caught where the window begins.

    Attributes:
        num_elements: of the smallest micro-batch that failed.
    """

    num_elements: int


def num_elements(micro_batch: MicroBatch) -> int:
    """Count the elements of its largest tensor with one row a sample, padding included."""
    return widest(micro_batch.batch, len(micro_batch))


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: on a GPU, or on a CPU whose allocator fails before the system ends
    the process.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(
        error
    )


def too_large_for(
    rank: int, micro_batch: MicroBatch, reason_not_to_split: str | None = None
) -> OutOfMemory:
    """Return the error for a micro-batch that cannot be cut into smaller ones.

    Args:
        rank: Where it did not fit.
        micro_batch: A single sample, or any micro-batch of a backend with a reason not to cut.
        reason_not_to_split: See `Backend`.
    """
    padded = num_elements(micro_batch)
    if len(micro_batch) == 1:
        return OutOfMemory(
            f"sample {micro_batch.sample_ids[0]} with {count_tokens(micro_batch.batch, 1)} tokens "
            f"({padded} with padding) "
            f"does not fit into the memory of process {rank} by itself: lower max_length, turn on "
            "gradient_checkpointing, or use "
            "bf16, a smaller model or a device with more memory."
        )
    return OutOfMemory(
        f"a micro-batch of {len(micro_batch)} samples = {padded} tokens (padding included) does "
        "not fit into the memory of process "
        f"{rank}. {reason_not_to_split}."
    )
