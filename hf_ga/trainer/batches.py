"""The training batches of `ExactTrainer`: hf_ga's windows, one micro-batch at a time, as Trainer's
loop needs them.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Generator
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_ga.loading.fetch import Fetcher, WindowRequest
from hf_ga.loading.window_loader import WindowLoader

# Which micro-batch to load: the request of its window, and its index in the window (0-based).
MicroBatchKey = tuple[WindowRequest, int]


class WindowBatch(dict):
    """A micro-batch of a window, as a dict of the model's arguments.

    Args:
        batch: The model's arguments.
        request: The request of its window.
    """

    def __init__(self, batch: dict[str, Any], request: WindowRequest | None = None) -> None:
        """Make the dict of a micro-batch for `ExactTrainer`; see the class for the arguments."""
        super().__init__(batch)
        self.request = request
        self._versions: list[tuple[Any, str, int]] = []

    def note_versions(self) -> None:
        """Remember what the entries are, for `is_changed`."""
        self._versions = self._list_versions()

    def is_changed(self) -> bool:
        """Whether an entry was changed in place, replaced, added or removed since
        `note_versions`.
        """
        now = self._list_versions()
        if len(now) != len(self._versions):
            return True
        pairs = zip(now, self._versions, strict=True)
        return any(new[0] is not old[0] or new[1:] != old[1:] for new, old in pairs)

    def _list_versions(self) -> list[tuple[Any, str, int]]:
        """List each entry with its name and, of a tensor, the number of changes in place."""
        return [(value, name, getattr(value, "_version", 0)) for name, value in self.items()]


class MicroBatches(Dataset):
    """A map-style dataset whose items are collated micro-batches of windows.

    It runs in the main process or in the DataLoader's workers.

    Args:
        fetcher: Loads and collates the samples of a window's micro-batches.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        """Make the dataset of `ExactTrainer`'s DataLoader.

        Args:
            fetcher: Loads and collates the samples of a window's micro-batches.
        """
        self.fetcher = fetcher
        self._cached_window: tuple[int, int] | None = None  # its epoch and index
        self._cached_batches: list[dict[str, Any]] = []  # all micro-batches of that window

    def __len__(self) -> int:
        """Return the number of samples (not of micro-batches) in `ExactTrainer`'s dataset, which
        Trainer logs.
        """
        return len(self.fetcher.dataset)

    def __getitem__(self, key: MicroBatchKey) -> WindowBatch:
        """Load and collate one micro-batch of a window for `ExactTrainer`.

        If all micro-batches of a window must be padded to one length, they are collated together
        and cached. An index beyond this rank's micro-batches of the window is a filler, as Trainer
        fetches equally many batches on all ranks: the window's first sample, which adds nothing to
        the gradient.

        Args:
            key: (request of the window, index of the micro-batch in it).
        """
        request, index = key
        is_filler = index >= len(request.micro_batches)
        if request.pad_to_window and not is_filler:
            batches = self._batches_of_window(request)
            return WindowBatch(batches[index], request)
        offsets = np.array([0]) if is_filler else request.micro_batches[index]
        (batch,) = self.fetcher[replace(request, micro_batches=[offsets])]
        return WindowBatch(batch, request)

    def _batches_of_window(self, request: WindowRequest) -> list[dict[str, Any]]:
        """Collate all micro-batches of a window, padded to one length, and cache them until another
        window is requested, as they are requested one after the other.
        """
        window = (request.epoch, request.index)
        if self._cached_window != window:
            self._cached_batches = self.fetcher[request]
            self._cached_window = window
        return self._cached_batches


class WindowSampler(Sampler):
    """Yields the key of each micro-batch of an epoch on this rank, each in a list of its own.

    The lists make it a batch sampler, so that Accelerate can skip batches when a run resumes.

    Args:
        windows: The loader of the windows.
    """

    def __init__(self, windows: WindowLoader) -> None:
        """Make the sampler of `ExactTrainer`'s DataLoader for the windows of a loader."""
        self.windows = windows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of the windows, and of the dataset if it has `set_epoch`, as
        Trainer's own loader does.
        """
        self.windows.set_epoch(epoch)
        if hasattr(self.windows.fetcher.dataset, "set_epoch"):
            self.windows.fetcher.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of `ExactTrainer`'s micro-batches per epoch on each rank (the same on
        all ranks), from which Trainer computes the number of steps.
        """
        return self.windows.num_micro_batches

    def __iter__(self) -> Iterator[list[MicroBatchKey]]:
        """Yield the key of each of `ExactTrainer`'s micro-batches of the epoch in a list of its
        own, window by window: (request of the window, index of the micro-batch in it).
        """
        for request in self.windows.requests():
            for index in range(request.max_micro_batches):
                yield [(request, index)]


class WindowedDataLoader(DataLoader):
    """A torch DataLoader that yields the micro-batches of windows, with the worker settings of
    Trainer's own loader.

    Args:
        windows: The loader of the windows, which determines the order and the micro-batches.
        like: Trainer's own training DataLoader, whose worker settings are used.
    """

    def __init__(self, windows: WindowLoader, like: DataLoader) -> None:
        """Make `ExactTrainer`'s DataLoader of micro-batches, with the worker settings of `like`,
        which is Trainer's own loader.
        """
        super().__init__(
            MicroBatches(windows.fetcher),
            batch_sampler=WindowSampler(windows),
            collate_fn=_unwrap_single,
            num_workers=like.num_workers,
            pin_memory=like.pin_memory,
            persistent_workers=like.persistent_workers,
            multiprocessing_context=like.multiprocessing_context,
            prefetch_factor=like.prefetch_factor,
            generator=Generator(),  # leaves the global generator unchanged
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (0-based) of `ExactTrainer`'s windows; Trainer calls this at the beginning
        of each epoch.
        """
        self.batch_sampler.set_epoch(epoch)


def _unwrap_single(batches: list[WindowBatch]) -> WindowBatch:
    """Collate function for `ExactTrainer`'s DataLoader, whose items are collated micro-batches
    already: return the only one of the list.
    """
    return batches[0]
