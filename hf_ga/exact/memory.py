"""Running out of memory: the largest micro-batch that fits is found by failing, and is the same on all processes.

A micro-batch is measured by its padded elements: samples x width of its largest tensor, as most of its memory follows from them.
Any split of a window is the same update, so a window in which memory ran out is computed again in smaller micro-batches, and the
run is the one it would have been.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor

from hf_ga.errors import OutOfMemory
from hf_ga.exact.batches import count_tokens
from hf_ga.exact.plan import split_evenly

if TYPE_CHECKING:
    from hf_ga.exact.windows import MicroBatch, Window

PATIENCE = 100  # windows that were cut and fitted, before a larger limit is tried


class Size(NamedTuple):
    """Of a micro-batch: elements of its largest tensor, padding included, and its samples."""

    elements: int
    samples: int

    def __str__(self) -> str:
        return f"{self.samples} x {self.elements // self.samples} tokens"


class TooLarge(Exception):
    """A micro-batch did not fit on some process. Raised on all of them, in the same meeting, and caught where the window begins.

    Attributes:
        size: of the smallest micro-batch that failed.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(str(size))
        self.size = size


@dataclass
class MemoryLimit:
    """How large a micro-batch may be, as far as failures have told: the same on all processes, as they agree on each failure.

    Attributes:
        elements: most padded elements in one micro-batch; None: nothing has failed.
        lasted: the last limit with which `patience` windows fitted; 0: none.
        num_windows: windows that were cut and fitted since the limit changed. patience: of them, before a larger limit is tried.
        num_retries: how often a window was computed again. too_large: the micro-batch that failed last.
    """

    elements: int | None = None
    lasted: int = 0
    num_windows: int = 0
    patience: int = PATIENCE
    num_retries: int = 0
    too_large: Size | None = None

    def fitting(self, window: "Window") -> "Window":
        """The window with this process's micro-batches that are over the limit cut into even parts, each collated anew.

        One sample is never cut: whether it fits is tried.
        """
        parts = [part for micro_batch in window.micro_batches for part in self._offsets(micro_batch, window)]
        return window if len(parts) == len(window.batches) else window.split(parts)

    def parts(self, micro_batch: "MicroBatch", window: "Window") -> list["MicroBatch"]:
        """The same of one micro-batch."""
        offsets = self._offsets(micro_batch, window)
        return [micro_batch] if len(offsets) == 1 else window.split(offsets).micro_batches

    def after_failure(self, size: Size) -> None:
        """A micro-batch of this size did not fit: its half is the limit or, where a larger limit was only tried, the one before."""
        self.num_retries, self.num_windows, self.too_large = self.num_retries + 1, 0, size
        if 0 < self.lasted < size.elements:
            self.elements, self.patience = self.lasted, 2 * self.patience
        else:
            self.elements, self.lasted = size.elements // 2, 0

    def after_success(self, was_cut: bool) -> None:
        """A window fitted. was_cut: on any process; where none is, a larger limit would change nothing."""
        self.num_windows += was_cut
        if self.elements is not None and self.num_windows >= self.patience:
            self.lasted, self.elements, self.num_windows = self.elements, self.elements + max(1, self.elements // 4), 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: a run that goes on splits its windows as the one that never stopped."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state, too_large=Size(*state["too_large"]))

    def __str__(self) -> str:
        return (
            f"out of memory in micro-batches of {self.too_large}: from now on at most {self.elements} tokens (padding included) in "
            "one; the update is the same"
        )

    def _offsets(self, micro_batch: "MicroBatch", window: "Window") -> list[np.ndarray]:
        """In the window, of each part."""
        offsets, size = micro_batch.positions - window.positions[0], size_of(micro_batch)
        if self.elements is None or size.elements <= self.elements:
            return [offsets]
        samples = max(1, self.elements * size.samples // size.elements)
        return [offsets[part] for part in split_evenly(size.samples, -(-size.samples // samples))]


def size_of(micro_batch: "MicroBatch") -> Size:
    """Of the tensor with most elements among those with one row a sample."""
    samples = len(micro_batch)
    tensors = (v for v in micro_batch.batch.values() if isinstance(v, Tensor) and v.dim() and len(v) == samples)
    return Size(max((tensor.numel() for tensor in tensors), default=samples), samples)


def is_out_of_memory(error: Exception) -> bool:
    """On a GPU or, where the allocator says so before the system ends the process, on a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)


def too_large_for(process: int, micro_batch: "MicroBatch", *, evaluating: bool = False) -> OutOfMemory:
    """The error where nothing can be cut: a single sample, or under FSDP, where a failing process cannot rejoin the others."""
    size = size_of(micro_batch)
    if len(micro_batch) == 1:
        return OutOfMemory(
            f"every sample must fit into the memory of a process by itself, but sample {micro_batch.sample_ids[0]} with "
            f"{count_tokens(micro_batch.batch, 1)} tokens ({size.elements} with padding) does not fit on process {process}: lower "
            "max_length, turn on gradient_checkpointing, or use bf16, a smaller model or a device with more memory."
        )
    remedy = "per_device_eval_batch_size, same result" if evaluating else "per_device_train_batch_size, same update"
    return OutOfMemory(
        f"under FSDP every micro-batch must fit, as a process that fails cannot rejoin the others, but one of {size} = "
        f"{size.elements} tokens (padding included) does not fit on process {process}: make it smaller ({remedy})."
    )
