"""Running out of memory: a size of micro-batches that fits is found by failing, and is the same on
all ranks.

The size of a micro-batch is its padded elements: the number of elements of its largest tensor, as
most of its memory is proportional to them. Any split of a window is the same update, so a window in
which memory ran out is computed again in smaller micro-batches, and the result is the same.
"""

from dataclasses import dataclass

import torch
from accelerate.utils.memory import should_reduce_batch_size

from hf_ga.errors import OutOfMemory
from hf_ga.loading.batches import MicroBatch, count_padded_elements, count_tokens


@dataclass(eq=False)
class TooLarge(Exception):
    """A micro-batch did not fit into the memory of some rank, so the window must be computed again
    in smaller micro-batches.

    Raised on all ranks in the same collective, and caught by the training step, which starts the
    window again.

    Attributes:
        num_elements: The padded elements of the smallest micro-batch that did not fit.
    """

    num_elements: int


def num_elements(micro_batch: MicroBatch) -> int:
    """Return the size of a micro-batch: the number of elements, with padding, of its largest tensor
    that has one row per sample.
    """
    return count_padded_elements(micro_batch.batch, len(micro_batch))


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the host, so that the window is
    computed again in smaller micro-batches.

    On the host there is an exception only if the allocator fails; otherwise the operating system
    kills the process.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(
        error
    )


def out_of_memory_error(
    rank: int, micro_batch: MicroBatch, reason_not_to_split: str | None = None
) -> OutOfMemory:
    """Build the OutOfMemory exception for a micro-batch that cannot be split into smaller ones.

    Args:
        rank: The rank on which it did not fit.
        micro_batch: The micro-batch: a single sample, or larger if the backend does not split
            micro-batches.
        reason_not_to_split: Why the backend does not split micro-batches, as a sentence for the
            message without its full stop. Unused for a single sample.
    """
    num_padded = num_elements(micro_batch)
    if len(micro_batch) == 1:
        return OutOfMemory(
            f"sample {micro_batch.sample_ids[0]} with {count_tokens(micro_batch.batch, 1)} tokens "
            f"({num_padded} with padding) does not fit into the memory of process {rank} by "
            "itself: lower max_length, turn on gradient_checkpointing, or use bf16, a smaller "
            "model or a device with more memory."
        )
    return OutOfMemory(
        f"a micro-batch of {len(micro_batch)} samples = {num_padded} tokens (padding included) "
        f"does not fit into the memory of process {rank}. {reason_not_to_split}."
    )
