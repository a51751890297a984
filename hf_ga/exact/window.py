"""The samples of one optimizer step."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.fetch import Fetcher, WindowRequest
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.memory import num_elements


@dataclass
class LoaderState:
    """What a loader shares with its windows.

    Attributes:
        max_elements: most padded elements in one micro-batch, the same on all ranks; None: memory never ran out.
        proofs: (model, identity of its loss function, what was proven of them), for all models trained on these windows.
        pad_to_window: micro-batches are collated as wide as their window: the user wants that, or a proven loss needs it.
    """

    max_elements: int | None = None
    proofs: list[tuple[Any, Any, Any]] = field(default_factory=list)
    pad_to_window: bool = False


class WindowPlanner(Protocol):
    """What a window needs of `splitter.Splitter`; see there."""

    def padded_to_window(self, request: WindowRequest) -> WindowRequest: ...


@dataclass
class Window:
    """The samples of one optimizer step: what a step may need, and nothing else.

    Attributes:
        micro_batches: this process's micro-batches.
        epoch, index: which window of which epoch (0-based). seed: the loader's.
        num_samples: samples in the window over all processes.
        state: what all windows of a loader share.
        splitter: plans the window again where it must be padded to one width.
    """

    request: WindowRequest
    fetcher: Fetcher
    batches: list[dict[str, Any]]
    state: LoaderState = field(default_factory=LoaderState)
    splitter: WindowPlanner | None = None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        request = self.request
        return [
            MicroBatch(batch, request.positions[offsets], request.sample_ids[offsets])
            for batch, offsets in zip(self.batches, request.micro_batches, strict=True)
        ]

    @property
    def epoch(self) -> int:
        return self.request.epoch

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def positions(self) -> np.ndarray:
        return self.request.positions

    @property
    def sample_ids(self) -> np.ndarray:
        return self.request.sample_ids

    @property
    def num_samples(self) -> int:
        return len(self.request.positions)

    def samples(self) -> list[Any]:
        """All samples of the window, not collated."""
        with preserved_random_states():
            return self.fetcher.samples(self.request, np.arange(self.num_samples))

    def probe_samples(self, count: int) -> list[Any]:
        """About `count` samples from all over the dataset (of a stream: from its beginning), not collated, for a proof: this
        window's may be too few or too alike.
        """
        with preserved_random_states():
            return self.fetcher.probe_samples(self.request, count)

    def split(self, micro_batches: list[np.ndarray], whole_window: bool | None = None) -> "Window":
        """The same window in other micro-batches (offsets in the window), collated again."""
        whole = self.request.whole_window if whole_window is None else whole_window
        request = replace(self.request, micro_batches=micro_batches, whole_window=whole, lengths=None)
        return replace(self, request=request, batches=self.fetcher[request])

    def fitting(self) -> "Window":
        """With this rank's micro-batches over the memory limit cut into even parts, each collated anew."""
        parts = [part for micro_batch in self.micro_batches for part in self._parts(micro_batch)]
        return self if len(parts) == len(self.batches) else self.split(parts)

    def fitting_parts(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """The same of one micro-batch."""
        parts = self._parts(micro_batch)
        return [micro_batch] if len(parts) == 1 else self.split(parts).micro_batches

    def padded_to_window(self) -> "Window":
        """With all micro-batches padded to the window's longest sample: the same ones, unless they were planned by lengths."""
        if self.request.whole_window:
            return self
        if self.splitter is None:
            return self.split(self.request.micro_batches, whole_window=True)
        request = self.splitter.padded_to_window(self.request)
        return replace(self, request=request, batches=self.fetcher[request])

    def _parts(self, micro_batch: MicroBatch) -> list[np.ndarray]:
        """Offsets in the window of each part that fits. One sample is never cut."""
        offsets, limit = micro_batch.positions - self.positions[0], self.state.max_elements
        if limit is None or num_elements(micro_batch) <= limit:
            return [offsets]
        samples = max(1, limit * len(micro_batch) // num_elements(micro_batch))
        return np.array_split(offsets, -(-len(micro_batch) // samples))
