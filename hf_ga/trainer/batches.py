"""The training batches of `ExactTrainer`: hf_ga's windows, one micro-batch at a time, as Trainer's
loop needs them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Generator
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_ga.exact.fetch import Fetcher, WindowRequest
from hf_ga.exact.window_loader import WindowLoader

Item = tuple[WindowRequest, int]  # a window, and the index of one of its micro-batches


class WindowBatch(dict):
    """A micro-batch: a dict of the model's arguments.

    Attributes:
        request: Its window.
        index: Its index in the window. Beyond the window's micro-batches on this rank, it repeats
            samples and is not computed.
    """

    def __init__(
        self, batch: dict[str, Any], item: Item | tuple[None, None] = (None, None)
    ) -> None:
        super().__init__(batch)
        self.request, self.index = item


class MicroBatches(Dataset):
    """Makes the batches of items, in the main process or in workers.

    Its length is the number of samples, which Trainer logs.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self._kept_name: tuple[int, int] | None = None  # of the last window that was fetched whole
        self._kept: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self.fetcher.dataset)

    def __getitem__(self, item: Item) -> WindowBatch:
        request, index = item
        is_own = index < len(request.micro_batches)
        if is_own and request.pad_to_window:
            batches = self._whole(request)
            return WindowBatch(batches[index], item)
        offsets = request.micro_batches[index] if is_own else np.array([0])
        (batch,) = self.fetcher[replace(request, micro_batches=[offsets])]
        return WindowBatch(batch, item)

    def _whole(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Collate all micro-batches of a window, and keep them: the others are requested next."""
        name = (request.epoch, request.index)
        if self._kept_name != name:
            self._kept = self.fetcher[request]
            self._kept_name = name
        return self._kept


class WindowSampler(Sampler):
    """Yields the items of one epoch, each in its own list.

    It is a batch sampler, so that Accelerate can skip batches on resume.
    """

    def __init__(self, windows: WindowLoader) -> None:
        self.windows = windows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based); like Trainer, also calls the dataset's `set_epoch`."""
        self.windows.set_epoch(epoch)
        if hasattr(self.windows.fetcher.dataset, "set_epoch"):
            self.windows.fetcher.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Count the micro-batches of this rank in an epoch, for Trainer: as many on all ranks."""
        layout = self.windows.layout
        num_full = len(self.windows) - 1
        rest = min(self.windows.num_samples - layout.window_size * num_full, layout.window_size)
        num_of_last = -(-rest // (layout.micro_batch_size * layout.num_processes))
        return num_full * layout.accumulation_steps + num_of_last

    def __iter__(self) -> Iterator[list[Item]]:
        for request in self.windows.requests():
            for index in range(request.max_micro_batches):
                yield [(request, index)]


class WindowedDataLoader(DataLoader):
    """A torch DataLoader over `WindowSampler`, with the worker settings of Trainer's own loader."""

    def __init__(self, windows: WindowLoader, like: DataLoader) -> None:
        super().__init__(
            MicroBatches(windows.fetcher),
            batch_sampler=WindowSampler(windows),
            collate_fn=_only,
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            persistent_workers=like.persistent_workers,
            multiprocessing_context=like.multiprocessing_context,
            prefetch_factor=like.prefetch_factor,
            generator=Generator(),  # leaves the global generator unchanged
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer at the beginning of each epoch."""
        self.batch_sampler.set_epoch(epoch)


def _only(items: list[WindowBatch]) -> WindowBatch:
    return items[0]
