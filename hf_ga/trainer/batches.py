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
    """A micro-batch: a dict of the model's arguments, with its window and its index in it as
    attributes.

    An index beyond the window's micro-batches on this rank: it repeats samples, and is not
    computed.
    """

    def __init__(
        self, batch: dict[str, Any], item: Item | tuple[None, None] = (None, None)
    ) -> None:
        super().__init__(batch)
        self.request, self.index = item


class MicroBatches(Dataset):
    """Items -> batches, in the main process or in workers. Its length is the number of samples,
    which Trainer logs.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self._kept: tuple[tuple[int, int], list[dict[str, Any]]] | None = (
            None  # the last window that was fetched whole
        )

    def __len__(self) -> int:
        return len(self.fetcher.dataset)

    def __getitem__(self, item: Item) -> WindowBatch:
        request, index = item
        if index >= len(request.micro_batches):
            offsets = np.array([0])
        elif request.whole_window:
            return WindowBatch(self._whole(request)[index], item)
        else:
            offsets = request.micro_batches[index]
        return WindowBatch(self.fetcher[replace(request, micro_batches=[offsets])][0], item)

    def _whole(self, request: WindowRequest) -> list[dict[str, Any]]:
        """All micro-batches of a window, for a fetcher that collates whole windows; cached, as the
        others are requested next.
        """
        name = (request.epoch, request.index)
        if self._kept is None or self._kept[0] != name:
            self._kept = name, self.fetcher[request]
        return self._kept[1]


class WindowSampler(Sampler):
    """The items of one epoch, each in its own list: a batch sampler, so that accelerate can skip
    batches on resume.
    """

    def __init__(self, windows: WindowLoader) -> None:
        self.windows = windows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based); like Trainer, also calls the dataset's `set_epoch`."""
        self.windows.set_epoch(epoch)
        if hasattr(self.windows.fetcher.dataset, "set_epoch"):
            self.windows.fetcher.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch, which Trainer counts: as many on all ranks."""
        layout = self.windows.layout
        num_full = len(self.windows) - 1
        rest = min(self.windows.num_samples - layout.window_size * num_full, layout.window_size)
        return num_full * layout.accumulation_steps + -(
            -rest // (layout.micro_batch_size * layout.num_processes)
        )

    def __iter__(self) -> Iterator[list[Item]]:
        for request in self.windows.requests():
            for index in range(request.most_micro_batches):
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
