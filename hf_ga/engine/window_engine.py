"""Computes a window for a loop that runs its own forwards: keyed draws around them, and the loss
that it passes to `backward` read, compared with its rehearsal, and added to the window's gradient.

    begin_window(...)
    for each iteration:
        with micro_batch(...):   draws belong to samples; outputs are recorded in rehearsals
            loss = ...           any code of the loop's
            add(loss)            reads, compares, adds
    finish(...)                  one sum over ranks; `.grad` appears
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.checks.draw_check import (
    WITHOUT_REHEARSAL,
    DrawCheck,
    warn_of_doubtful_draws,
)
from hf_ga.engine.checks.kept_values import KeptValues
from hf_ga.engine.checks.rank_check import norms_by_name
from hf_ga.engine.checks.state import OtherModules, StateCheck
from hf_ga.engine.checks.weight_check import WeightCheck
from hf_ga.engine.gradient import WindowGradient
from hf_ga.engine.look.choice import NUM_FIRST_WINDOWS, is_rehearsed
from hf_ga.engine.look.footprints import (
    FootprintKey,
    Footprints,
    footprints_inside,
    footprints_of,
)
from hf_ga.engine.look.looks import Looks
from hf_ga.engine.look.padding_trial import PaddingTrial
from hf_ga.engine.look.recorder import OutputRecorder, widths_of
from hf_ga.engine.look.refusals import (
    compared_with_statistic,
    computed_in_two_ways,
    depends_on_company,
)
from hf_ga.engine.look.rehearsal import Rehearsal
from hf_ga.engine.parameter_hooks import has_hooks
from hf_ga.engine.slots import Slot
from hf_ga.engine.speed_ups import SpeedUps
from hf_ga.engine.sums.readings import Reading, TermKey
from hf_ga.engine.sums.window_sums import INEXACT_LOSS
from hf_ga.engine.whole.first_pass import run_first_pass
from hf_ga.engine.whole.router import WindowRouter
from hf_ga.errors import ConfigError, HfGaError, LossNotAdditive
from hf_ga.loading.fetch import WindowRequest
from hf_ga.loading.memory import TooLarge, is_out_of_memory, num_elements, out_of_memory_error
from hf_ga.loading.window import LoaderState
from hf_ga.logs import Warnings, get_logger
from hf_ga.model.forward import (
    argument_filter,
    callable_module,
    force_eager,
    is_compiled,
    module_modes,
    modules_of,
    repeatable_backwards,
    snapshot_state,
    unwrapped,
)
from hf_ga.model.precision import check_trainable
from hf_ga.order.chunks import ChunkTree
from hf_ga.parallel.backend import Backend
from hf_ga.parallel.rejoin import fsdp2_units
from hf_ga.speed.cudnn_attention import without_cudnn_attention

logger = get_logger(__name__)


class WindowEngine:
    """Computes the gradient of one window at a time.

    Args:
        make_backend: Returns how ranks communicate; called when the first window begins.
        allow_split_dependent_randomness: Whether draws that cannot be tied to samples are accepted.

    Attributes:
        draws: Keys the random draws of a micro-batch.
        draw_check: Finds draws that are not keyed.
        speed_ups: Speed-ups of the models' forwards.
        gradient: The sums of the current window. None before the first one.
        slot: The current micro-batch. None between two of them.
        num_adds: How many losses of the current micro-batch were added.
        rehearses: Whether windows may be rehearsed.
        has_rehearsed: Whether a window was rehearsed so far, on some process: on one where memory
            ran out, without a comparison.
        looks: Which windows are computed once more with a rehearsal.
        splits_where_memory_runs_out: Whether the loop computes such a window again, in smaller
            micro-batches.
        trusts_num_targets: Whether the numbers of targets in `add` were checked before.
        watches_weights: Whether the loop may change weights in each window, and not only in those
            that are rehearsed.
        unused: Names of parameters that got no gradient in a trial of the loss.
        models: The prepared models that are trained in the current window.
    """

    def __init__(
        self, make_backend: Callable[[], Backend], *, allow_split_dependent_randomness: bool
    ) -> None:
        """Start before the first window."""
        self._make_backend = make_backend
        self.draws = KeyedDraws(allow_unkeyed=allow_split_dependent_randomness)
        self.draw_check = DrawCheck(self.draws)
        self.speed_ups = SpeedUps(self.draws)
        self.gradient: WindowGradient | None = None
        self.slot: Slot | None = None
        self.num_adds = 0
        self.rehearses = True
        self.has_rehearsed = False
        self._is_rehearsed = False  # the current window
        self.looks = Looks()
        self.splits_where_memory_runs_out = False
        self.trusts_num_targets = False
        self.watches_weights = False
        self.unused: frozenset[str] = frozenset()
        self.models: list[nn.Module] = []
        self._all_models: list[nn.Module] = []
        self._buffers_before: list[Callable[[], None]] = []  # restore those before the window
        self._request: WindowRequest | None = None
        self._recorder = OutputRecorder()
        self._state_check = StateCheck(self.draws)
        self._others = OtherModules()
        self._weight_check = WeightCheck()
        self._kept_values = KeptValues()
        self._num_slots = 0  # that are left of the current window
        self._restore_filler: Callable[[], None] | None = None  # in one, what modules held
        self._rehearsal: Rehearsal | None = None  # of the current window
        self._router: WindowRouter | None = None  # of models with a balancing loss
        self._found_router: WindowRouter | None = None  # of the models, whether it is on or not
        self._goes_on = False
        self._follows_rehearsal = False  # by hand: each micro-batch of the current window
        self._state: LoaderState | None = None
        self._modes: tuple[tuple[bool, ...], ...] | None = None  # of modules, at the last rehearsal
        self._padding_trial = PaddingTrial()
        self._warnings = Warnings(logger)
        self._is_full_batch = False  # the current window is one micro-batch
        self._is_first_of_shards = False  # the current window: one of the first, under FSDP
        self._num_windows = 0  # that were begun
        self._terms_in_two_widths: set[TermKey] = set()  # that samples were compared in
        self._keys: set[TermKey] = set()  # of terms in this micro-batch
        self._window_contexts = ExitStack()

    @property
    def counts_slot(self) -> bool:
        """Whether the current micro-batch counts: in a look, its samples come again."""
        return self.slot.is_counted and not self.looks.is_on

    @property
    def has_compared_widths(self) -> bool:
        """Whether samples with each term of the window were compared in two padded widths."""
        terms = data_terms(self.gradient.readings)
        return bool(terms) and terms <= self._terms_in_two_widths

    @cached_property
    def backend(self) -> Backend:
        """How ranks communicate. It may be replaced between two windows."""
        return self._make_backend()

    # Windows

    def can_rehearse(self) -> bool:
        """Whether a loss can be differentiated once more in a micro-batch. Not under FSDP, where
        that is a collective, and FSDP1 gathers parameters for one backward only. Says so once.
        """
        if not self.rehearses or not self.backend.is_sharded:
            return self.rehearses
        self._warnings.once(
            "hf_ga: under FSDP it is not tried whether a sample's loss depends on the other "
            "samples of its micro-batch. Try the script on one process without FSDP first."
        )
        return False

    def is_rehearsal_due(self, number: int, models: Sequence[nn.Module] | None = None) -> bool:
        """Whether the window that begins is rehearsed: the first ones, one of a hundred, one whose
        loss has a form that no rehearsed one had, and one in which other modules are in training
        mode than in the last rehearsal.

        Args:
            number: The number of the window in the run, counted from 0.
            models: The models that are trained. None: those of Trainer, which sets their modes
                later.
        """
        if is_rehearsed(number) or self.looks.is_due:
            return True
        return models is not None and self._modes not in (None, _modes_of(models))

    def begin_window(
        self,
        models: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        *,
        num_slots: int,
        is_rehearsed: bool,
        has_extra: bool = False,
        is_full_batch: bool = False,
        goes_on: bool = False,
        keeps_rehearsal: bool = False,
        state: LoaderState | None = None,
        request: WindowRequest | None = None,
        chunk_tree: ChunkTree | None = None,
        looks: bool = False,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        """Begin a window, or begin it again.

        Args:
            models: The prepared models that are trained.
            parameters: The trainable parameters, of the models and beside them.
            num_slots: Number of micro-batches of the window on this rank.
            is_rehearsed: Whether a micro-batch of the window is a rehearsal.
            has_extra: Whether the rehearsal comes beside these micro-batches.
            is_full_batch: Whether a single micro-batch is the whole window.
            goes_on: Whether the sums so far belong to the window, of a loop that accumulates by
                hand.
            keeps_rehearsal: Whether the micro-batch so far was a rehearsal of this window.
            state: What windows of its loader share. It learns here whether they must be padded.
            request: The plan of the window. None: that of its micro-batches, of which this rank has
                at least one.
            chunk_tree: For same bits, the tree over the micro-batches of the window.
            looks: Whether it may be computed again with a rehearsal.
            frozen: Other prepared models, whose buffers may count samples, too.

        Raises:
            ConfigError: If the models cannot be trained exactly.
        """
        self._close_window()
        if not goes_on:
            self._weight_check.stop()
            self.draws.begin_window()
        self.models = list(models)
        self.draws.models = self.models
        self._all_models = [*models, *frozen]
        if not goes_on:
            self._buffers_before = [snapshot_state(model) for model in self._all_models]
            self._others.begin_window(self._all_models)
        self._goes_on = goes_on
        self._follows_rehearsal = keeps_rehearsal
        if state is not self._state:  # another loader, whose samples may be of other widths
            self._terms_in_two_widths = set()
        self._state = state
        self._request = request or self._request
        self._is_rehearsed = is_rehearsed or keeps_rehearsal
        self._is_full_batch = is_full_batch
        self.looks.begin_window(is_rehearsed=is_rehearsed, may_ask=looks)
        self._use_parameters(models, list(parameters))
        if not goes_on:
            self.gradient.backend = self.backend
            self.gradient.begin(chunk_tree)
        backend = self.backend
        self.gradient.sums.num_micro_batches = num_slots * backend.num_processes
        # Shards and same bits have an order of their own.
        divides = is_full_batch and chunk_tree is None and not backend.is_sharded
        self.gradient.sums.is_full_batch = divides
        is_first = self._num_windows < NUM_FIRST_WINDOWS
        is_first_of_shards = is_first and backend.is_sharded and not backend.is_stage
        self._is_first_of_shards = is_first_of_shards and not is_full_batch
        self._num_windows += 1
        self._num_slots = num_slots + has_extra
        for model in models:
            backend.begin(model)
            _switch_off_reducer(model)
        is_width_tried = state is None or state.is_width_tried
        self.gradient.tries_widths = looks and not self.looks.is_on and not is_width_tried
        self.gradient.tries_terms = None if self.looks.is_on else looks
        # Micro-batches of other sizes follow, or there is only one.
        self.gradient.reader.stack_sizes.may_change = is_rehearsed or is_full_batch
        self.gradient.reader.stack_sizes.may_repeat = looks
        if not keeps_rehearsal:
            self._rehearsal = Rehearsal() if is_rehearsed else None
        self._watch(models, is_rehearsed=is_rehearsed)
        self._window_contexts.enter_context(repeatable_backwards())
        # What is compiled for rows is not compiled for padded samples, too.
        if is_rehearsed and self.speed_ups.may_run_rows(models):
            self._window_contexts.enter_context(force_eager())
        speed_ups = self.speed_ups.window(
            models,
            self.gradient,
            is_rehearsed=self._rehearsal is not None,
            is_ordered=chunk_tree is not None,
            max_tokens=None if request is None else request.max_tokens,
        )
        self._window_contexts.enter_context(speed_ups)

    def _use_parameters(
        self, models: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Make the sums of a run that begins, or goes on with other parameters."""
        # By identity: equality would compare elements, of a parameter with those of its shards.
        known = [] if self.gradient is None else self.gradient.parameters
        if self.gradient is not None and list(map(id, known)) == list(map(id, parameters)):
            return
        if parameters or not self.backend.is_stage:  # those of a stage may all be frozen
            check_trainable(models, parameters, self.backend.num_processes)
        if self.backend.is_sharded:
            _warn_of_hooks(parameters)
        self.draws.weight_shapes = frozenset(p.shape for p in parameters)
        self.gradient = WindowGradient(self.backend, parameters)
        self.gradient.checks.trusts_numbers = self.trusts_num_targets

    def _watch(self, models: Sequence[nn.Module], *, is_rehearsed: bool) -> None:
        """Record the outputs of a rehearsal until the window's end, and note weights."""
        if is_rehearsed or self._is_first_of_shards:
            recording = self._recorder.recording(models, with_layers=is_rehearsed)
            self._window_contexts.enter_context(recording)
        if is_rehearsed:
            if not self.backend.is_sharded:
                sees_modules = not self._is_traced
                self._weight_check.start(self.gradient.parameters, sees_modules=sees_modules)
                if self.backend.num_processes > 1:
                    modules = [*self._all_models, *self._others.modules]
                    kept = self._state_check.kept
                    self.gradient.norms = norms_by_name(modules, self.gradient.parameters, kept)
        elif self.watches_weights and not self._goes_on and not self.backend.is_sharded:
            self._weight_check.start(self.gradient.parameters, sees_modules=False)

    @property
    def _is_traced(self) -> bool:
        """Whether torch.compile would trace hooks of submodules, and compile again in each call."""
        return any(map(is_compiled, self.models))

    def count_experts(
        self,
        slots: Sequence[Slot],
        request: WindowRequest,
        forward: Callable[[Slot], Any] | None = None,
    ) -> None:
        """Make a first pass over the window if its models add the load-balancing loss of a mixture
        of experts to their loss, which needs how often each expert is chosen in the whole window.

        A collective, after `begin_window`.

        Args:
            slots: The micro-batches of this rank.
            request: The plan of the window.
            forward: Runs the loop's forward of a micro-batch. None: model(**batch).

        Raises:
            ConfigError: If the loop accumulates by hand, or under FSDP1.
            UnkeyedRandomness: If random numbers were drawn that are not keyed.
            ProcessFailed: If another rank failed.
        """
        if self._found_router is None or self._found_router.prepared != self.models:
            self._found_router = WindowRouter(self.models)
        router = self._found_router
        if not router.is_on:
            return
        if self._goes_on or any(isinstance(m, FullyShardedDataParallel) for m in self.models):
            raise ConfigError(
                "the balancing loss of a mixture of experts needs a first pass over the window, "
                "and a second backward through each forward: use FSDP2 instead of FSDP1; in a "
                "loop that accumulates by hand, pass gradient_accumulation_steps to Accelerator, "
                "and put the loop's body into `with accelerator.accumulate(model):`."
            )
        self._router = router
        self.gradient.sums.has_parts = True
        run = partial(run_first_pass, self, slots, request, forward or self._call_models)
        router.count_window(self.gradient.backend, slots, run)

    def _call_models(self, slot: Slot) -> None:
        """Run the models on a micro-batch as the loader returns it."""
        batch = slot.micro_batch.batch
        if not isinstance(batch, Mapping):
            raise ConfigError(
                "the balancing loss of a mixture of experts needs batches with named entries: let "
                f"the collate function return a dict, not a {type(batch).__name__}."
            )
        batch = self.backend.place(batch)
        for model in self.models:
            callable_module(model)(**argument_filter(model)(batch))

    def error_to_report(self, error: Exception) -> Exception:
        """Return what all ranks raise for an error in the current micro-batch: `TooLarge` if memory
        ran out and it can be split.
        """
        if self.slot is None or not is_out_of_memory(error):
            return error
        micro_batch = self.slot.micro_batch
        backend = self.backend
        if len(micro_batch) > 1 and backend.reason_not_to_split is None:
            return TooLarge(num_elements(micro_batch))
        return out_of_memory_error(backend.process_index, micro_batch, backend.reason_not_to_split)

    def restore_buffers(self) -> None:
        """Restore the models' buffers of before the window, because its samples come again: what
        counts samples (BatchNorm) must not count them twice.
        """
        self._others.restore()  # before the models: a module may hold one of them
        for restore in self._buffers_before:
            restore()

    def drop_rehearsal(self) -> None:
        """Compute the current window without comparing its samples with a rehearsal."""
        self._rehearsal = None

    def leave_window(self) -> None:
        """Give up the current window, or end it after `finish`."""
        self._close_window()
        self._weight_check.stop()

    def _close_window(self) -> None:
        """Undo what the current window replaced."""
        self.slot = None
        self._router = None
        contexts = self._window_contexts
        self._window_contexts = ExitStack()
        contexts.close()

    # Micro-batches

    @contextmanager
    def micro_batch(self, slot: Slot, request: WindowRequest) -> Iterator[None]:
        """Key all draws in the block, from the loop's first line to its last backward.

        Args:
            slot: The micro-batch.
            request: The plan of its window.
        """
        self.slot = slot
        self.num_adds = 0
        self._keys = set()
        self._request = request
        self._recorder.clear()
        self.backend.begin_micro_batch()
        keys = sample_keys(request.seed, request.epoch, slot.micro_batch.positions)
        key_of_window = window_key(request.seed, request.epoch, request.index)
        self.draws.begin(keys, key_of_window, self.backend.device)
        self.draw_check.begin()
        self._num_slots -= 1
        is_rehearsed = self._rehearsal is not None
        self._kept_values.begin_window((request.epoch, request.index), is_rehearsed=is_rehearsed)
        with ExitStack() as stack:
            if slot.is_filler:
                stack.enter_context(self._restored_after_backward())
            elif not slot.is_counted:
                for model in self._all_models:
                    # Of trained models in a rehearsal, those attributes that forwards change.
                    is_watched = slot.is_rehearsal and model in self.models
                    stack.callback(snapshot_state(model, with_attributes=not is_watched))
            if slot.is_rehearsal or self._follows_rehearsal:
                watching = self._state_check.watching(
                    [unwrapped(model) for model in self.models],
                    with_others=not self._is_traced,
                    restores=slot.is_rehearsal,
                )
                stack.callback(lambda: self._weight_check.note_buffers(self._state_check.kept))
                stack.enter_context(watching)
            if self._is_rehearsed and not self._is_traced:
                stack.enter_context(self._others.seeing())
            if self._watches_statistics(slot):
                stack.enter_context(self._recorder.statistics.watching(is_compiled=self._is_traced))
            if self._watches_kept_values(slot):
                stack.enter_context(self._kept_values.watching())
            stack.enter_context(without_cudnn_attention())
            stack.enter_context(self.draws.scope())
            stack.enter_context(self.speed_ups.micro_batch(slot))
            stack.enter_context(self._weight_check.seeing_modules())
            if self._router is not None:
                stack.enter_context(self._router.patched_in(slot))
            yield

    @contextmanager
    def _restored_after_backward(self) -> Iterator[None]:
        """Let the forwards of a filler leave nothing in any module from its backward on: what the
        loop changes after it, as on other ranks, stays.
        """
        restores = [snapshot_state(model) for model in self._all_models]
        others = OtherModules()
        others.begin_window(self._all_models)

        def restore() -> None:
            """Restore what modules held before. A graph that is kept may use it: it counts not."""
            buffers = [b for model in self._all_models for b in model.buffers()]
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                others.restore()
                for restore_model in restores:
                    restore_model()

        self._restore_filler = restore
        try:
            with nullcontext() if self._is_traced else others.seeing():
                yield
        finally:
            if not self.num_adds:
                restore()
            self._restore_filler = None

    def _watches_statistics(self, slot: Slot) -> bool:
        """Whether it is watched what the loop computes: in a rehearsal, in the micro-batch that
        follows, and by hand in the first one of several samples; but not always in all of a
        window, as what is compiled must be read, too. Under FSDP in the first one of a window.
        """
        if self._rehearsal is None:
            return self._is_first_of_shards and not self.gradient.num_backwards
        is_first = not self.gradient.num_backwards
        num_slots = self.gradient.sums.num_micro_batches // self.backend.num_processes
        is_first_of_several = self._rehearsal.num_samples == 1 and len(slot.micro_batch) > 1
        return (
            slot.is_rehearsal
            or is_first_of_several
            or (is_first and (num_slots > 2 or not self.has_rehearsed))
        )

    def _watches_kept_values(self, slot: Slot) -> bool:
        """Whether it is watched what the loop keeps for a later window: in a rehearsal, and in the
        last micro-batch of the first windows that have one.
        """
        if self._rehearsal is None or self._is_traced:
            return False
        return slot.is_rehearsal or (not self._num_slots and self._kept_values.sees_ends)

    def place(self, slot: Slot) -> Any:
        """Return a copy of the batch of the current micro-batch on the device."""
        batch = self.backend.place(slot.micro_batch.batch)
        self._recorder.statistics.note_batch(batch, len(slot.micro_batch))
        self._kept_values.note_batch(batch)
        return batch

    def add(
        self,
        loss: Tensor,
        num_targets: float | Tensor | None = None,
        *,
        retain_graph: bool = False,
        is_last: bool = False,
    ) -> None:
        """Read a loss of the current micro-batch, compare its samples with their rehearsal, and add
        its gradient to the window.

        Args:
            loss: The loss, a scalar.
            num_targets: What it is a sum over; None if it is a sum of means, which is read.
            retain_graph: As in `Tensor.backward`.
            is_last: Whether the micro-batch is the last one of the window on this rank.

        Raises:
            LossNotAdditive: If the loss is not a sum of means, or compares samples.
            UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        """
        self._recorder.statistics.stop()
        _check_scalar(loss)
        self._kept_values.check(loss)
        with self._kept_values.paused():
            self._add(loss, num_targets, retain_graph=retain_graph, is_last=is_last)

    def _add(
        self, loss: Tensor, num_targets: float | Tensor | None, *, retain_graph: bool, is_last: bool
    ) -> None:
        """Read, compare and add a loss, as described in `add`."""
        self.draw_check.check()
        self.draw_check.check_between_backwards()
        slot = self.slot
        self.num_adds += 1
        loss = loss.reshape(()) if loss.dim() else loss
        readings = self._switched_on(self.speed_ups.read(loss, num_targets))
        readings = self._with_known_keys(readings)
        part = None
        if self._router is not None:
            loss, readings = self._router.split(loss, readings, num_targets)
            part = self._part_of_router()
            if self._router.counts_padding and not self._request.pad_to_window:
                self.gradient.must_pad = True
                self.gradient.needs_padding = True
        self.looks.note(loss, readings, slot, is_keyed=not self.draw_check.has_unkeyed)
        self._note_samples(loss, readings)
        if self._recorder.statistics.is_on and not slot.is_filler:
            self._check_statistics(loss, readings)
        if self._rehearsal is not None and not slot.is_filler:
            self._compare(loss, readings)
        # What a sharded model keeps would be reduced together with the part.
        sync = partial(self._sync, is_last=is_last or self._router is not None)
        is_kept = retain_graph or part is not None
        if slot.is_rehearsal:
            self.gradient.note_rehearsal(readings)
        if not slot.is_counted:  # a collective with shards, where another rank may have a filler
            with self.speed_ups.in_backward():
                self.gradient.sums.add_nothing(loss, readings, retain_graph=is_kept, sync=sync)
        else:
            with self.speed_ups.in_backward():
                self.gradient.add(loss, readings, retain_graph=is_kept, sync=sync)
        if part is not None:
            with self.speed_ups.in_backward():
                sums = self.gradient.sums
                sums.add_part(part, loss, readings, retain_graph=retain_graph, sync=sync)
        # If the window is repeated, its groups may be others than those of earlier chunks.
        if slot.is_counted and self.gradient.must_repeat is None:
            self.gradient.sums.end_micro_batch()
        self.draws.after_backward()
        self._weight_check.note()
        if self._restore_filler is not None:
            self._restore_filler()

    def _switched_on(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return the readings whose factor is not 0; the gradient is told of the others."""
        key_of = self.gradient.same_terms.key_of
        switched_off = [
            replace(reading, key=key_of((self.num_adds, reading.key)))
            for reading in readings
            if reading.is_switched_off
        ]
        if not self.slot.is_filler:
            self.gradient.note_switched_off(switched_off, is_counted=self.slot.is_counted)
        return [reading for reading in readings if not reading.is_switched_off]

    def _with_known_keys(self, readings: Sequence[Reading]) -> list[Reading]:
        """Return readings with the keys that stand for their terms, and note which are in one
        micro-batch: no two of a loss may have the same one.
        """
        same_terms = self.gradient.same_terms
        result = []
        for reading in readings:
            key = same_terms.key_of((self.num_adds, reading.key))
            result.append(replace(reading, key=key))
            if not self.slot.is_filler:
                self._keys.add(key)
        if len({reading.key for reading in result}) < len({reading.key for reading in readings}):
            raise LossNotAdditive(
                "two terms of the loss were found to be one mean that different layers compute "
                f"({result[0].name}), but this micro-batch has both. Let each micro-batch have the "
                "same terms: a term may be 0, as outputs.sum() * 0."
            )
        same_terms.note(self._keys)
        return result

    def _note_samples(self, loss: Tensor, readings: Sequence[Reading]) -> None:
        """Note the samples of a counted micro-batch, and how wide it is, once."""
        is_noted = self.num_adds > 1 and self.gradient.num_backwards
        if not self.slot.is_counted or is_noted:
            return
        self.gradient.samples.add(self.slot.micro_batch.positions)
        terms = data_terms(readings) if self.gradient.tries_widths else set()
        self.gradient.widths.append(self.looks.note_width(self.slot, terms, loss))

    def _part_of_router(self) -> Tensor | None:
        """Return what the micro-batch adds to the window's balancing loss of a mixture of experts;
        None for nothing; zero if it is not counted, but a backward is a collective.
        """
        if self.slot.is_counted:
            return self._router.part(self.num_adds)
        if self.gradient.backend.is_sharded:
            part = self._router.part(self.num_adds, is_counted=False)
            return None if part is None else part * 0
        return None

    def _compare(self, loss: Tensor, readings: Sequence[Reading]) -> None:
        """Record the samples of a rehearsal, or compare those of the window with it: refuse a
        gradient of a sample that differs in other company.
        """
        if self.draw_check.has_unkeyed:
            self._warnings.once(WITHOUT_REHEARSAL)
            self.drop_rehearsal()  # it does not repeat them
            return
        rehearsal = self._rehearsal
        positions = self.slot.micro_batch.positions.tolist()
        widths = widths_of(self.slot.micro_batch.batch)
        data_readings = [r for r in readings if r.term is None or not r.term.is_penalty]
        footprints = self._footprints(loss, data_readings, positions)
        if self._is_in_rehearsal:
            rehearsal.widths = widths
            rehearsal.record(
                footprints, data_readings, self.num_adds, self.draws.num_reclassified, positions
            )
            return
        if rehearsal.num_reclassified != self.draws.num_reclassified:
            # Draws of the rehearsal, and of what was added, were keyed otherwise.
            if self.gradient.num_backwards or not self._goes_on:
                self.gradient.must_repeat = "the dims of random numbers with samples were found"
            self._rehearsal = Rehearsal()
            return
        names = {reading.key: reading.name for reading in readings}
        rehearsal.widths_now = widths
        rehearsal.num_samples_now = len(positions)
        same = rehearsal.same_term(footprints, data_readings, self.num_adds)
        if same is not None and not self.gradient.same_terms.are_two(*same):
            self.gradient.same_terms.join(*same)
            self.gradient.must_repeat = "one term of the loss was computed by different layers"
            return
        missing = rehearsal.missing_term(footprints, data_readings, self.num_adds, positions)
        difference = rehearsal.difference(footprints)
        if rehearsal.has_other_width:
            self._terms_in_two_widths |= rehearsal.terms_with_gradient
        if missing is None and difference is None:
            self._try_padding()
            return
        self.check_weights()  # names what changes, if that is the cause
        # A loop by hand cannot be given the window again, which helps if widths differ.
        can_help = not self._goes_on or rehearsal.has_other_width
        if can_help and not self._request.pad_to_window:
            self.gradient.must_pad = True
            self.gradient.needs_padding = True
            return
        if missing is not None:
            raise computed_in_two_ways(missing)
        backward_code = self._recorder.backward_code.below([loss.grad_fn]).names
        raise depends_on_company(names[difference.term], difference, backward_code)

    @property
    def _is_in_rehearsal(self) -> bool:
        """Whether the current micro-batch is a rehearsal, or may become one."""
        return self.slot.is_rehearsal or self.slot.may_be_rehearsal

    def _footprints(
        self, loss: Tensor, readings: Sequence[Reading], positions: Sequence[int]
    ) -> dict[FootprintKey, Footprints]:
        """Return the footprints of the samples of a rehearsal, or of those that come again."""
        chosen = [
            sample
            for sample, position in enumerate(positions)
            if self._is_in_rehearsal or position in self._rehearsal.positions
        ]
        footprints, is_low_precision = footprints_of(
            loss, readings, self._recorder, positions, chosen
        )
        self._rehearsal.is_low_precision |= is_low_precision
        inside = footprints_inside(
            loss,
            readings,
            self._recorder,
            positions,
            chosen,
            can_run=not self.backend.is_sharded,  # its hooks on the graph gather parameters
        )
        return footprints | inside

    def _try_padding(self) -> None:
        """Let the window be computed again with one padded width, if samples that were compared in
        two widths differ a little: that may be rounding, or an effect of the padding (a model
        without a mask).
        """
        if self._goes_on or self._request.pad_to_window:
            return
        if self._state is None or self._state.is_padding_tried:
            return
        self.gradient.must_pad |= self._padding_trial.asks(self._rehearsal)

    def _check_statistics(self, loss: Tensor, readings: Sequence[Reading]) -> None:
        """Check that the loop compared no samples with a statistic of the micro-batch, nor with
        numbers that are others in the rehearsal, as such statistics are.
        """
        rehearsed = {} if self._rehearsal is None else self._rehearsal.numbers
        for reading in readings:
            nodes = [loss.grad_fn] if reading.term is None else reading.term.nodes
            numbers: dict[tuple[TermKey, str], set[frozenset[float]]] = defaultdict(set)
            for step in self._recorder.steps_below(nodes):
                if step.is_mixed:
                    raise compared_with_statistic(reading.name, step.function)
                numbers[reading.key, step.function].add(step.numbers)
            if self._is_in_rehearsal:
                rehearsed |= numbers
            for key, of_function in numbers.items():
                of_rehearsal = rehearsed.get(key, of_function)
                # Fewer of the same numbers: those of the classes that this micro-batch has.
                if of_function - of_rehearsal and of_rehearsal - of_function:
                    raise compared_with_statistic(reading.name, key[1])

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Let an error of hf_ga on this rank be raised on all ranks, at the window's end.

        If only this rank raised at once, the others would wait for it. It raises at once on a
        single rank, and under FSDP, which cannot go on without it.
        """
        try:
            yield
        except HfGaError as error:
            backend = self.gradient.backend
            if backend.num_processes == 1 or backend.is_sharded:
                raise
            self.gradient.failure = self.gradient.failure or error
            self.num_adds = max(self.num_adds, 1)  # a refused loss counts: all ranks finish

    def _sync(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward, in which sharded models reduce their gradients if it is
        the last one, see `Backend.sync`.
        """
        stack = ExitStack()
        for model in self.models:
            stack.enter_context(self.gradient.backend.sync(model, is_last))
        return stack

    # The window's end

    def check_weights(self) -> None:
        """Check, before the optimizer steps, that no weight changed since the first backward.

        Raises:
            ConfigError: If one did.
        """
        self._weight_check.check()

    def note_step(self) -> None:
        """Note that an optimizer has stepped: weights change."""
        self._weight_check.restart()

    def finish(self, *, can_repeat: bool, adds: bool = False) -> bool:
        """Finish the window: see `WindowGradient.finish`. Restores the models' buffers if it must
        be computed again.
        """
        self.looks.ask(self.gradient, self._rehearsal)
        # One that is computed again was compared in part.
        is_final = not self.gradient.must_pad and self.gradient.must_repeat is None
        is_final = is_final and self.gradient.failure is None
        rehearsal = self._rehearsal
        has_uncompared = (
            rehearsal is not None and rehearsal.is_compared and bool(rehearsal.uncompared)
        )
        if has_uncompared and is_final:
            self._warnings.once(
                "hf_ga: no output of the prepared models has rows of samples, so it was not tried "
                "whether a sample's loss depends on the other samples of its micro-batch."
            )
        try:
            self.check_weights()
            self.looks.check_attempts(self.gradient)
            if self._router is not None:
                self._router.check_window()
        except HfGaError as error:  # of this rank: all ranks finish
            self.gradient.failure = self.gradient.failure or error
        gradient = self.gradient
        state = self._state
        is_padded = self._request is not None and self._request.pad_to_window
        max_micro_batches = 1 if self._request is None else self._request.max_micro_batches
        gradient.checks.compares_rehearsal = max_micro_batches > 1 or self._rehearsal is not None
        gradient.needs_padding |= self._padding_trial.helps(self._rehearsal)
        if can_repeat and self._request is not None:
            gradient.samples.expect(self._request.positions)
        gradient.computed = self.speed_ups.computed
        gradient.has_compared_widths = self.has_compared_widths
        is_done = gradient.finish(is_padded=is_padded, can_repeat=can_repeat, adds=adds)
        self.looks.follow(gradient)
        if state is not None:
            state.is_width_tried |= gradient.has_compared_widths
        if is_done and self._is_rehearsed:
            self.has_rehearsed = True
            self._modes = _modes_of(self.models)
        if is_done and self._is_full_batch:
            warn_of_doubtful_draws(self.draws, self._warnings)
        elif is_done and not gradient.sums.has_exact_loss:
            self._warnings.once(INEXACT_LOSS)
        if is_done:
            for model in self.models:
                gradient.backend.drop_unused(model, self.unused)
        if is_done and self.looks.is_on:
            if self.looks.end() and state is not None:
                state.is_width_tried = True  # also if its batches cannot be padded
            gradient.must_repeat = "it was tried with a rehearsal"
            gradient.shown.withdraw()
            is_done = False
        if not is_done:
            self.restore_buffers()
        else:
            self._buffers_before = []  # which may keep outputs of earlier forwards
            self._others.end_window()
        if is_done or gradient.is_misread:
            self.looks.forget_attempts()
        if state is None:
            return is_done
        if gradient.must_pad:
            self._padding_trial.begin(state)
        elif is_done:
            self._padding_trial.end(state, needs_padding=gradient.needs_padding)
        state.has_unpadded |= is_done and not is_padded
        if is_done:
            state.computed = gradient.computed
        return is_done

    def show_mean_so_far(self, times: int) -> None:
        """Set `.grad` to the gradient of the mean so far, for a loop that accumulates by hand."""
        mean = self.gradient.mean_so_far(is_padded=self._request.pad_to_window)
        self.gradient.show(mean, times=times)


def _modes_of(models: Sequence[nn.Module]) -> tuple[tuple[bool, ...], ...]:
    """Return which modules of some models are in training mode."""
    return tuple(module_modes(model) for model in models)


def data_terms(readings: Sequence[Reading]) -> set[TermKey]:
    """Return the terms of readings that are not penalties on parameters."""
    return {r.key for r in readings if r.term is None or not r.term.is_penalty}


def _check_scalar(loss: Tensor) -> None:
    """Check that a loop passed a tensor with one element, which needs a gradient, to `backward`."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if not loss.requires_grad:
            raise LossNotAdditive(
                "the loss needs no gradient: it was detached, or computed under torch.no_grad or "
                "by frozen parameters. For a micro-batch without targets, pass outputs.sum() * 0."
            )
        return
    found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise LossNotAdditive(
        f"backward takes a loss with one element, got {found}: average it over what should count "
        "equally, for example loss.mean(). In a rehearsal, batches of one sample have two or more."
    )


def trainable_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Return the parameters that a loop trains: those of models, then others of its optimizers.

    Those of FSDP2 are shards. A forward without a backward (an evaluation) leaves whole parameters
    in the place of some, which the optimizer does not know: shard them again.
    """
    for model in models:
        if isinstance(model, FSDPModule):
            for unit in fsdp2_units(model):
                unit.reshard()
    modules = [module for model in models for module in modules_of(model) if module._parameters]
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    for optimizer in optimizers:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
    by_id = {id(parameter): parameter for parameter in parameters}
    return [parameter for parameter in by_id.values() if parameter.requires_grad]


def _switch_off_reducer(model: nn.Module) -> None:
    """Let DDP sum no gradients, as `finish` does, and search for no unused parameters, for which it
    would return copies of outputs.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False
        model.find_unused_parameters = False
        model.static_graph = False


def _warn_of_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Warn of hooks on parameters of which this rank has a part or a stage."""
    if any(map(has_hooks, parameters)):
        logger.warning(
            "hf_ga: a parameter has a hook. FSDP does not call it, and a pipeline does so for "
            "each micro-batch: change parameter.grad before optimizer.step() instead."
        )
