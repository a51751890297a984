"""The prepared loader: yields the micro-batches of windows while a model is in training mode."""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.data_loader import skip_first_batches as skip_batches_of
from torch.utils.data import DataLoader, IterableDataset

from hf_ga.accelerator.named_entries import DictCollator
from hf_ga.accelerator.windows_of_loader import is_shuffling, make_windows
from hf_ga.errors import ConfigError
from hf_ga.loading.base_loader import BaseLoader
from hf_ga.loading.streams.stream_loader import StreamLoader
from hf_ga.loading.window_loader import WindowLoader


class Epochs:
    """Counts the epochs that each dataset was trained on.

    The count belongs to the dataset, not to a loader, because a loop may make a new loader of the
    same dataset for each epoch.
    """

    def __init__(self) -> None:
        """Start without any dataset that the loops of this accelerator were trained on."""
        # id of a dataset -> the epoch of it that began last
        self._last_begun: dict[int, int] = {}

    def next(self, dataset: Any) -> int:
        """Return the epoch (0-based) with which a new prepared loader of a dataset begins: the one
        after the epoch that began last; 0 for a dataset that was not trained on yet.
        """
        return self._last_begun.get(id(dataset), -1) + 1

    def begin(self, dataset: Any, epoch: int) -> None:
        """Record that a user's loop begins to train on an epoch (0-based) of a dataset."""
        self._last_begun[id(dataset)] = epoch


class WindowedDataLoader:
    """Mixin for the class of a DataLoader that Accelerate prepared: yields windows in training.

    Iterating yields this rank's micro-batches, window by window, while a model of the accelerator
    is in training mode; otherwise Accelerate's own batches, as for an evaluation.

    Attributes:
        accelerator: The `hf_ga.Accelerator` that prepared the loader.
        original: The DataLoader as the user made it.
        seed: The seed of the order of samples.
        restored_position: The position from a checkpoint at which the next epoch continues; None
            once it is used, or without a checkpoint.
        num_to_skip: How many batches the next epoch skips, from `skip_first_batches`.
        has_yielded_windows: Whether the loader has yielded windows, or continues after a
            checkpoint.
        is_yielding_windows: Whether a training loop is iterating over windows now.
    """

    accelerator: Any
    original: DataLoader

    def init_windows(self, accelerator: Any, original: DataLoader, seed: int) -> None:
        """Set the attributes of this mixin on a loader that Accelerate has prepared; the object's
        `__init__` was that of Accelerate's class.

        Args:
            accelerator: The `hf_ga.Accelerator` that prepared the loader.
            original: The DataLoader as the user made it.
            seed: The seed of the order of samples.
        """
        self.accelerator = accelerator
        self.original = original
        self.seed = seed
        self.restored_position: dict[str, Any] | None = None
        self.num_to_skip = 0
        self.has_yielded_windows = False
        self.is_yielding_windows = False
        self._windows: WindowLoader | StreamLoader | None = None  # made lazily
        self._num_steps_of_windows = 0  # the accumulation steps that `_windows` was made for
        self._was_interrupted = False  # the loop left the last epoch by `break`
        self._is_yielding_own_batches = False  # it is yielding Accelerate's batches
        self._collate = DictCollator(original.collate_fn)
        self._example: Any = None  # a batch of one sample, in the user's type

    @property
    def windows(self) -> WindowLoader | StreamLoader:
        """The loader that groups the samples of this prepared DataLoader into windows, the samples
        of one optimizer step each.

        It is built on first use, and again after the accelerator's gradient accumulation steps were
        changed.
        """
        num_steps = self.accelerator.gradient_accumulation_steps
        if self._windows is None or self._num_steps_of_windows != num_steps:
            self.build_windows()
        return self._windows

    def build_windows(self) -> None:
        """Build the loader of this prepared DataLoader's windows for the accelerator's gradient
        accumulation steps; with a `global_batch_size`, also set these steps.

        The new loader begins at the start of the dataset's next epoch. If it replaces a loader, it
        begins at the start of that one's epoch, or of the epoch after it if some windows of that
        epoch were already trained on.
        """
        previous = self._windows
        self._windows = make_windows(
            self.accelerator,
            prepared=self,
            original=self.original,
            collate=self._collate,
            seed=self.seed,
        )
        self._num_steps_of_windows = self.accelerator.gradient_accumulation_steps
        epoch = self.accelerator.epochs.next(self.original.dataset)
        if previous is not None:
            has_begun = previous.num_consumed > 0
            epoch = previous.epoch + 1 if has_begun else previous.epoch
        self._windows.set_epoch(epoch)

    def __len__(self) -> int:
        """Return how many batches this loader yields per epoch: this rank's micro-batches
        in training (the same number on all ranks), otherwise Accelerate's batches.
        """
        if not self._is_for_training():
            return super().__len__()
        return self.windows.num_micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of windows if a prepared model is in training mode, otherwise
        Accelerate's own batches, of which those that `skip_first_batches` asked for are skipped.
        """
        training_loop = self.accelerator.training_loop
        if training_loop.training_models():
            # Loading draws random numbers of its own, also within another loader's iteration.
            yield from _with_each_step_in(training_loop.suspended, self._micro_batches())
            return
        num_to_skip = self._pop_num_to_skip()
        self._is_yielding_own_batches = True
        try:
            with training_loop.evaluation():
                if num_to_skip:
                    yield from skip_batches_of(self, num_to_skip)
                else:
                    yield from super().__iter__()
        finally:
            self._is_yielding_own_batches = False

    def set_epoch(self, epoch: int) -> None:
        """Begin the given epoch (0-based) of this prepared loader, and of its windows if it is for
        training.

        A position restored from a checkpoint wins: it is in this epoch, or at the end of the one
        before.
        """
        super().set_epoch(epoch)
        if self._is_yielding_own_batches or not self._is_for_training():
            return
        if self.restored_position is not None:
            return
        self._was_interrupted = False
        self.windows.set_epoch(epoch)

    def position_state(self) -> dict[str, Any]:
        """Return this loader's position in the epoch, for a checkpoint of `save_state`: a position
        that was restored and is not used yet, or else the current one.
        """
        return self.restored_position or self.windows.state_dict()

    def restore_position(self, position: dict[str, Any]) -> None:
        """Continue at a position from `load_state` when the user's loop next iterates over this
        loader.
        """
        self.restored_position = position
        self.has_yielded_windows = True

    def changed_settings(self, position: dict[str, Any]) -> str:
        """Return how this loader's samples and windows differ from those of a saved position, apart
        from the seed, which is taken from it: "window_size 16 -> 24"; "" if they do not.
        """
        with_own_seed = {**position, "seed": self.windows.seed}
        return ", ".join(self.windows.changed_settings(with_own_seed))

    @property
    def shuffles(self) -> bool:
        """Whether the DataLoader that the user made visits every sample once per epoch in a random
        order.
        """
        return is_shuffling(self.original.sampler)

    def _is_for_training(self) -> bool:
        """Return whether `len` and `set_epoch` are about windows: if the loader has yielded them,
        if it shuffles, or if a model is in training mode; never of a stream, which has no length.
        """
        if isinstance(self.original.dataset, IterableDataset):
            return False
        if self.has_yielded_windows or self.shuffles:
            return True
        return bool(self.accelerator.training_loop.training_models())

    def _micro_batches(self) -> Generator[Any, None, None]:
        """Yield this rank's micro-batches of the rest of the epoch, on the device and in the user's
        type, and keep Accelerate's `end_of_dataloader` and `iteration` up to date.
        """
        accelerator = self.accelerator
        training_loop = accelerator.training_loop
        windows = self.windows
        self._go_to_first_window(windows)
        if self._example is None:
            self._example = self._collate.example(self.original.dataset)
        num_steps = accelerator.gradient_accumulation_steps
        last_window_index = len(windows) - 1 if hasattr(windows, "__len__") else None
        accelerator.epochs.begin(self.original.dataset, windows.epoch)
        self._was_interrupted = True  # until the epoch is complete
        self.has_yielded_windows = True
        self.is_yielding_windows = True
        self.begin()  # Accelerate: this is the active loader
        try:
            following = iter(windows)
            for window in following:
                self._check_accumulation_steps(num_steps)
                for batch, is_last in training_loop.micro_batches(self, window, following):
                    # Of the window, or of those that a loop by hand has taken together.
                    index = windows.num_consumed - 1
                    self.end_of_dataloader = is_last and index == last_window_index
                    yield DictCollator.restore(batch, self._example)
            self._was_interrupted = False
        finally:  # also if the loop left by `break` or by an exception
            self.is_yielding_windows = False
            training_loop.leave(self)
            self.end()
        self.iteration += 1

    def _check_accumulation_steps(self, num_steps: int) -> None:
        """Check that the loop did not change the accelerator's `gradient_accumulation_steps` within
        an epoch, which began with `num_steps`.
        """
        if self.accelerator.gradient_accumulation_steps != num_steps:
            raise ConfigError(
                f"gradient_accumulation_steps was changed from {num_steps} to "
                f"{self.accelerator.gradient_accumulation_steps} within an epoch, and the size "
                "of the window with it: change it between two epochs."
            )

    def _go_to_first_window(self, windows: WindowLoader | StreamLoader) -> None:
        """Go to the first window: of a restored position; else after `skip_first_batches`, in the
        next epoch if the loop left the last one by `break`. Both are used up.
        """
        position = self.restored_position
        self.restored_position = None
        num_to_skip = self._pop_num_to_skip()
        if position is not None:
            _continue_at(windows, position)
            return
        if self._was_interrupted:
            windows.set_epoch(windows.epoch + 1)
        if num_to_skip:
            num_steps = windows.layout.accumulation_steps
            if num_to_skip % num_steps:
                raise ConfigError(
                    f"skip_first_batches({num_to_skip}) ends within a window of {num_steps} "
                    "micro-batches: skip whole windows, or restore the position with load_state."
                )
            windows.num_consumed = num_to_skip // num_steps

    def _pop_num_to_skip(self) -> int:
        """Return how many batches of this loader `accelerator.skip_first_batches` asked to skip,
        and reset the number to 0, as they are skipped in one epoch only.
        """
        num_to_skip = self.num_to_skip
        self.num_to_skip = 0
        return num_to_skip


def _with_each_step_in(
    context: Callable[[], AbstractContextManager[None]], generator: Generator[Any, None, None]
) -> Iterator[Any]:
    """Yield what a generator yields, and run its own code in a context, but not its caller's."""
    try:
        while True:
            with context():
                try:
                    value = next(generator)
                except StopIteration:
                    return
            yield value
    finally:
        generator.close()


def _continue_at(windows: BaseLoader, position: dict[str, Any]) -> None:
    """Move a loader to a saved position, or from the end of an epoch to the next one. Micro-batch
    size and number of processes may differ, as positions count windows.
    """
    windows.use_seed(position["seed"])
    windows.load_state_dict(position)
    if hasattr(windows, "__len__") and windows.num_consumed >= len(windows):
        next_epoch = windows.epoch + 1
        windows.set_epoch(next_epoch)


def loader_seed(loader: DataLoader) -> int:
    """Return the seed for the order of samples of a DataLoader that is passed to
    `accelerator.prepare`.

    It is the initial seed of the loader's or its sampler's generator, or else torch's global seed,
    reduced to 31 bits.
    """
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    return seed % (1 << 31)


def make_windowed(accelerator: Any, original: DataLoader, prepared: Any, seed: int) -> Any:
    """Change a DataLoader that Accelerate prepared in place, so that it yields windows while a
    model is in training mode.

    Its class is replaced by a new one that inherits from `WindowedDataLoader` and Accelerate's
    class.

    Args:
        accelerator: The `hf_ga.Accelerator` that prepared the loader.
        original: The DataLoader as the user made it.
        prepared: The DataLoader that Accelerate made of it.
        seed: The seed of the order of samples.

    Returns:
        `prepared`.
    """
    loader_class = type(prepared)
    windowed_class = type(loader_class.__name__, (WindowedDataLoader, loader_class), {})
    # Accelerate's loaders have a property `__class__`, which pretends to be torch's, so an
    # assignment to prepared.__class__ would not change the class.
    vars(object)["__class__"].__set__(prepared, windowed_class)
    prepared.init_windows(accelerator, original, seed)
    return prepared
