"""The prepared loader: micro-batches of windows while a model is in training mode."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import skip_first_batches as skip_batches_of
from torch.utils.data import DataLoader, IterableDataset

from hf_ga.accelerator.named_entries import NamedEntries
from hf_ga.accelerator.windows_of_loader import is_shuffle, make_windows
from hf_ga.errors import ConfigError
from hf_ga.exact.base_loader import BaseLoader
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.window_loader import WindowLoader


class Epochs:
    """How often datasets were trained on: a loop may make its loader anew for each epoch."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # id of a dataset -> the epoch that was begun last

    def next(self, dataset: Any) -> int:
        """Return the epoch that a new loader of a dataset begins with."""
        return self._last.get(id(dataset), -1) + 1

    def begin(self, dataset: Any, epoch: int) -> None:
        """Called when an epoch of a dataset begins."""
        self._last[id(dataset)] = epoch


class WindowedDataLoader:
    """Mixed into the class of a loader that Accelerate prepared.

    Iterating gives this rank's micro-batches, window by window, while the model that the
    accelerator trains is in training mode; otherwise Accelerate's own batches.

    Attributes:
        owner: The `hf_ga.Accelerator`.
        given: The DataLoader as the user made it.
        position: From a checkpoint, not used yet.
        num_to_skip: Batches, from `skip_first_batches`.
        has_begun: Whether it has handed out windows.
        in_windows: Whether it is handing out windows now.
    """

    owner: Any
    given: DataLoader

    def begin_windows(self, owner: Any, given: DataLoader, seed: int) -> None:
        """Set the attributes. Called once, in place of `__init__`.

        Args:
            owner: The `hf_ga.Accelerator`.
            given: The DataLoader as the user made it.
            seed: Of the order.
        """
        self.owner = owner
        self.given = given
        self.seed = seed
        self.position: dict[str, Any] | None = None
        self.num_to_skip = 0
        self.has_begun = False
        self.in_windows = False
        self._windows: WindowLoader | StreamLoader | None = None  # made when they are needed
        self._num_steps = 0  # gradient accumulation steps for which they were made
        self._was_left = False  # the loop left the epoch by `break`
        self._gives_own_batches = False  # it is handing out Accelerate's own batches
        self._collate = NamedEntries(given.collate_fn)
        self._kind: type | None = None  # of what the user's collate function returns

    @property
    def windows(self) -> WindowLoader | StreamLoader:
        """The windows of the training samples, made for the accelerator's accumulation steps."""
        num_steps = self.owner.gradient_accumulation_steps
        if self._windows is None or self._num_steps != num_steps:
            earlier = self._windows
            self._windows = make_windows(self.owner, self, self.given, self._collate, self.seed)
            self._num_steps = self.owner.gradient_accumulation_steps  # making them may set it
            epoch = self.owner.epochs.next(self.given.dataset)
            if earlier is not None:
                has_begun = earlier.num_consumed > 0
                epoch = earlier.epoch + 1 if has_begun else earlier.epoch
            self._windows.set_epoch(epoch)
        return self._windows

    def __len__(self) -> int:
        """Count the micro-batches of this rank in an epoch, as many on all ranks."""
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
        model = self.owner.training_loop.training_model()
        if model is not None:
            yield from self._micro_batches(model)
            return
        num_to_skip = self._take_num_to_skip()
        self._gives_own_batches = True
        self.owner.training_loop.order.begin_other_batches()
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
        """Return the position, as `save_state` keeps it."""
        return self.position or self.windows.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a position when the loader is iterated next."""
        self.position = state
        self.has_begun = True

    @property
    def shuffles(self) -> bool:
        """Whether the user's loader visits every sample once in a random order."""
        return is_shuffle(self.given.sampler)

    def _is_for_training(self) -> bool:
        """Whether the length is that of windows: a model trains, or the loader shuffles, as loaders
        for training do.
        """
        if isinstance(self.given.dataset, IterableDataset):
            return False
        if self.has_begun or self.shuffles:
            return True
        return self.owner.training_loop.training_model() is not None

    def _micro_batches(self, model: torch.nn.Module) -> Iterator[Any]:
        """Yield this rank's micro-batches of the rest of the epoch."""
        owner = self.owner
        windows = self.windows
        self._begin_at_the_right_window(windows)
        if self._kind is None:
            self._kind = self._collate.find_type(self.given.dataset)
        has_names = issubclass(self._kind, Mapping)
        num_steps = owner.gradient_accumulation_steps
        last_index = len(windows) - 1 if hasattr(windows, "__len__") else None
        owner.epochs.begin(self.given.dataset, windows.epoch)
        self._was_left = True
        self.has_begun = True
        self.in_windows = True
        self.begin()
        try:
            for window in windows:
                self._check_steps(num_steps)
                batches = owner.training_loop.micro_batches(model, window, has_names=has_names)
                for batch, is_last in batches:
                    self.end_of_dataloader = is_last and window.index == last_index
                    yield NamedEntries.restore(batch, self._kind)
            self._was_left = False
        finally:  # also where the loop was left, or raised an error
            self.in_windows = False
            owner.training_loop.leave_micro_batch()
            self.end()
        self.iteration += 1

    def _check_steps(self, num_steps: int) -> None:
        """Check that the accumulation steps are those at the beginning of the epoch.

        Raises:
            ConfigError: If not.
        """
        if self.owner.gradient_accumulation_steps != num_steps:
            raise ConfigError(
                f"gradient_accumulation_steps was changed from {num_steps} to "
                f"{self.owner.gradient_accumulation_steps} within an epoch, and the size "
                "of the window with it: change it between two epochs."
            )

    def _begin_at_the_right_window(self, windows: WindowLoader | StreamLoader) -> None:
        """After a restored position, after skipped batches, or in the next epoch if the last one
        was left by `break`.
        """
        position = self.position
        self.position = None
        num_to_skip = self._take_num_to_skip()
        if position is not None:
            _continue_at(windows, position)
            return
        if self._was_left:
            windows.set_epoch(windows.epoch + 1)
        if num_to_skip:
            num_steps = windows.layout.accumulation_steps
            if num_to_skip % num_steps:
                raise ConfigError(
                    f"skip_first_batches({num_to_skip}) ends within a window of {num_steps} "
                    "micro-batches: skip whole windows, or restore the position with load_state."
                )
            windows.num_consumed = num_to_skip // num_steps

    def _take_num_to_skip(self) -> int:
        """Return how many batches to skip, and reset it: they are skipped once."""
        num_to_skip = self.num_to_skip
        self.num_to_skip = 0
        return num_to_skip


def _continue_at(windows: BaseLoader, position: dict[str, Any]) -> None:
    """Continue at a saved position, which any layout of the same windows shares."""
    windows.use_seed(position["seed"])
    windows.load_state_dict(position)
    if hasattr(windows, "__len__") and windows.num_consumed >= len(windows):
        next_epoch = windows.epoch + 1
        windows.set_epoch(next_epoch)


def seed_of(loader: DataLoader) -> int:
    """Return the seed of a loader before it is prepared: that of its generator, or torch's own."""
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
