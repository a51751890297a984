"""The samples of one optimizer step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from hf_ga.exact.audit import Audits
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.fetch import Fetcher, WindowRequest
from hf_ga.exact.memory import num_elements


@dataclass
class LoaderState:
    """What a loader shares with its windows.

    Attributes:
        max_elements: Most padded elements in one micro-batch, the same on all ranks. None: memory
            never ran out.
        rules: For each model trained on these windows, what was proven about it.
        has_gradient: For each model, which of its trainable parameters had a gradient in the last
            window, on any rank.
        pad_to_window: Whether micro-batches are collated as wide as their window: the user wants
            that, or a proven loss needs it.
        num_plain: Micro-batches that were computed without some speed-up, because it was not proven
            for their structure.
        audits: Which micro-batches were audited.
    """

    max_elements: int | None = None
    rules: dict[Any, Any] = field(default_factory=dict)
    has_gradient: dict[Any, Sequence[bool]] = field(default_factory=dict)
    pad_to_window: bool = False
    num_plain: int = 0
    audits: Audits = field(default_factory=Audits)


@dataclass
class Window:
    """The samples of one optimizer step: what a step may need, and nothing else.

    Attributes:
        request: The plan of the window.
        fetcher: Collates other micro-batches of its samples.
        batches: This process's batches, collated on the host.
        state: What all windows of a loader share.
        padded: Plans the window again, to be padded to one width; needed where it was planned by
            lengths.
    """

    request: WindowRequest
    fetcher: Fetcher
    batches: list[dict[str, Any]]
    state: LoaderState = field(default_factory=LoaderState)
    padded: Callable[[WindowRequest], WindowRequest] | None = None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """This process's micro-batches."""
        request = self.request
        return [
            MicroBatch(batch, request.positions[offsets], request.sample_ids[offsets])
            for batch, offsets in zip(self.batches, request.micro_batches, strict=True)
        ]

    @property
    def epoch(self) -> int:
        """The epoch (0-based)."""
        return self.request.epoch

    @property
    def index(self) -> int:
        """Which window of the epoch it is (0-based)."""
        return self.request.index

    @property
    def sample_ids(self) -> np.ndarray:
        """Ids of its samples over all processes, shape (samples,)."""
        return self.request.sample_ids

    @property
    def num_samples(self) -> int:
        """How many samples it has over all processes."""
        return len(self.request.sample_ids)

    @property
    def description(self) -> str:
        """How errors name it."""
        return f"window {self.index} of epoch {self.epoch}"

    @property
    def offsets(self) -> np.ndarray:
        """Offsets in the window of the samples that this rank can collate."""
        return self.fetcher.offsets(self.request)

    def offsets_of(self, micro_batch: MicroBatch) -> np.ndarray:
        """Return where the samples of a micro-batch are in the window."""
        return micro_batch.positions - self.request.positions[0]

    def split(self, micro_batches: list[np.ndarray]) -> "Window":
        """Collate the same window in other micro-batches (offsets in the window)."""
        return self._collated(
            replace(self.request, micro_batches=micro_batches, lengths=None, chunks=None)
        )

    def whole_batch(self, device: torch.device) -> dict[str, Any]:
        """Collate all samples of the window, in its order, as one batch on a device."""
        whole = self.split([np.arange(self.num_samples)])
        return send_to_device(whole.batches[0], device)

    def split_to_memory_limit(self) -> "Window":
        """Cut this rank's micro-batches over the memory limit into even parts, collated again."""
        parts = [part for micro_batch in self.micro_batches for part in self._parts(micro_batch)]
        return self if len(parts) == len(self.batches) else self.split(parts)

    def padded_to_window(self) -> "Window":
        """Pad all micro-batches to the window's longest sample.

        A window planned by lengths is planned again, as micro-batches of many short samples would
        be too large now.
        """
        request = self.request
        if request.pad_to_window:
            return self
        if request.lengths is None:
            return self._collated(replace(request, pad_to_window=True))
        return self._collated(self.padded(request))

    def _collated(self, request: WindowRequest) -> "Window":
        return replace(self, request=request, batches=self.fetcher[request])

    def _parts(self, micro_batch: MicroBatch) -> list[np.ndarray]:
        """Return the offsets in the window of each part that fits. One sample is never cut."""
        offsets = self.offsets_of(micro_batch)
        limit = self.state.max_elements
        if limit is None or num_elements(micro_batch) <= limit:
            return [offsets]
        samples = max(1, limit * len(micro_batch) // num_elements(micro_batch))
        return np.array_split(offsets, -(-len(micro_batch) // samples))
