"""A window: the samples of one optimizer step over all processes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from hf_ga.loading.batches import MicroBatch
from hf_ga.loading.fetch import Fetcher, WindowRequest
from hf_ga.loading.memory import num_elements
from hf_ga.order.length_plan import Computed


@dataclass
class LoaderState:
    """State that a loader and all of its windows share; training steps read and change it.

    Attributes:
        max_elements: Memory limit: maximum number of padded elements in one micro-batch, the same
            on all ranks. None if memory never ran out.
        pad_to_window: Whether all micro-batches are padded to the longest sample of their window,
            because the user asked for it or the loss needs it.
        is_padding_tried: Whether it was tried if padding changes what the model returns.
        is_width_tried: Whether a sample was compared in two padded widths.
        has_unpadded: Whether a window was done that was not padded to its longest sample.
        computed: Which tokens the model computes, on all processes.
    """

    max_elements: int | None = None
    pad_to_window: bool = False
    is_padding_tried: bool = False
    is_width_tried: bool = False
    has_unpadded: bool = False
    computed: Computed = Computed.PADDED


@dataclass
class Window:
    """The samples of one optimizer step, as this process's collated micro-batches.

    Attributes:
        request: The plan of the window: its samples, and their split into micro-batches.
        fetcher: Fetches and collates samples of the window, also in other micro-batches.
        batches: The micro-batches of this process, as collated batches on the host.
        state: The state that all windows of a loader share.
        replan: A function that plans the window again (`Splitter.replan`). Needed only if the
            window was planned by lengths.
    """

    request: WindowRequest
    fetcher: Fetcher
    batches: list[dict[str, Any]]
    state: LoaderState = field(default_factory=LoaderState)
    replan: Callable[..., WindowRequest] | None = None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The window's micro-batches of this process, with positions and ids of their samples."""
        request = self.request
        return [
            MicroBatch(batch, request.positions[offsets], request.sample_ids[offsets])
            for batch, offsets in zip(self.batches, request.micro_batches, strict=True)
        ]

    @property
    def epoch(self) -> int:
        """The epoch of the window (0-based)."""
        return self.request.epoch

    @property
    def index(self) -> int:
        """The index of the window in its epoch (0-based)."""
        return self.request.index

    @property
    def sample_ids(self) -> np.ndarray:
        """Ids of the window's samples over all processes, shape (samples,)."""
        return self.request.sample_ids

    @property
    def num_samples(self) -> int:
        """Number of samples of the window over all processes."""
        return len(self.request.sample_ids)

    @property
    def description(self) -> str:
        """The name of the window in error messages, such as "window 3 of epoch 0"."""
        return f"window {self.index} of epoch {self.epoch}"

    @property
    def offsets(self) -> np.ndarray:
        """Offsets in the window of those samples that this rank can fetch and collate."""
        return self.fetcher.offsets(self.request)

    def offsets_of(self, micro_batch: MicroBatch) -> np.ndarray:
        """Return the offsets in the window (0-based) of the samples of a micro-batch."""
        return micro_batch.positions - self.request.positions[0]

    def split(self, micro_batches: list[np.ndarray], *, pad_to_window: bool = False) -> "Window":
        """Return the same window, collated into other micro-batches.

        Args:
            micro_batches: For each new micro-batch of this process, the offsets in the window of
                its samples. They need not cover the window.
            pad_to_window: Whether they are padded to the longest sample of the window, also if
                those of this window are not.
        """
        request = replace(
            self.request,
            micro_batches=micro_batches,
            pad_to_window=pad_to_window or self.request.pad_to_window,
            lengths=None,
            chunk_tree=None,
        )
        return self._collate_again(request)

    def whole_batch(self, device: torch.device) -> dict[str, Any]:
        """Collate all samples of the window, in their order, into one batch on a device."""
        in_one_batch = self.split([np.arange(self.num_samples)])
        return send_to_device(in_one_batch.batches[0], device)

    def split_to_memory_limit(self) -> "Window":
        """Split this rank's micro-batches that exceed the memory limit into smaller ones.

        Returns:
            The window in the new micro-batches, collated again; the window itself if all
            micro-batches are within the limit, or if there is no limit (memory never ran out).
        """
        if self.state.max_elements is None:
            return self
        parts: list[np.ndarray] = []
        for micro_batch in self.micro_batches:
            parts += self._parts_within_limit(micro_batch, self.state.max_elements)
        return self if len(parts) == len(self.batches) else self.split(parts)

    def padded_to_window(self) -> "Window":
        """Return the window with all micro-batches padded to the window's longest sample.

        A window that was planned by lengths is planned again, as micro-batches of many short
        samples would become too large. The window itself is returned if it is padded already.
        """
        request = self.request
        if request.pad_to_window:
            return self
        if request.lengths is None:
            return self._collate_again(replace(request, pad_to_window=True))
        return self._collate_again(self.replan(request, pad_to_window=True))

    def is_planned_for(self, computed: Computed) -> bool:
        """Whether the window's plan is for a model that computes these tokens. True for a plan that
        is not made by lengths, or fixed.
        """
        request = self.request
        is_fixed = request.pad_to_window or request.chunk_tree is not None
        return request.lengths is None or is_fixed or request.computed == computed

    def planned_for(self, computed: Computed) -> "Window":
        """Return the window, planned again for a model that computes these tokens."""
        return self._collate_again(self.replan(self.request, computed=computed))

    def _collate_again(self, request: WindowRequest) -> "Window":
        """Return this window collated according to another plan of the same samples."""
        return replace(self, request=request, batches=self.fetcher[request])

    def _parts_within_limit(self, micro_batch: MicroBatch, max_elements: int) -> list[np.ndarray]:
        """Split a micro-batch evenly into parts of at most `max_elements` padded elements, or one
        sample. Returns the offsets in the window of the samples of each part.
        """
        offsets = self.offsets_of(micro_batch)
        elements = num_elements(micro_batch)
        if elements <= max_elements:
            return [offsets]
        samples_per_part = max(1, max_elements * len(micro_batch) // elements)
        num_parts = -(-len(micro_batch) // samples_per_part)  # rounded up
        return np.array_split(offsets, num_parts)
