"""Keeps the books of a user's own training loop: which micro-batch it works on, what it passed to
`backward`, and when the window's gradient is complete.

A loop accumulates in one of two ways:

- planned: with `gradient_accumulation_steps`, or in `with accelerator.accumulate(model):`. The
  loader knows the window. `.grad` appears with its last backward: that of the last micro-batch, or
  the one after which it has as many as those before it. With more, it appears again; with fewer,
  where it is used.
- by hand: the loop divides its loss by k and steps its optimizer after every k-th backward. `.grad`
  is at any time the gradient of the mean loss so far, and the window ends where it steps.
"""

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import accelerate
import torch
from torch import Tensor, nn

from hf_ga.accelerator.checks import notices
from hf_ga.accelerator.checks.by_hand import ByHand
from hf_ga.accelerator.checks.misuse import (
    backward_after_step,
    backward_after_zero_grad,
    check_no_earlier_gradients,
    clipped_between,
    clipped_early,
    early_step,
    has_gradients,
    not_fetched,
    random_collate_by_hand,
    unexpected_backward,
)
from hf_ga.accelerator.checks.schedules import ScheduleCheck
from hf_ga.accelerator.checks.window_checks import WindowChecks
from hf_ga.accelerator.named_entries import check_named_entries
from hf_ga.engine.checks.draw_check import warn_of_doubtful_draws
from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS, is_rehearsed
from hf_ga.engine.slots import (
    Slot,
    joined,
    plain_slots,
    rehearsed_slots,
    slots_in_other_company,
    slots_like,
    slots_with_look,
)
from hf_ga.engine.whole.whole_batch import WholeBatch
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.engine.window_engine import WindowEngine, trainable_parameters
from hf_ga.errors import ConfigError, DataError, HfGaError
from hf_ga.loading.window import Window
from hf_ga.logs import Warnings, get_logger
from hf_ga.model.forward import innermost
from hf_ga.parallel.fsdp import backend_for, is_sharded

logger = get_logger(__name__)

DIFFERENT_SIZES = (
    "two loaders are used together, but give different numbers of samples in one iteration: give "
    "both the same batch size and drop_last=True, and begin their epochs together."
)


class TrainingLoop:
    """The state of a user's loop, which fetches batches and calls `accelerator.backward`.

    Args:
        accelerator: The accelerator of the loop.
        allow_split_dependent_randomness: Whether draws that cannot be tied to samples are accepted.
        whole_batch: A loss of all samples of a window. None: the loop passes its loss.

    Attributes:
        engine: Computes the windows.
        num_windows: Number of windows that were begun in the run.
        is_inside: Whether the loop uses `accelerator.accumulate`: it did, or its code names it.
        is_complete: Whether all backwards of the current window were run.
        loss: Mean loss of the last complete window, a scalar. None before there is one.
    """

    def __init__(
        self,
        accelerator: accelerate.Accelerator,
        *,
        allow_split_dependent_randomness: bool,
        whole_batch: WholeBatchLoss | None = None,
    ) -> None:
        """Start before the first window of a user's loop, with no prepared model."""
        self.accelerator = accelerator
        self.engine = WindowEngine(
            partial(backend_for, accelerator),
            allow_split_dependent_randomness=allow_split_dependent_randomness,
        )
        self.num_windows = 0
        self.is_inside = False
        self.is_complete = True
        self.loss: Tensor | None = None
        self._whole_batch: WholeBatch | None = None
        if whole_batch is not None:
            self._whole_batch = WholeBatch(self.engine, whole_batch)
            self.engine.trusts_num_targets = True
        self._by_hand = ByHand()
        self._num_updates_before = 0  # by hand, of the run that was resumed
        self._schedules = ScheduleCheck()
        self._prepared_models: dict[nn.Module, nn.Module] = {}  # innermost -> prepared
        self._window: Window | None = None
        self._leader: Any = None  # the loader whose windows are computed
        self._has_followers = False  # whether the loop takes batches of another one beside it
        self._is_followed = False  # in the current iteration
        self._warnings = Warnings(logger)
        self._slots: list[Slot] = []
        self._is_rehearsed = False  # the current window, as planned
        self._index = 0  # of the iteration in the window
        self._attempt = 0  # how often the window was begun again
        self._num_expected = 0  # backwards of a micro-batch, as those before it had
        self._is_late = False  # whether `.grad` lacks backwards of this micro-batch
        self._num_iterations = 0  # in the run
        self._has_stepped = False  # an optimizer, after a backward of this micro-batch
        self._is_stage = False  # the window, after a step on its only micro-batch
        self._earlier: list[Tensor | None] = []  # gradients, when the loader's window began
        self._num_empty = 0  # windows without a target
        self._has_tried_collate = False  # whether it draws
        self._is_zeroed = False  # gradients, since a backward of this micro-batch
        self._checks = WindowChecks(accelerator)
        self._iteration = ExitStack()  # contexts of the current iteration
        # An iterator that the script still holds ends when modules are gone.
        atexit.register(_leave_at_exit, weakref.ref(self))

    # Models

    def add_model(self, model: nn.Module, prepared: nn.Module) -> None:
        """Register a model of the user, and what `accelerator.prepare` returns, which may be
        another one (of compiled regions).
        """
        self._prepared_models[innermost(model)] = prepared

    def training_models(self) -> list[nn.Module]:
        """Return the prepared models that are in training mode and have trainable parameters."""
        models = dict.fromkeys(map(innermost, self.accelerator._models))
        return [
            self._prepared_models.get(model, model)
            for model in models
            if model.training and is_trainable(model)
        ]

    # Windows

    def micro_batches(
        self, loader: Any, window: Window, following: Iterator[Window]
    ) -> Iterator[tuple[Any, bool]]:
        """Hand out the micro-batches of a window to the loop, one for each of its iterations.

        Args:
            loader: The prepared loader that the loop iterates over.
            window: The window.
            following: The windows after it, which are taken if the loop accumulates by hand and
                this window turns out to be a rehearsal of one of its own.

        Yields:
            (batch on the device, whether it is the last one of the window).

        Raises:
            ConfigError: If the loop fetches a batch before it called `accelerator.backward` for
                the previous one.
        """
        if self._is_follower(loader):
            self._has_followers = True
            yield from self._follow(window)
            return
        self._leader = loader
        self._attempt = 0
        if self._is_planned:
            self._schedules.begin_window()
        while True:
            window = self._begin_window(window)
            for index, slot in enumerate(self._slots):
                is_last = index == len(self._slots) - 1
                yield self._open(slot, index, is_last), is_last
                self.complete()
                self._close()
                self._check_fetch()
            if not self._must_begin_again():
                break
            self._attempt += 1
        yield from self._rest_of_window_by_hand(window, following)

    def _rest_of_window_by_hand(
        self, window: Window, following: Iterator[Window]
    ) -> Iterator[tuple[Any, bool]]:
        """Hand out the window of a loop that accumulates by hand, after its first iteration has
        turned into a rehearsal: all samples of its k iterations, in those that are left.
        """
        number = self._by_hand.num_parts - 1
        has_candidate = any(slot.may_be_rehearsal for slot in self._slots)
        if not has_candidate or not self._by_hand.has_begun or number == 0:
            return
        if self._has_followers:  # whose samples would not be in the same company
            return
        rest = list(islice(following, number))
        whole = joined([window, *rest])
        if not rest:
            return
        slots = None
        if whole is not None:
            slots = self._collated(partial(slots_in_other_company, whole, len(rest)))
        if slots is None:
            for other in rest:
                yield from self.micro_batches(self._leader, other, iter(()))
            return
        self.engine.gradient.turn_into_rehearsal()
        self.engine.restore_buffers()
        self._slots = slots
        self._window = whole
        self._begin_engine(is_rehearsed=True, goes_on=True, keeps_rehearsal=True)
        self.engine.count_experts(self._slots, whole.request)
        for index, slot in enumerate(self._slots):
            yield self._open(slot, index, True), True
            self.complete()
            self._close()

    def _begin_window(self, window: Window) -> Window:
        """Begin a window, padded to its longest sample if that is needed, and plan the iterations
        of the loop in it.
        """
        self._check_fetch()
        if self._whole_batch is not None:
            check_named_entries(window)
            window = self._whole_batch.planned(window, self.training_models())
        if is_sharded(self.accelerator):
            # Without a rehearsal it is not known whether the padded width matters.
            window.state.pad_to_window = True
        if window.state.pad_to_window:
            window = _padded(window)
        self.is_inside = self.is_inside or _calls_accumulate(sys._getframe())
        is_planned = self._is_planned
        self._window = window
        self._slots = self._plan(window)
        goes_on = not is_planned and not self.is_complete
        if not is_planned and not goes_on and self._rehearses_by_hand():
            self._slots = [replace(slot, may_be_rehearsal=True) for slot in self._slots]
        self._begin_engine(
            is_rehearsed=self._is_rehearsed or any(s.may_be_rehearsal for s in self._slots),
            goes_on=goes_on,
        )
        if self._is_rehearsed and not any(slot.is_rehearsal for slot in self._slots):
            self.engine.drop_rehearsal()
        if not goes_on:
            self._checks.begin()
        self.is_complete = False
        self._is_stage = False
        self._earlier = self.engine.gradient.shown.earlier
        if self._whole_batch is not None:
            self._whole_batch.begin(window, self._slots)
        else:
            self.engine.count_experts(self._slots, window.request)
        return window

    def _begin_engine(
        self, *, is_rehearsed: bool, goes_on: bool, keeps_rehearsal: bool = False
    ) -> None:
        """Begin a window in the engine; see `WindowEngine.begin_window`."""
        models = self.training_models()
        is_single = len(self._slots) == 1 and self.accelerator.num_processes == 1
        has_several = len(self._slots) > 1 or self.num_parts_by_hand > 1
        self.engine.watches_weights = has_several or (self._num_expected > 1 and not is_single)
        self._checks.note_frozen(self._prepared_models.values())
        self.engine.begin_window(
            models,
            trainable_parameters(models, self.accelerator._optimizers),
            num_slots=len(self._slots),
            is_rehearsed=is_rehearsed,
            is_full_batch=self._is_planned and is_single,
            goes_on=goes_on,
            keeps_rehearsal=keeps_rehearsal,
            state=self._window.state,
            looks=self._can_look() and not is_single,
            frozen=[m for m in self._prepared_models.values() if m not in models],
        )

    def _plan(self, window: Window) -> list[Slot]:
        """Return the iterations of the loop in a window."""
        num_planned = window.request.max_micro_batches
        num_processes = self.accelerator.num_processes
        models = self.training_models()
        is_due = self._can_look() and self.engine.is_rehearsal_due(self.num_windows, models)
        # The same on all processes, also where this one cannot collate a rehearsal.
        self._is_rehearsed = is_due and (num_planned > 1 or num_processes > 1)
        if not self._is_rehearsed:
            return plain_slots(window)
        looks = self.engine.looks
        if looks.is_due:
            number = num_planned + 1
            plan = partial(slots_with_look, num_processes=num_processes, positions=looks.positions)
        else:
            number = max(2, num_planned)
            plan = partial(rehearsed_slots, is_first=not self.engine.has_rehearsed)
        slots = self._collated(partial(plan, window))
        slots = plain_slots(window, number) if slots is None else slots
        if len(slots) > num_planned:
            message = notices.more_iterations("its rehearsal is one more")
            self._warnings.once(message, topic="iterations")
        return slots

    def _collated(self, plan: Callable[[], list[Slot]]) -> list[Slot] | None:
        """Return iterations with samples in other company than in the loop's own micro-batches.
        None, with one warning, if the collate function cannot put them together.
        """
        try:
            return plan()
        except HfGaError:
            raise
        except Exception as error:
            message = notices.not_collated(_reason(error))
            self._warnings.once(message, topic="collating", on_all_ranks=True)
            return None

    def _can_look(self) -> bool:
        """Whether a window may be computed with a rehearsal, or again with one. A loss of a whole
        window compares samples on purpose.
        """
        return self._is_planned and self._whole_batch is None and self.engine.can_rehearse()

    def _rehearses_by_hand(self) -> bool:
        """Whether the window that a loop by hand may begin now is rehearsed."""
        is_due = is_rehearsed(self._by_hand.num_steps)
        return is_due and len(self._slots) == 1 and self.engine.can_rehearse()

    @property
    def _is_planned(self) -> bool:
        """Whether the loop accumulates as planned by the loader, and not by hand."""
        if self._whole_batch is not None:  # of which there is no mean so far
            return True
        steps = self.accelerator.gradient_accumulation_steps
        return steps > 1 or self.accelerator.global_batch_size is not None or self.is_inside

    @property
    def num_parts_by_hand(self) -> int:
        """What a loop that accumulates by hand divides its losses by; 1 for any other loop."""
        return 1 if self._is_planned else self._by_hand.num_parts

    @property
    def num_updates_by_hand(self) -> int:
        """How many updates a loop by hand has made, also before it was resumed: its windows draw
        other numbers that all samples share.
        """
        return self._num_updates_before + self._by_hand.num_steps

    def _must_begin_again(self) -> bool:
        """Whether the window that has just ended must be computed once more."""
        reason = self.engine.gradient.must_repeat
        if not self._is_planned or reason is None:
            if self._is_planned:
                self._warn_of_empty_windows()
            self.num_windows += 1
            return False
        logger.info(f"hf_ga: a window is computed once more: {reason}.")
        message = notices.more_iterations("it is computed once more")
        self._warnings.once(message, topic="iterations")
        return True

    @property
    def has_updated(self) -> bool:
        """Whether no gradient of the window is left to step on, so that a checkpoint has it all."""
        is_open = self.engine.slot is not None and self.engine.num_adds > 0
        if self.is_complete and is_open and not self._has_stepped:
            return not has_gradients(self.accelerator._optimizers)
        return self.is_complete

    @property
    def num_complete_windows(self) -> int:
        """Number of windows of the run whose optimizer step is done, for a checkpoint."""
        is_open = self.engine.slot is not None
        return self.num_windows + is_open

    def go_on_after(self, *, num_windows: int, num_updates_by_hand: int) -> None:
        """Go on after a checkpoint that was saved when so many windows and updates were done."""
        self.num_windows = num_windows
        # The first windows of this process are rehearsed by hand, whatever their number is.
        self._num_updates_before = num_updates_by_hand - self._by_hand.num_steps
        self.engine.speed_ups.is_resumed = num_windows > 0

    # Iterations

    def _open(self, slot: Slot, index: int, is_last: bool) -> Any:
        """Begin an iteration of the loop. Returns its batch on the device."""
        accelerator = self.accelerator
        self._iteration.close()  # what an evaluation before it has left
        self._index = index
        self._is_followed = False
        self._is_zeroed = False
        self._is_late = False
        self._has_stepped = False
        self._num_iterations += 1
        self.engine.gradient.iteration = self._num_iterations
        accelerator.step = index + 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        request = self._window.request
        if not self._is_planned:  # draws that all samples share belong to the loop's own window
            request = replace(request, index=self.num_updates_by_hand)
        self._iteration.enter_context(self.engine.micro_batch(slot, request))
        batch = self.engine.place(slot)
        num_done = self.num_windows if self._is_planned else self._by_hand.num_steps
        has_windows = self._is_planned or self._by_hand.is_established
        if has_windows and num_done <= NUM_FIRST_WINDOWS:
            self._iteration.enter_context(self._schedules.iteration())
        if self._whole_batch is not None:
            self._iteration.enter_context(self._whole_batch.recording(index, batch))
        return batch

    def _close(self) -> None:
        """End an iteration of the loop."""
        contexts = self._iteration
        self._iteration = ExitStack()
        contexts.close()
        lacks_follower = self._has_followers and not self._is_followed
        if lacks_follower and self.engine.num_adds and len(self._slots) > 1:
            self._warnings.once(notices.WITHOUT_SECOND_BATCH)
        number = self.engine.num_adds
        self._num_expected = max(number, self._num_expected) if self._index else number
        # Which cannot be tried, as the loop cannot be given the window again.
        if self.num_parts_by_hand > 1 and self.engine.looks.lacks_terms:
            self._warnings.once(notices.WITHOUT_A_TERM)

    def leave(self, loader: Any = None) -> None:
        """Give up the current window, because the loop left it or ended.

        Args:
            loader: The loader that ended; another one than that of the window changes nothing.
        """
        if loader is not None and loader is not self._leader:
            return
        self._close()
        self.engine.leave_window()
        self._leader = None

    def abandon(self) -> None:
        """Undo what the current window has replaced; Accelerate's states may be gone by now."""
        self._iteration.close()
        self.engine.leave_window()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """On an error, undo what the iteration has replaced: a traceback that is kept, as in a
        notebook, keeps the iterator of the loader, which would do it.
        """
        try:
            yield
        except BaseException:
            self._iteration.close()
            raise

    def leave_window(self) -> None:
        """Give up the current window of the loop, because `load_state` loads other weights."""
        self.leave()
        self.is_complete = True

    def _check_fetch(self) -> None:
        """Check, before the next batch and at an epoch's end, that the loop has used its batch."""
        if self.engine.slot is None or self.engine.num_adds:
            return
        if not self._is_planned:
            if self.num_parts_by_hand > 1:
                self._warnings.once(notices.WITHOUT_BACKWARD)
            return
        self.leave()
        raise not_fetched()

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context in which torch's random functions are its own again."""
        return self.engine.draws.suspended()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within the block, torch's random functions are its own again, at most until the loop's
        next batch, as the loop may keep the iterator. Its draws are not the micro-batch's.
        """
        draw_check = self.engine.draw_check
        slot = self.engine.slot
        is_before_backward = slot is not None and not self.engine.num_adds
        if is_before_backward:
            draw_check.check()
        suspension = ExitStack()
        suspension.enter_context(self.suspended())
        self._iteration.callback(suspension.close)
        try:
            yield
        finally:
            suspension.close()
            if is_before_backward and self.engine.slot is slot:
                draw_check.begin()

    def note_on_error(self, error: Exception) -> str | None:
        """Return what explains an error of the loop: `.grad` is None within a window, or those that
        are rehearsed have micro-batches of other sizes than the loader's. None: neither.
        """
        slot = self.engine.slot
        if "NoneType" in str(error) and not self.accelerator.sync_gradients:
            return notices.WITHOUT_GRADIENT
        if slot is None or not any(s.is_rehearsal for s in self._slots):
            return None
        return notices.other_sizes(len(slot.micro_batch))

    # Other loaders beside the one whose windows are computed (zip)

    def _is_follower(self, loader: Any) -> bool:
        """Whether a loader's batches belong to the current iteration of another loader."""
        is_other = self._leader is not None and self._leader is not loader
        return is_other and self.engine.slot is not None and not self.engine.num_adds

    def _follow(self, window: Window) -> Iterator[tuple[Any, bool]]:
        """Hand out micro-batches of a second loader, split as those of the first one. ConfigError
        if their windows have different sizes.
        """
        leading = self._window
        attempt = -1
        while self._window is leading or self._attempt > attempt:
            attempt = self._attempt
            leading = self._window
            if leading.request.pad_to_window:
                window = window.padded_to_window()
            if window.num_samples != leading.num_samples:
                raise ConfigError(DIFFERENT_SIZES)
            slots = slots_like(self._slots, leading, window)
            for index, slot in enumerate(slots):
                if index != self._index or self.engine.slot is None:
                    raise ConfigError(DIFFERENT_SIZES)
                batch = self.engine.place(slot)
                self._is_followed = True
                yield batch, index == len(slots) - 1
            if self._attempt == attempt:
                return

    # Backward

    def backward(
        self, loss: Any, num_targets: float | Tensor | None, *, retain_graph: bool
    ) -> Tensor | None:
        """Add the gradient of a loss to the window, and finish it after its last backward, or what
        seems to be the last one.

        Args:
            loss: See `Accelerator.backward`.
            num_targets: See `Accelerator.backward`.
            retain_graph: See `Tensor.backward`.

        Returns:
            The loss of the window with `whole_batch`, otherwise None.

        Raises:
            ConfigError: If no micro-batch waits for its backward, or gradients were changed.
            LossNotAdditive: If the loss is not a sum of means.
            UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        """
        engine = self.engine
        if engine.slot is None:
            raise unexpected_backward(is_in_evaluation=self._is_in_evaluation())
        is_last_slot = self._index == len(self._slots) - 1
        with engine.failing_together():
            if self._whole_batch is not None:
                loss, num_targets = self._whole_batch.term(loss, num_targets)
            self._check_before_backward(loss, num_targets)
            self.is_complete = False
            engine.add(
                loss,
                num_targets,
                retain_graph=retain_graph,
                is_last=is_last_slot or not self._is_planned,
            )
        if is_last_slot or not self._is_planned:
            self._is_late = self._expects_backward()
            if self._is_late:
                engine.gradient.show_unfinished()
            else:
                self._finish()
        return None if self._whole_batch is None else self._whole_batch.value

    def _check_before_backward(self, loss: Tensor, num_targets: Any) -> None:
        """Check that no gradients appeared and no optimizer stepped since the batch was handed out,
        that the optimizers' options are those of the window's first backward, and that the loss is
        not divided by the accumulation steps. Notes whether it is multiplied by them.
        """
        gradient = self.engine.gradient
        if self.engine.num_adds and self.accelerator.num_processes > 1:
            self.engine.check_weights()  # as `.grad` was no gradient yet to move them along
        if self._has_stepped:
            self._begin_stage()
        if not self._is_planned:
            gradient.begin_again_if_zeroed()
            self._by_hand.note_backward(loss, is_new=not self.engine.num_adds)
            self._check_collate_by_hand()
        self._checks.check_options()
        if not self._is_planned:
            return
        if self._is_zeroed:
            raise backward_after_zero_grad()
        if gradient.is_changed():
            raise clipped_between()
        if not gradient.backend.is_sharded:
            now = None
            if self.num_windows < NUM_FIRST_WINDOWS:  # there may be new parameters, too
                now = trainable_parameters(self.training_models(), self.accelerator._optimizers)
            self._checks.check_parameters(gradient, now)
        self._checks.check_loss(loss, num_targets)

    def _check_collate_by_hand(self) -> None:
        """Check once, in a window's second backward, that the collate function of a loop that
        accumulates by hand draws nothing.
        """
        num_parts = self._by_hand.num_parts
        accumulates = num_parts > 1 and not self._by_hand.has_begun
        if not accumulates or self._has_tried_collate or self.engine.draws.allow_unkeyed:
            return
        self._has_tried_collate = True
        with self.suspended():
            if self._window.fetcher.has_random_collate(self._window.request):
                raise random_collate_by_hand(num_parts)

    def _is_alone(self) -> bool:
        """Whether the current micro-batch is all that its window has so far, on all processes."""
        if self.accelerator.num_processes > 1:
            return False
        return len(self._slots) == 1 if self._is_planned else self._by_hand.has_begun

    def _expects_backward(self) -> bool:
        """Whether another backward of the micro-batch is expected, as those before it had more.
        One that is alone shows each.
        """
        return self.engine.num_adds < self._num_expected and not self._is_alone()

    def _begin_stage(self) -> None:
        """Begin a window of the same micro-batch, after an optimizer has stepped on it, as loops of
        adversaries do. ConfigError if its window has others, which had other weights.
        """
        if self._is_planned:
            is_alone = self._is_alone() and self._whole_batch is None
        else:
            is_alone = self._by_hand.was_one_batch
        if not is_alone:
            raise backward_after_step()
        self._has_stepped = False
        if not self._is_planned:  # `after_step` has begun it
            return
        self.engine.gradient.begin()
        self._is_stage = True
        self._is_zeroed = False
        self._checks.begin()

    def complete(self) -> None:
        """Let the gradient of all backwards so far appear, if another one was expected."""
        if not self._is_late or self.engine.slot is None:
            return
        with self.engine.failing_together():
            if self.engine.gradient.is_changed():
                raise clipped_early()
        self._finish()

    def _finish(self) -> None:
        """Finish a window: `.grad` appears, or a planned window is computed once more."""
        self._is_late = False
        gradient = self.engine.gradient
        if not self._is_planned:
            self.engine.show_mean_so_far(self._by_hand.num_shown)
            self.loss = gradient.loss
            return
        with self.engine.failing_together():
            self._checks.check_factors()
            reached = gradient.sums.reached()
            replaced = [g for g, is_set in zip(self._earlier, reached, strict=True) if is_set]
            check_no_earlier_gradients(self.accelerator._optimizers, replaced)
        is_set = self.engine.finish(can_repeat=not self._is_stage, adds=self._is_stage)
        if not is_set:
            self.accelerator.gradient_state._set_sync_gradients(False)
            return
        if self._whole_batch is not None:
            self._whole_batch.add_direct_gradients()
        self.is_complete = True
        self.loss = gradient.loss

    def before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the loop zeroes gradients between two backwards of one micro-batch.

        Only the first counted micro-batch of a window shows whether the backwards so far reached
        the optimizer's parameters.
        """
        engine = self.engine
        if engine.slot is None or not self._is_planned or not engine.num_adds:
            return
        if engine.gradient.num_backwards == engine.num_adds:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._is_zeroed = engine.gradient.has_sums_of(parameters)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check, before a prepared optimizer steps, that the window's gradient is complete.

        Raises:
            ConfigError: If it is not, or gradients of an earlier window are left.
        """
        engine = self.engine
        bypasses_backward = not self._is_planned and not self._by_hand.is_used
        if engine.slot is None and not self._is_planned and self._by_hand.is_open:
            self._by_hand.check_step()  # after an epoch, for its last window
            return
        if engine.gradient is None or engine.slot is None or bypasses_backward:
            if has_gradients([optimizer]):
                raise early_step()
            return
        self.complete()
        if not self._is_planned:
            self._by_hand.check_step()
            engine.check_weights()
            return
        if not self.accelerator.sync_gradients:  # the window is computed once more
            return
        if not self.is_complete:
            raise early_step()
        if not engine.gradient.backend.is_sharded:
            check_no_earlier_gradients([optimizer], self._earlier)

    def skip_step(self) -> None:
        """Note a step of a prepared optimizer within a window, which does nothing."""
        engine = self.engine
        if engine.slot is not None and engine.num_adds and not self._is_alone():
            self._has_stepped = True

    def after_step(self) -> None:
        """Note that a prepared optimizer has stepped: a loop by hand begins another window."""
        self._has_stepped = self.engine.slot is not None and self.engine.num_adds > 0
        self.engine.note_step()
        if self.engine.gradient is not None and not self._is_planned:
            self._warn_of_missing_rehearsal()
            self._warn_of_untried_widths()
            if self._by_hand.num_parts == 1:  # no other micro-batch shows more
                warn_of_doubtful_draws(self.engine.draws, self._warnings)
            self._by_hand.note_step()
            self._schedules.begin_window()
            self.engine.gradient.begin()
            self.is_complete = True
            self._checks.begin()

    def _warn_of_missing_rehearsal(self) -> None:
        """Warn once that a loop of one micro-batch a process is not rehearsed outside of
        `accumulate`, as its iterations cannot be told from those of a loop by hand.
        """
        is_first_step = self._by_hand.num_steps == 0
        if is_first_step and self._by_hand.num_parts == 1 and self.accelerator.num_processes > 1:
            self._warnings.once(notices.WITHOUT_REHEARSAL)

    def _warn_of_untried_widths(self) -> None:
        """Warn once that the micro-batches of a window by hand have several widths, of which no
        rehearsal compared two so far: the window cannot be given again for that.
        """
        has_several = len(set(self.engine.gradient.widths)) > 1
        if has_several and not self.engine.has_compared_widths:
            self._warnings.once(notices.WITHOUT_OTHER_WIDTHS)

    def _warn_of_empty_windows(self) -> None:
        """Warn once if no window so far has a target, as of losses over pairs of a batch, which
        micro-batches of one sample never have.
        """
        self._num_empty += not self.engine.gradient.num_targets
        if self._num_empty == self.num_windows + 1 == NUM_FIRST_WINDOWS:
            self._warnings.once(notices.WITHOUT_TARGETS)

    def _is_in_evaluation(self) -> bool:
        """Return whether the loop is in an evaluation, which explains an unexpected backward."""
        active = self.accelerator.gradient_state.active_dataloader
        is_windowed = hasattr(active, "is_yielding_windows")
        if is_windowed and not active.is_yielding_windows:
            return True
        return not self.training_models()


def _leave_at_exit(reference: weakref.ref[TrainingLoop]) -> None:
    """Give up the window of a loop that still exists when Python ends."""
    loop = reference()
    if loop is not None:
        loop.abandon()


def _padded(window: Window) -> Window:
    """Return a window padded to its longest sample. DataError if its samples cannot be collated
    together.
    """
    try:
        return window.padded_to_window()
    except HfGaError:
        raise
    except Exception as error:
        raise DataError(
            "all micro-batches of a window must be padded to one length, as the loss may depend on "
            f"it, but the window cannot be collated as one batch ({_reason(error)}): let the "
            "collate function pad its samples."
        ) from error


def _reason(error: Exception) -> str:
    """Return the kind and the first line of an error."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _calls_accumulate(frame: FrameType | None) -> bool:
    """Whether the code that is fetching a batch names `accumulate`, so that the first window can be
    rehearsed before the loop gets there.
    """
    while frame is not None:
        is_loop = not frame.f_globals.get("__name__", "").startswith(("hf_ga.", "accelerate."))
        if is_loop and "accumulate" in frame.f_code.co_names:
            return True
        frame = frame.f_back
    return False


def is_trainable(model: nn.Module) -> bool:
    """Return whether a model that `accelerator.prepare` gets has a parameter with `requires_grad`,
    so that the user's loop trains it.
    """
    return any(parameter.requires_grad for parameter in model.parameters())
