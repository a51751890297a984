"""hf_ga's own loop over the micro-batches of a window: forward, loss, backward.

    OwnLoop(engine, model, loss_fn).add_gradients(window)

It is computed again in smaller micro-batches where memory runs out, and padded to its longest
sample where the loss depends on the padded width.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from hf_ga.engine.look.choice import is_rehearsed, number_of
from hf_ga.engine.slots import Slot, extra_rehearsal, plain_slots
from hf_ga.engine.speed_ups import that_keep_outputs
from hf_ga.engine.sums.loss_sums import LossSums
from hf_ga.engine.update import StepResult
from hf_ga.engine.whole.whole_batch import WholeBatch
from hf_ga.engine.whole.whole_window import UsedOutputs, WholeBatchLoss
from hf_ga.engine.window_engine import WindowEngine, trainable_parameters
from hf_ga.errors import DataError
from hf_ga.loading.memory import TooLarge, is_out_of_memory, num_elements
from hf_ga.loading.window import Window
from hf_ga.logs import get_logger
from hf_ga.model.forward import (
    LossFunction,
    argument_filter,
    callable_module,
    check_not_wrapped,
    fresh_gradients,
    head_loss,
    transformers_configs,
    unwrapped,
    without_cache,
)
from hf_ga.order.length_plan import Computed
from hf_ga.parallel.backend import Backend

logger = get_logger(__name__)


class OwnLoop:
    """Computes the gradients of windows of one model.

    Args:
        engine: Computes the windows.
        model: The prepared model.
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets), in place of the model's
            own loss.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, in its place.
    """

    def __init__(
        self,
        engine: WindowEngine,
        model: nn.Module,
        loss_fn: LossFunction | None = None,
        whole_batch: WholeBatchLoss | None = None,
    ) -> None:
        """Start before the first window."""
        self.engine = engine
        self.model = model
        self.loss_fn = loss_fn
        self.whole_batch = whole_batch
        self._loss_sums = None if loss_fn is None else LossSums(loss_fn)
        self._whole_batch = None if whole_batch is None else WholeBatch(engine, whole_batch)
        self._configs = transformers_configs(model)
        self._accepted = argument_filter(model)  # the entries of a batch that its forward takes
        self._slots: list[Slot] = []
        self._rehearsal: Slot | None = None
        engine.splits_where_memory_runs_out = True
        engine.speed_ups.is_resumed = True  # this loop calls the model as speed-ups need it
        if whole_batch is not None:
            engine.speed_ups.candidates = that_keep_outputs

    @property
    def used_outputs(self) -> UsedOutputs | None:
        """The outputs that a loss of whole windows uses. None for any other loss."""
        return None if self._whole_batch is None else self._whole_batch.used

    @property
    def waits_for_ranks(self) -> bool:
        """Whether ranks wait for each other within forwards, backwards or losses."""
        return self.engine.backend.is_sharded

    def adopt_outputs(self, used: UsedOutputs | None) -> None:
        """Take over what a loss of whole windows uses from another process."""
        if used is not None:
            self._whole_batch.adopt(self.model, used)

    def add_gradients(self, window: Window) -> StepResult:
        """Add the gradient of a window's mean loss to the `.grad` of the model's parameters.

        Args:
            window: The samples of one optimizer step.

        Returns:
            The window's mean loss, its number of targets, and how many times it was computed again
            because memory ran out.

        Raises:
            LossNotAdditive: If the loss is not a sum of means, or compares samples.
            DataError: If the numbers of targets of `loss_fn` add up to 0, but its sums do not.
            UnkeyedRandomness: If random numbers were drawn that cannot be tied to samples.
            OutOfMemory: If a single sample does not fit into memory.
            ProcessFailed: If another rank failed.
            Exception: Any other exception of this rank, such as one from the model's forward.
        """
        parameters = trainable_parameters([self.model], [])
        for retries in itertools.count():
            try:
                with fresh_gradients(parameters), without_cache(self._configs):
                    self._compute(window, parameters)
                    gradient = self.engine.gradient
                    is_empty = not gradient.num_targets
                    if is_empty:  # gradients of 0 would let an optimizer decay weights
                        self._check_no_loss(window)
                        for parameter in gradient.parameters:
                            parameter.grad = None
                num_targets = _as_count(gradient.num_targets)
                if self.whole_batch is not None and not is_empty:
                    num_targets = window.num_samples
                return StepResult(gradient.loss, num_targets, skipped=is_empty, retries=retries)
            except TooLarge as error:
                window.state.max_elements = error.num_elements // 2  # half of what did not fit
            finally:
                self.engine.leave_window()
            self.engine.restore_buffers()
            # Only here, as the traceback keeps the tensors of the failed try until then.
            clear_device_cache(garbage_collection=True)

    def _compute(self, window: Window, parameters: Sequence[nn.Parameter]) -> None:
        """Compute the gradient of a window, again if it must be padded or keyed otherwise."""
        if self.engine.backend.is_sharded and not window.state.is_width_tried:
            # Nothing is rehearsed here, so it is not known whether the padded width matters.
            window.state.pad_to_window = True
        while True:
            is_due = self.engine.is_rehearsal_due(number_of(window), [self.model])
            window = self._planned(window, is_rehearsed=is_due)
            self._begin(window, parameters, is_due=is_due)
            self._run_first_pass(window)
            try:
                self._run(window)
            except Exception as error:
                failure = self.engine.error_to_report(error)
                if self.waits_for_ranks:  # the other ranks cannot go on without this one
                    raise failure from error
                self.engine.gradient.failure = failure
            if self.engine.finish(can_repeat=True):
                break
            reason = self.engine.gradient.must_repeat
            logger.info(f"hf_ga: {window.description} is computed again: {reason}.")
            parameters = trainable_parameters([self.model], [])
        if self._whole_batch is not None:
            self._whole_batch.add_direct_gradients()

    def _planned(self, window: Window, *, is_rehearsed: bool) -> Window:
        """Return a window in the micro-batches that are computed. Raises errors of the collate
        function on all ranks.
        """
        if self._whole_batch is not None:
            with self.engine.backend.failing_on_all_ranks():
                window = self._whole_batch.planned(window, [self.model])
        elif window.state.pad_to_window and not window.request.pad_to_window:
            with self.engine.backend.failing_on_all_ranks():
                window = window.padded_to_window()
        # Where samples are rehearsed, padding is computed.
        computed = Computed.PADDED if is_rehearsed else window.state.computed
        if not window.is_planned_for(computed):
            with self.engine.backend.failing_on_all_ranks():
                window = window.planned_for(computed)
        return self.within_memory_limit(window)

    def within_memory_limit(self, window: Window) -> Window:
        """Return a window in micro-batches within its memory limit, which all ranks share."""
        backend = self.engine.backend
        if window.state.max_elements is None or not backend.can_split:
            return window
        with backend.failing_on_all_ranks():
            window = window.split_to_memory_limit()
        number = backend.max_over_ranks(len(window.batches))
        return replace(window, request=replace(window.request, max_micro_batches=number))

    def _is_full_batch(self, window: Window) -> bool:
        """Whether a window is one micro-batch of a single process, so that nothing is split."""
        return window.request.max_micro_batches == 1 and self.engine.backend.num_processes == 1

    def _plan_slots(self, window: Window) -> list[Slot]:
        """Return the micro-batches of a window on this rank."""
        slots = plain_slots(window)
        if self.engine.backend.is_sharded:
            return slots
        counted = [slot for slot in slots if slot.is_counted]  # forwards are no collectives
        return counted or slots[:1]

    def _begin(self, window: Window, parameters: Sequence[nn.Parameter], *, is_due: bool) -> None:
        """Begin a window in the engine, or begin it again, with a rehearsal if one is due."""
        engine = self.engine
        num_processes = engine.backend.num_processes
        self._accepted = argument_filter(self.model)
        self._slots = self._plan_slots(window)
        self._rehearsal = None
        # A loss of a whole window compares samples on purpose, and the full batch has one company.
        looks = self._whole_batch is None and not self._is_full_batch(window)
        looks = looks and engine.can_rehearse()
        number = number_of(window)
        engine.looks.is_due |= looks and not is_rehearsed(number) and not engine.has_rehearsed
        if looks and (is_due or engine.looks.is_due):
            with engine.backend.failing_on_all_ranks():
                rehearsal = extra_rehearsal(
                    window,
                    num_processes=num_processes,
                    is_first=not engine.has_rehearsed,
                    positions=engine.looks.positions,
                )
                self._rehearsal = _within_limit(rehearsal, window)
        engine.begin_window(
            [self.model],
            parameters,
            num_slots=len(self._slots),
            is_rehearsed=self._rehearsal is not None,
            has_extra=self._rehearsal is not None,
            is_full_batch=self._is_full_batch(window),
            state=window.state,
            request=window.request,
            chunk_tree=window.request.chunk_tree,
            looks=looks,
        )

    def _run_first_pass(self, window: Window) -> None:
        """Run the forwards that losses of a whole window need before its training forwards. A
        collective, which raises an error of one rank on all.
        """
        with self.engine.backend.autocast():
            if self._whole_batch is not None:
                self._whole_batch.begin(window, self._slots)
            else:
                self.engine.count_experts(self._slots, window.request)

    def _run(self, window: Window) -> None:
        """Run all forwards and backwards of a window on this rank."""
        if self._rehearsal is not None:
            self._rehearse(window)
        index = 0
        with self.engine.draws.scope():  # those of the micro-batches replace nothing then
            while index < len(self._slots):
                must_rejoin = False
                try:
                    self._run_slot(self._slots[index], window, index)
                except Exception as error:
                    must_rejoin = self._can_rejoin(error)
                    if not must_rejoin:
                        raise
                if must_rejoin:  # not in the `except` block, where the traceback keeps tensors
                    self._rejoin(window, index)
                else:
                    index += 1

    def _can_rejoin(self, error: Exception) -> bool:
        """Whether this rank can go on after an error: if it is the first time that memory ran out
        in the window, under FSDP2, in a micro-batch of several samples.
        """
        return (
            self.engine.backend.can_rejoin
            and is_out_of_memory(error)
            and self.engine.gradient.failure is None
            and len(self.engine.slot.micro_batch) > 1
        )

    def _rejoin(self, window: Window, index: int) -> None:
        """Go on under FSDP2, where other ranks wait, with one sample that adds nothing in place of
        a micro-batch that did not fit and all that follow. All ranks raise at the window's end.
        """
        micro_batch = self.engine.slot.micro_batch
        self.engine.gradient.failure = TooLarge(num_elements(micro_batch))
        offset = window.offsets_of(micro_batch)[:1]
        with self.engine.draws.suspended():  # it may be collated anew
            (one_sample,) = window.split([offset]).micro_batches
        filler = Slot(one_sample, is_filler=True)
        self._slots[index:] = [filler] * (len(self._slots) - index)
        self.engine.backend.rejoin(self.model)
        clear_device_cache(garbage_collection=True)

    def _rehearse(self, window: Window) -> None:
        """Run the rehearsal of a window; without it if memory runs out, as it may be larger than
        the micro-batches.
        """
        try:
            self._run_slot(self._rehearsal, window)
            return
        except Exception as error:
            if not is_out_of_memory(error) or self.waits_for_ranks:
                raise
        # Not in the `except` block, where the traceback still keeps tensors.
        self._rehearsal = None
        self.engine.drop_rehearsal()
        clear_device_cache(garbage_collection=True)

    def _run_slot(self, slot: Slot, window: Window, index: int = -1) -> None:
        """Run the forward and backward of a micro-batch, the window's n-th, or a rehearsal (-1)."""
        backend = self.engine.backend
        with self.engine.micro_batch(slot, window.request):
            batch = self.engine.place(slot)
            with backend.autocast():
                outputs = callable_module(self.model)(**self._accepted(batch))
                loss, number = self._loss(outputs, batch, index)
            outputs = None  # the graph is freed by the backward, and they would keep logits
            self.engine.add(loss, number, is_last=index == len(self._slots) - 1)

    def _loss(self, outputs: Any, batch: dict[str, Any], index: int) -> tuple[Tensor, float | None]:
        """Return the loss of a micro-batch, and what it is a sum over; None if it is a mean."""
        if self._whole_batch is not None:
            return self._whole_batch.part(index, outputs)
        if self._loss_sums is not None:
            num_samples = len(self.engine.slot.micro_batch)
            is_checked = self._rehearsal is not None
            return self._loss_sums(outputs, batch, num_samples, is_checked=is_checked)
        return head_loss(outputs), None

    def _check_no_loss(self, window: Window) -> None:
        """Check that the loss of a window without targets is 0."""
        loss = float(self.engine.gradient.loss)
        if self.loss_fn is None or loss == 0:
            return
        raise DataError(
            f"{window.description}: the numbers of targets (or weights) add up to 0, but the sum "
            f"of the loss is {loss:.4g}, so there is no mean. No weights were changed: remove such "
            "samples from the dataset, or make the window larger."
        )


def _as_count(number: float) -> int | float:
    """Return a number of targets as an integer, unless it is a sum of weights."""
    return int(number) if float(number).is_integer() else number


def _within_limit(rehearsal: Slot | None, window: Window) -> Slot | None:
    """Return a rehearsal with as many of its samples as the memory limit of the window allows."""
    if rehearsal is None or window.state.max_elements is None:
        return rehearsal
    offsets = window.offsets_of(rehearsal.micro_batch)
    first, *_ = window.split([offsets]).split_to_memory_limit().micro_batches
    return replace(rehearsal, micro_batch=first)


class KeptLoop:
    """The loop of a model, kept between the calls of a function that computes its windows.

    It is stored as an attribute of the model, because it refers to the model: a table elsewhere
    would keep the model from being freed.
    """

    def __init__(self) -> None:
        """Start without a loop."""
        self._loop: OwnLoop | None = None
        self._made_for: tuple[Any, ...] = ()

    def get(
        self,
        model: nn.Module,
        backend: Backend,
        loss_fn: LossFunction | None,
        whole_batch: WholeBatchLoss | None,
        *,
        allow_split_dependent_randomness: bool,
    ) -> OwnLoop:
        """Return the loop of the last call, or a new one if model or loss are others.

        Args:
            model: The prepared model.
            backend: How ranks communicate in this call.
            loss_fn: See `OwnLoop`.
            whole_batch: See `OwnLoop`.
            allow_split_dependent_randomness: See `WindowEngine`.

        Raises:
            ConfigError: If the model or a module in it is wrapped by torch.compile.
        """
        losses = (loss_fn, whole_batch)
        is_other = self._loop is None or unwrapped(self._loop.model) is not unwrapped(model)
        if is_other or self._made_for != losses:
            check_not_wrapped(model)
            engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=False)
            engine.trusts_num_targets = True  # those of loss_fn are checked, see LossSums
            self._loop = OwnLoop(engine, model, loss_fn, whole_batch)
            self._made_for = losses
        self._loop.model = model  # it may have been wrapped since
        engine = self._loop.engine
        engine.backend = backend
        engine.draws.allow_unkeyed = allow_split_dependent_randomness
        return self._loop

    def __reduce__(self) -> tuple:
        """Pickle and copy it empty: it refers to modules of this model, not of its copy."""
        return KeptLoop, ()
