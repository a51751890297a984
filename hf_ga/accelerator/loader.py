"""The prepared loader: micro-batches of windows while a model is in training mode."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher, SeedableRandomSampler
from accelerate.data_loader import skip_first_batches as skip_batches_of
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hf_ga.errors import ConfigError
from hf_ga.exact.fetch import Collate
from hf_ga.exact.generators import preserved_random_states, seed_generators
from hf_ga.exact.hashing import Stream, make_key
from hf_ga.exact.lengths import find_lengths
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.window_loader import WindowLoader


class NamedEntries:
    """A collate function that returns a dict, whatever the user's returns.

    A tuple or list becomes {"0": ..., "1": ...}, a single tensor {"0": ...}; `restore` gives the
    user's own type back.

    Args:
        collate_fn: The user's.
    """

    def __init__(self, collate_fn: Collate) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        collated = self.collate_fn(samples)
        if isinstance(collated, Mapping):
            return dict(collated)
        entries = collated if isinstance(collated, tuple | list) else (collated,)
        return {str(i): entry for i, entry in enumerate(entries)}

    def find_type(self, dataset: Any) -> type:
        """The type that the user's function returns, found on one sample."""
        with preserved_random_states():
            seed_generators(0)
            is_stream = isinstance(dataset, IterableDataset)
            sample = next(iter(dataset)) if is_stream else dataset[0]
            return type(self.collate_fn([copy.copy(sample)]))

    @staticmethod
    def restore(batch: dict[str, Any], kind: type) -> Any:
        """A batch in the type of the user's collate function."""
        batch = dict(batch)  # a loop may take entries out
        if kind is dict:
            return batch
        if issubclass(kind, Mapping):
            return kind(batch)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return kind(*batch.values())
        if issubclass(kind, tuple | list):
            return kind(batch.values())
        return batch["0"]


class OrderedWindowLoader(WindowLoader):
    """A `WindowLoader` in the order of a torch sampler.

    Args:
        sampler: Yields sample ids, or lists of them. It may draw from the global generators or
            from a torch generator of its own: both are seeded from (seed, epoch).
        share: Gives the main process's value to all ranks.
        Others: See `WindowLoader`.

    Raises:
        ConfigError: If the sampler gives another order when it is asked again.
    """

    def __init__(
        self, *args: Any, sampler: Any, share: Callable[[Any], Any], **kwargs: Any
    ) -> None:
        self.sampler = sampler
        self.share = share
        self._known: tuple[int, np.ndarray] | None = None
        super().__init__(*args, **kwargs)
        self.num_samples = len(self._ids(self.epoch))

    def order(self, epoch: int) -> np.ndarray:
        ids = self._ids(epoch)
        if len(ids) != self.num_samples:
            raise ConfigError(
                f"the sampler gave {self.num_samples} samples in one epoch and {len(ids)} in "
                f"epoch {epoch}: every epoch must have as many."
            )
        return ids

    def _ids(self, epoch: int) -> np.ndarray:
        if self._known is None or self._known[0] != epoch:
            ids = self._draw(epoch)
            if self._known is None and not np.array_equal(ids, self._draw(epoch)):
                raise ConfigError(
                    f"the sampler {type(self.sampler).__name__} draws from a generator of its own, "
                    "so a resumed run would visit other samples: let it draw from torch's, numpy's "
                    "or Python's global generator, or from its attribute `generator`."
                )
            self._known = epoch, self.share(ids)
        return self._known[1]

    def _draw(self, epoch: int) -> np.ndarray:
        """What the sampler yields in an epoch: a function of (seed, epoch)."""
        key = make_key(Stream.ORDER, self.seed, epoch)
        with preserved_random_states():
            seed_generators(key)
            for part in (self.sampler, getattr(self.sampler, "sampler", None)):
                if getattr(part, "generator", None) is not None:
                    part.generator.manual_seed(key & ((1 << 63) - 1))
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            ids = list(self.sampler)
        if ids and isinstance(ids[0], list | tuple | torch.Tensor):
            ids = list(chain.from_iterable(ids))
        return np.array([int(i) for i in ids], np.int64)


class WindowedDataLoader:
    """Mixed into the class of a loader that Accelerate prepared.

    Iterating gives this rank's micro-batches, window by window, while the model that the
    accelerator trains is in training mode; otherwise Accelerate's own batches.

    Attributes:
        owner: The `hf_ga.Accelerator`.
        given: The DataLoader as the user made it.
    """

    owner: Any
    given: DataLoader

    def begin_windows(self, owner: Any, given: DataLoader, seed: int) -> None:
        """Called once, in place of `__init__`."""
        self.owner = owner
        self.seed = seed
        self.given = given
        self.position: dict[str, Any] | None = None  # from a checkpoint, not used yet
        self.num_to_skip = 0  # batches, from `skip_first_batches`
        self._windows: WindowLoader | StreamLoader | None = None
        self._num_steps = 0
        self._was_left = False
        self.has_begun = False
        self.in_windows = False
        self._gives_own_batches = False  # Accelerate's
        self._collate = NamedEntries(given.collate_fn)
        self._kind: type | None = None

    @property
    def windows(self) -> WindowLoader | StreamLoader:
        """The windows of the training samples, made for the accelerator's accumulation steps."""
        num_steps = self.owner.gradient_accumulation_steps
        if self._windows is None or self._num_steps != num_steps:
            earlier = self._windows
            self._windows = self._make_windows()
            self._windows.set_epoch(self.owner.first_epoch(self.given.dataset))
            self._num_steps = self.owner.gradient_accumulation_steps
            if earlier is not None:
                self._windows.set_epoch(earlier.epoch + (earlier.num_consumed > 0))
        return self._windows

    def __len__(self) -> int:
        """Micro-batches of this rank in an epoch, as many on all ranks."""
        if not self._is_for_training():
            return super().__len__()
        windows = self.windows
        layout = windows.layout
        num_full, rest = divmod(windows.num_samples, layout.window_size)
        num_last = 0
        if rest and not windows.drop_last_window:
            num_last = -(-rest // (layout.micro_batch_size * layout.num_processes))
        return num_full * layout.accumulation_steps + num_last

    def __iter__(self) -> Iterator[Any]:
        model = self.owner.training_model()
        if model is not None:
            yield from self._micro_batches(model)
            return
        num_to_skip, self.num_to_skip = self.num_to_skip, 0
        self._gives_own_batches = True
        self.owner.begin_other_batches()
        try:
            if num_to_skip:
                yield from skip_batches_of(self, num_to_skip)
            else:
                yield from super().__iter__()
        finally:
            self._gives_own_batches = False

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch (0-based), unless a restored position lies in it."""
        super().set_epoch(epoch)
        if self._gives_own_batches or not self._is_for_training():
            return
        if self.position is not None:
            return  # it is in this epoch, or at the end of the one before
        self._was_left = False
        self.windows.set_epoch(epoch)

    def state(self) -> dict[str, Any]:
        """The position, as `save_state` keeps it."""
        return self.position or self.windows.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position when the loader is iterated next."""
        self.position = state
        self.has_begun = True

    @property
    def shuffles(self) -> bool:
        """Whether the user's loader visits every sample once in a random order."""
        return _is_shuffle(self.given.sampler)

    def _is_for_training(self) -> bool:
        """Whether the length is that of windows: a model trains, or the loader shuffles, as loaders
        for training do.
        """
        if isinstance(self.given.dataset, IterableDataset):
            return False
        if self.has_begun or self.shuffles:
            return True
        return self.owner.training_model() is not None

    def _make_windows(self) -> WindowLoader | StreamLoader:
        owner = self.owner
        given = self.given
        dataset = given.dataset
        is_stream = isinstance(dataset, IterableDataset)
        if isinstance(self, DataLoaderDispatcher) and not is_stream:
            raise ConfigError(
                "dispatch_batches=True reads the data on the main process only, but every process "
                "reads its own part of a window: leave dispatch_batches out."
            )
        batch_sampler = given if is_stream else given.batch_sampler
        size = getattr(batch_sampler, "batch_size", None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"the {type(batch_sampler).__name__} has no batch_size, from which the window of "
                "an optimizer step follows: give the batch_sampler this attribute, or pass "
                "batch_size to the DataLoader."
            )
        if isinstance(given.sampler, DistributedSampler):
            raise ConfigError(
                "a DistributedSampler shows each process a part of the samples only, but windows "
                "are made of all of them: leave it out, Accelerate (and hf_ga) distribute them."
            )
        num_processes = owner.num_processes
        window_size = size * num_processes * owner.gradient_accumulation_steps
        if owner.split_batches:  # the DataLoader's batch is that of all processes
            window_size = size * owner.gradient_accumulation_steps
            size = -(-size // num_processes)
        if owner.global_batch_size is not None:
            window_size = owner.global_batch_size
        settings = {
            "accelerator": owner,
            "per_device_batch_size": size,
            "global_batch_size": window_size,
            "seed": owner.same_on_all_ranks(self.seed),
            "planner": partial(plan_by_sizes, sizes=[size]),  # as many as Accelerate's
            "drop_last_window": bool(getattr(batch_sampler, "drop_last", False)),
            "num_workers": given.num_workers,
        }
        if is_stream:
            settings["num_workers"] = min(1, given.num_workers)  # a stream is read in order
            return StreamLoader(dataset, self._collate, shuffle_buffer_size=0, **settings)
        settings["lengths"] = find_lengths(dataset, self._collate) if len(dataset) else None
        sampler = given.sampler
        is_plain = type(batch_sampler) is BatchSampler
        if is_plain and _is_shuffle(sampler):
            windows = WindowLoader(dataset, self._collate, **settings)
        elif is_plain and type(sampler) is SequentialSampler:
            windows = WindowLoader(dataset, self._collate, shuffle=False, **settings)
        else:
            ordered = sampler if is_plain else batch_sampler
            windows = OrderedWindowLoader(
                dataset, self._collate, sampler=ordered, share=owner.same_on_all_ranks, **settings
            )
        if owner.global_batch_size is not None:
            owner.set_accumulation_steps(windows.layout)
        return windows

    def _micro_batches(self, model: torch.nn.Module) -> Iterator[Any]:
        """This rank's micro-batches of the rest of the epoch."""
        windows = self.windows
        self._begin_at_the_right_window(windows)
        if self._kind is None:
            self._kind = self._collate.find_type(self.given.dataset)
        num_steps = self.owner.gradient_accumulation_steps
        num_windows = len(windows) if hasattr(windows, "__len__") else None
        self.owner.note_epoch(self.given.dataset, windows.epoch)
        self._was_left = True
        self.has_begun = True
        self.in_windows = True
        self.begin()
        try:
            for window in windows:
                if self.owner.gradient_accumulation_steps != num_steps:
                    raise ConfigError(
                        f"gradient_accumulation_steps was changed from {num_steps} to "
                        f"{self.owner.gradient_accumulation_steps} within an epoch, and the size "
                        "of the window with it: change it between two epochs."
                    )
                is_last_window = num_windows is not None and window.index == num_windows - 1
                has_names = issubclass(self._kind, Mapping)
                for batch, is_last in self.owner.begin_window(model, window, has_names=has_names):
                    self.end_of_dataloader = is_last_window and is_last
                    yield NamedEntries.restore(batch, self._kind)
            self._was_left = False
        finally:  # also where the loop was left, or raised an error
            self.in_windows = False
            self.owner.leave_micro_batch()
            self.end()
        self.iteration += 1

    def _begin_at_the_right_window(self, windows: WindowLoader | StreamLoader) -> None:
        """After a restored position, after skipped batches, or in the next epoch if the last one
        was left by `break`.
        """
        position, self.position = self.position, None
        if position is not None:
            self.owner.load_position(windows, position)
            self.num_to_skip = 0
        elif self._was_left:
            windows.set_epoch(windows.epoch + 1)
        num_to_skip, self.num_to_skip = self.num_to_skip, 0
        if num_to_skip:
            num_steps = windows.layout.accumulation_steps
            if num_to_skip % num_steps:
                raise ConfigError(
                    f"skip_first_batches({num_to_skip}) ends within a window of {num_steps} "
                    "micro-batches: skip whole windows, or restore the position with load_state."
                )
            windows.num_consumed = num_to_skip // num_steps


def seed_of(loader: DataLoader) -> int:
    """The seed of a loader that is not prepared yet: that of its generator, or torch's own."""
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return seed % (1 << 31)


def windowed(owner: Any, given: DataLoader, prepared: Any, seed: int) -> Any:
    """Let a prepared loader hand out windows while its model trains.

    Its class becomes one that inherits from Accelerate's, as Accelerate itself does with torch's.
    """
    kind = type(prepared)
    mixed = type(kind.__name__, (WindowedDataLoader, kind), {})
    # Accelerate's loaders have a property `__class__`, which pretends to be torch's.
    vars(object)["__class__"].__set__(prepared, mixed)
    prepared.begin_windows(owner, given, seed)
    return prepared


def _is_shuffle(sampler: Any) -> bool:
    """Whether a sampler visits every sample once in a random order."""
    if type(sampler) not in (RandomSampler, SeedableRandomSampler):
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
