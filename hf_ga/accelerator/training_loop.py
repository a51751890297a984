"""Keeps the books of a user's own training loop: which micro-batch it works on, what it passed to
`backward`, and when the window's gradient is complete.

A loop accumulates in one of two ways:

- planned: with `gradient_accumulation_steps`, or in `with accelerator.accumulate(model):`. The
  loader knows the window. `.grad` appears with its last backward.
- by hand: the loop divides its loss by k and steps its optimizer after every k-th backward. `.grad`
  is at any time the gradient of the mean loss so far, and the window ends where it steps.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ga.accelerator.by_hand import ByHand
from hf_ga.accelerator.misuse import (
    check_no_earlier_gradients,
    check_no_foreign_gradients,
    check_undivided,
    early_step,
    not_fetched,
    unexpected_backward,
)
from hf_ga.accelerator.slots import Slot, plan_slots
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.divisors import Reading
from hf_ga.engine.gradient import WindowGradient
from hf_ga.engine.rehearsal import OutputRecorder, Rehearsal, footprints_of, is_rehearsed
from hf_ga.errors import ConfigError, HfGaError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.forward import snapshot_buffers, unwrapped
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.loss import Loss
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import backend_for

logger = get_logger(__name__)


class TrainingLoop:
    """The state of a user's loop, which fetches batches and calls `accelerator.backward`.

    Args:
        accelerator: The accelerator of the loop.
        allow_split_dependent_randomness: Whether draws that cannot be tied to samples are accepted.

    Attributes:
        gradient: The sums of the current window. None before the first one.
        slot: The current iteration. None between iterations.
        num_windows: Number of windows that were begun in the run.
        is_inside: Whether the loop is inside of `accelerator.accumulate`.
        is_complete: Whether all backwards of the current window were run.
        loss: Mean loss of the last complete window, a scalar. None before there is one.
    """

    def __init__(
        self, accelerator: accelerate.Accelerator, *, allow_split_dependent_randomness: bool
    ) -> None:
        """Start before the first window of a user's loop, with no prepared model."""
        self.accelerator = accelerator
        self.allows_any_randomness = allow_split_dependent_randomness
        self.gradient: WindowGradient | None = None
        self.slot: Slot | None = None
        self.num_windows = 0
        self.is_inside = False
        self.is_complete = True
        self.loss: Tensor | None = None
        self.by_hand = ByHand()
        self._draws = KeyedDraws(allow_unkeyed=allow_split_dependent_randomness)
        self._recorder = OutputRecorder()
        self._rehearsal: Rehearsal | None = None  # of the current window
        self._prepared_models: dict[nn.Module, nn.Module] = {}  # unwrapped -> prepared
        self._window: Window | None = None
        self._leader: Any = None  # the loader whose windows are computed
        self._index = 0  # of the iteration in the window
        self._num_slots = 1
        self._attempt = 0  # how often the window was begun again
        self._num_backwards = 0  # in this iteration
        self._backwards_per_iteration: int | None = None  # of complete iterations
        self._contexts = ExitStack()  # of the current iteration
        self._window_contexts = ExitStack()
        self._random_states: dict[str, bytes] = {}
        self._learning_rates: list[float] = []
        self._has_stepped = False  # an optimizer, in this window

    # Models

    def add_model(self, prepared: nn.Module) -> None:
        """Register a model that `accelerator.prepare` returns."""
        self._prepared_models[unwrapped(prepared)] = prepared

    def training_models(self) -> list[nn.Module]:
        """Return the prepared models that are in training mode and have trainable parameters."""
        models = dict.fromkeys(unwrapped(model) for model in self.accelerator._models)
        return [
            self._prepared_models.get(model, model)
            for model in models
            if model.training and is_trainable(model)
        ]

    def _trained_parameters(self, models: Sequence[nn.Module]) -> list[nn.Parameter]:
        """Return the parameters that the loop trains: of the models, then others of optimizers."""
        parameters = [p for model in models for p in model.parameters()]
        for optimizer in self.accelerator._optimizers:
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
        return [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]

    # Windows

    def micro_batches(self, loader: Any, window: Window) -> Iterator[tuple[Any, bool]]:
        """Hand out the micro-batches of a window to the loop, one for each of its iterations.

        Args:
            loader: The prepared loader that the loop iterates over.
            window: The window.

        Yields:
            (batch on the device, whether it is the last one of the window).

        Raises:
            ConfigError: If the loop fetches a batch before it called `accelerator.backward` for
                the previous one.
        """
        if self._is_follower(loader):
            yield from self._follow(window)
            return
        self._leader = loader
        self._attempt = 0
        while True:
            slots = self._begin_window(window)
            for index, slot in enumerate(slots):
                self._check_fetch()
                is_last = index == len(slots) - 1
                batch = self._open(slot, index, is_last)
                yield batch, is_last
                self._close()
            if not self._must_begin_again():
                return
            self._attempt += 1

    def _begin_window(self, window: Window) -> list[Slot]:
        """Begin a window, and plan the iterations of the loop in it."""
        self._check_fetch()
        accelerator = self.accelerator
        models = self.training_models()
        self._window_contexts.close()
        if window.state.pad_to_window:
            window = window.padded_to_window()
        self._window = window
        is_planned = self._is_planned
        slots = plan_slots(
            window,
            num_processes=accelerator.num_processes,
            is_rehearsed=is_planned and is_rehearsed(self.num_windows),
        )
        self._num_slots = len(slots)
        has_rehearsal = any(slot.is_rehearsal for slot in slots)
        self._rehearsal = Rehearsal() if has_rehearsal else None
        parameters = self._trained_parameters(models)
        if self.gradient is None or self.gradient.parameters != parameters:
            self.gradient = WindowGradient(backend_for(accelerator), parameters)
        for model in models:
            self.gradient.backend.begin(model, Loss())
            self.gradient.backend.reshard(model)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = False  # the window's end sums the gradients
        if is_planned or self.is_complete:
            self.gradient.begin()
            self._learning_rates = self._current_learning_rates()
        self.is_complete = False
        self._has_stepped = False
        if has_rehearsal:
            recording = self._recorder.recording(
                [unwrapped(model) for model in models],
                with_submodules=not self.gradient.backend.is_sharded,
            )
            self._window_contexts.enter_context(recording)
        if self._attempt == 0:
            self.num_windows += 1
        return slots

    @property
    def _is_planned(self) -> bool:
        """Whether the loop accumulates as planned by the loader, and not by hand."""
        steps = self.accelerator.gradient_accumulation_steps
        return steps > 1 or self.accelerator.global_batch_size is not None or self.is_inside

    def _must_begin_again(self) -> bool:
        """Whether the window that has just ended must be computed once more."""
        gradient = self.gradient
        if not self._is_planned or gradient.must_repeat is None:
            return False
        logger.info(f"hf_ga: the window is computed once more: {gradient.must_repeat}.")
        return True

    # Iterations

    def _open(self, slot: Slot, index: int, is_last: bool) -> Any:
        """Begin an iteration of the loop. Returns its batch on the device."""
        accelerator = self.accelerator
        window = self._window
        self.slot = slot
        self._index = index
        self._num_backwards = 0
        accelerator.step = index + 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        self._contexts = ExitStack()
        if slot.is_rehearsal:
            for model in self.training_models():
                self._contexts.callback(snapshot_buffers(model))
        self._recorder.clear()
        request = window.request
        keys = sample_keys(request.seed, request.epoch, slot.micro_batch.positions)
        key_of_window = window_key(request.seed, request.epoch, request.index)
        batch, keys, key_of_window = send_to_device(
            [slot.micro_batch.batch, keys, key_of_window], accelerator.device, non_blocking=True
        )
        self._draws.begin(keys, key_of_window)
        if not self.allows_any_randomness:
            self._random_states = random_states()
        self._contexts.enter_context(self._draws.scope())
        return batch

    def _close(self) -> None:
        """End an iteration of the loop."""
        contexts = self._contexts
        self._contexts = ExitStack()
        contexts.close()
        if self._num_backwards and self._backwards_per_iteration is None:
            self._backwards_per_iteration = self._num_backwards

    def leave_loader(self, loader: Any) -> None:
        """Give up the current iteration if it is one of this loader, which ends."""
        if loader is self._leader:
            self.leave()

    def leave(self) -> None:
        """Give up the current window, because the loop left it or ended."""
        self.slot = None
        self._close()
        self._window_contexts.close()
        self._leader = None

    def leave_window(self) -> None:
        """Give up the current window of the loop, because `load_state` loads other weights."""
        self.leave()
        self.is_complete = True

    def _check_fetch(self) -> None:
        """Check, before a batch is handed out, that the loop has used the previous one.

        Raises:
            ConfigError: If it did not call `accelerator.backward` for it.
        """
        if self.slot is None or self._num_backwards or not self._is_planned:
            return
        self.leave()
        raise not_fetched()

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which torch's random functions are its own again."""
        return self._draws.suspended()

    # Other loaders beside the one whose windows are computed (zip)

    def _is_follower(self, loader: Any) -> bool:
        """Whether a loader's batches belong to the current iteration of another loader."""
        is_other = self._leader is not None and self._leader is not loader
        return is_other and self.slot is not None and not self._num_backwards

    def _follow(self, window: Window) -> Iterator[tuple[Any, bool]]:
        """Hand out micro-batches of a second loader, split as those of the first one.

        Raises:
            ConfigError: If the windows of the two loaders have different sizes.
        """
        number = self.num_windows
        attempt = -1
        while self.num_windows == number and self._attempt > attempt:
            attempt = self._attempt
            if window.state.pad_to_window or self._window.request.pad_to_window:
                window = window.padded_to_window()
            slots = plan_slots(
                window,
                num_processes=self.accelerator.num_processes,
                is_rehearsed=self._rehearsal is not None,
            )
            for index, slot in enumerate(slots):
                own = len(self.slot.micro_batch)
                if index != self._index or own != len(slot.micro_batch):
                    raise ConfigError(
                        f"two loaders are used together, but give {own} and "
                        f"{len(slot.micro_batch)} samples in one iteration: give both the same "
                        "batch size, drop_last=True, and begin their epochs together."
                    )
                batch = send_to_device(slot.micro_batch.batch, self.accelerator.device)
                yield batch, index == len(slots) - 1

    # Backward

    def backward(
        self, loss: Tensor, num_targets: float | Tensor | None, *, retain_graph: bool
    ) -> None:
        """Add the gradient of a loss to the window, and finish it after its last backward.

        Args:
            loss: See `Accelerator.backward`.
            num_targets: See `Accelerator.backward`.
            retain_graph: See `Tensor.backward`.

        Raises:
            ConfigError: If no micro-batch waits for its backward, or gradients were changed.
            LossNotAdditive: If the loss is not a sum of means.
            UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        """
        if self.slot is None:
            raise unexpected_backward(is_in_evaluation=self._is_in_evaluation())
        self._num_backwards += 1
        with self._failing_together():
            self._check_before_backward(loss)
            self._read_and_add(loss, num_targets, retain_graph)
        if not self._is_planned:
            self._show_mean_so_far()
        elif self._is_last_backward():
            self._finish()
        self._draws.after_backward()

    def _check_before_backward(self, loss: Tensor) -> None:
        """Check what happened since the batch was handed out.

        Raises:
            ConfigError: If gradients appeared, or the optimizer stepped.
            UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LossNotAdditive(
                f"accelerator.backward takes a loss with one element, got {shape}: average it "
                "over what should count equally, for example loss.mean()."
            )
        if not self.allows_any_randomness:
            moved = moved_generators(self._random_states)
            if moved or self._draws.unkeyed_after_backward:
                source = self._draws.unkeyed_after_backward or f"from {' and '.join(moved)}"
                raise UnkeyedRandomness(
                    f"the loop or the model drew random numbers ({source}) that cannot be tied to "
                    "samples, so they depend on the split of the window. Draw with torch's "
                    "functions, one row for each sample, or in the dataset or collate function; or "
                    "accept it with Accelerator(allow_split_dependent_randomness=True)."
                )
        if self._is_planned and not self.is_complete:
            check_no_foreign_gradients(self.gradient.parameters, self.gradient.earlier)
        if self._is_planned and self._has_stepped:
            raise ConfigError(
                "accelerator.backward came after the optimizer's step in the same window, so its "
                "forward used other weights than those of the window's other micro-batches: run "
                "all backwards of a micro-batch before optimizer.step()."
            )

    def _read_and_add(
        self, loss: Tensor, num_targets: float | Tensor | None, retain_graph: bool
    ) -> None:
        """Read the loss, compare its samples with their rehearsal, and add its gradient."""
        gradient = self.gradient
        slot = self.slot
        loss = loss.reshape(()) if loss.dim() else loss
        readings = gradient.read(loss, len(slot.micro_batch), num_targets)
        if self._is_planned:
            steps = self.accelerator.gradient_accumulation_steps
            check_undivided(loss, len(readings), steps)
        else:
            gradient.begin_again_if_zeroed()
            self.by_hand.note_backward(loss, len(readings))
        prefix = self._num_backwards
        readings = [replace(reading, key=(prefix, reading.key)) for reading in readings]
        if self._rehearsal is not None and not slot.is_filler:
            self._compare(loss, readings)
        if slot.is_rehearsal:
            gradient.note_rehearsal(readings)
        elif slot.is_counted:
            gradient.add(loss, readings, retain_graph=retain_graph, sync=self._sync)
        else:
            gradient.add_nothing(loss, readings, sync=self._sync)

    def _compare(self, loss: Tensor, readings: Sequence[Reading]) -> None:
        """Record the samples of a rehearsal, or compare those of the window with it.

        Raises:
            LossNotAdditive: If a sample's gradient differs in other company.
        """
        rehearsal = self._rehearsal
        positions = self.slot.micro_batch.positions.tolist()
        data_readings = [r for r in readings if r.term is None or not r.term.is_penalty]
        footprints, is_low_precision = footprints_of(
            loss, data_readings, self._recorder, positions
        )
        rehearsal.is_low_precision |= is_low_precision
        if self.slot.is_rehearsal:
            rehearsal.record(footprints)
            rehearsal.num_reclassified = self._draws.num_reclassified
            return
        if rehearsal.num_reclassified != self._draws.num_reclassified:
            self.gradient.must_repeat = "the dims of random numbers were found out"
            self._rehearsal = Rehearsal()
            return
        difference = rehearsal.difference(footprints)
        if difference is None:
            return
        if not self._window.request.pad_to_window:
            self.gradient.must_pad = True
            return
        _, before, now = difference
        name = next(r.name for r in readings if r.key == difference[0])
        raise LossNotAdditive(
            f"{name}: the gradient of a sample at the model's outputs was {before:.6g} among some "
            f"samples of the window and {now:.6g} among others, so its loss depends on the other "
            "samples of its micro-batch (BatchNorm, in-batch negatives, statistics or mixtures "
            "over the batch, state that the loop keeps), and no split of the window is the full "
            "batch. Compute it for each sample alone, in the dataset or collate function, or over "
            "the whole window with Accelerator(whole_batch=...)."
        )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Let an error of hf_ga on this process be raised on all of them, at the window's end.

        If only this process raised at once, the others would wait for it. It raises at once on a
        single process, under FSDP (which cannot go on without it), and in a loop by hand.
        """
        try:
            yield
        except HfGaError as error:
            backend = self.gradient.backend
            if backend.num_processes == 1 or backend.is_sharded:
                self.leave()
                raise
            self.gradient.failure = self.gradient.failure or error

    def _sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a backward in which sharded models reduce their gradients."""
        stack = ExitStack()
        is_last = self._index == self._num_slots - 1 or not self._is_planned
        for model in self.training_models():
            stack.enter_context(self.gradient.backend.sync(model, is_last))
        return stack

    # The window's end

    def _is_last_backward(self) -> bool:
        """Whether this backward completes the window."""
        is_last_slot = self._index == self._num_slots - 1
        expected = self._backwards_per_iteration or 1
        return is_last_slot and self._num_backwards >= expected

    def _finish(self) -> None:
        """Finish a planned window: `.grad` appears, or the window is computed once more."""
        gradient = self.gradient
        check_no_earlier_gradients(self.accelerator._optimizers, gradient.earlier)
        is_set = gradient.finish(
            is_padded=self._window.request.pad_to_window,
            can_repeat=True,
            keeps_sums=self._backwards_per_iteration is None,
        )
        if gradient.must_pad:
            self._window.state.pad_to_window = True
        if not is_set:
            self.accelerator.gradient_state._set_sync_gradients(False)
            return
        self.is_complete = True
        self.loss = gradient.loss

    def _show_mean_so_far(self) -> None:
        """Set `.grad` of a loop that accumulates by hand to the gradient of the mean so far."""
        gradient = self.gradient
        mean = gradient.mean_so_far(is_padded=self._window.request.pad_to_window)
        gradient.show(mean, times=self.by_hand.num_shown)
        self.loss = gradient.loss

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before a prepared optimizer steps, that the window's gradient is complete.

        Raises:
            ConfigError: If it is not, or the learning rate changed within the window.
        """
        gradient = self.gradient
        if gradient is None or self.slot is None:
            if any(p.grad is not None and bool(p.grad.any()) for p in _parameters_of(optimizer)):
                raise early_step()
            return
        if not self._is_planned:
            self.by_hand.check_step()
        elif not self.is_complete:
            raise early_step()
        if gradient.num_backwards > 1:
            self._check_learning_rates()

    def after_step(self) -> None:
        """Note that a prepared optimizer has stepped: a loop by hand begins another window."""
        self._has_stepped = True
        if self.gradient is not None and not self._is_planned:
            self.by_hand.note_step()
            self.gradient.begin()
            self.is_complete = True
            self._learning_rates = self._current_learning_rates()

    def _current_learning_rates(self) -> list[float]:
        """Return the learning rates of all prepared optimizers."""
        optimizers = self.accelerator._optimizers
        return [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]

    def _check_learning_rates(self) -> None:
        """Check that no schedule stepped within the window.

        Raises:
            ConfigError: If a learning rate changed since the window began.
        """
        before = self._learning_rates
        now = self._current_learning_rates()
        if [float(rate) for rate in before] != [float(rate) for rate in now]:
            raise ConfigError(
                f"the learning rate changed from {before} to {now} within a window: a schedule "
                "that steps with every micro-batch makes the update depend on their number. Pass "
                "the scheduler to accelerator.prepare, or step it only if "
                "accelerator.sync_gradients."
            )

    def _is_in_evaluation(self) -> bool:
        """Return whether the loop is in an evaluation, which explains an unexpected backward."""
        active = self.accelerator.gradient_state.active_dataloader
        is_windowed = hasattr(active, "is_yielding_windows")
        if is_windowed and not active.is_yielding_windows:
            return True
        return not self.training_models()


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_trainable(model: nn.Module) -> bool:
    """Return whether a model that `accelerator.prepare` gets has a parameter with `requires_grad`,
    so that the user's loop trains it.
    """
    return any(parameter.requires_grad for parameter in model.parameters())
