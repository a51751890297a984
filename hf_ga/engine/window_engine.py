"""Computes a window for a loop that runs its own forwards: keyed draws around them, and the loss
that it passes to `backward` read, compared with its rehearsal, and added to the window's gradient.

    begin_window(...)
    for each iteration:
        with micro_batch(...):   draws belong to samples; outputs are recorded in rehearsals
            loss = ...           any code of the loop's
            add(loss)            reads, compares, adds
    finish(...)                  one sum over ranks; `.grad` appears
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import accelerate
import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.divisors import Reading
from hf_ga.engine.gradient import WindowGradient
from hf_ga.engine.rehearsal import OutputRecorder, Rehearsal, footprints_of
from hf_ga.engine.slots import Slot
from hf_ga.errors import HfGaError, LossNotAdditive, UnkeyedRandomness
from hf_ga.exact.fetch import WindowRequest
from hf_ga.exact.forward import snapshot_buffers, unwrapped
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.loss import Loss
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.parallel.fsdp import backend_for

logger = get_logger(__name__)


class WindowEngine:
    """Computes the gradient of one window at a time.

    Args:
        accelerator: The accelerator of the loop.
        allow_split_dependent_randomness: Whether draws that cannot be tied to samples are accepted.

    Attributes:
        draws: Keys the random draws of a micro-batch.
        gradient: The sums of the current window. None before the first one.
        slot: The current micro-batch. None between two of them.
        num_adds: How many losses of the current micro-batch were added.
    """

    def __init__(
        self, accelerator: accelerate.Accelerator, *, allow_split_dependent_randomness: bool
    ) -> None:
        """Start before the first window."""
        self.accelerator = accelerator
        self.draws = KeyedDraws(allow_unkeyed=allow_split_dependent_randomness)
        self.gradient: WindowGradient | None = None
        self.slot: Slot | None = None
        self.num_adds = 0
        self._models: list[nn.Module] = []
        self._request: WindowRequest | None = None
        self._recorder = OutputRecorder()
        self._rehearsal: Rehearsal | None = None  # of the current window
        self._random_states: dict[str, bytes] = {}
        self._has_warned = False
        self._window_contexts = ExitStack()

    # Windows

    def begin_window(
        self,
        models: Sequence[nn.Module],
        parameters: Sequence[nn.Parameter],
        *,
        is_rehearsed: bool,
        is_full_batch: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Begin a window, or begin it again.

        Args:
            models: The prepared models that are trained.
            parameters: The trainable parameters, of the models and beside them.
            is_rehearsed: Whether a micro-batch of the window is a rehearsal.
            is_full_batch: Whether a single micro-batch is the whole window.
            goes_on: Whether the sums so far belong to the window, of a loop that accumulates by
                hand.
        """
        self.leave_window()
        self._models = list(models)
        parameters = list(parameters)
        if self.gradient is None or self.gradient.parameters != parameters:
            self.gradient = WindowGradient(backend_for(self.accelerator), parameters)
        elif not goes_on:
            self.gradient.begin()
        backend = self.gradient.backend
        for model in models:
            backend.begin(model, Loss())
            backend.reshard(model)
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = False  # `finish` sums the gradients
        # Micro-batches of other sizes follow, or there is only one.
        self.gradient.stack_sizes.may_change = is_rehearsed or is_full_batch
        self._rehearsal = Rehearsal() if is_rehearsed else None
        if is_rehearsed:
            recording = self._recorder.recording(
                [unwrapped(model) for model in models], with_submodules=not backend.is_sharded
            )
            self._window_contexts.enter_context(recording)

    def leave_window(self) -> None:
        """Give up the current window, or end it after `finish`."""
        self.slot = None
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
        self._request = request
        self._recorder.clear()
        device = self.accelerator.device
        keys = sample_keys(request.seed, request.epoch, slot.micro_batch.positions)
        key_of_window = window_key(request.seed, request.epoch, request.index)
        self.draws.begin(keys.to(device), key_of_window.to(device))
        if not self.draws.allow_unkeyed:
            self._random_states = random_states()
        with ExitStack() as stack:
            if slot.is_rehearsal:
                for model in self._models:
                    stack.callback(snapshot_buffers(model))
            stack.enter_context(self.draws.scope())
            yield

    def add(
        self,
        loss: Tensor,
        num_targets: float | Tensor | None = None,
        *,
        retain_graph: bool = False,
        is_last: bool = False,
    ) -> int:
        """Read a loss of the current micro-batch, compare its samples with their rehearsal, and add
        its gradient to the window.

        Args:
            loss: The loss, a scalar.
            num_targets: What it is a sum over; None if it is a sum of means, which is read.
            retain_graph: As in `Tensor.backward`.
            is_last: Whether the micro-batch is the last one of the window on this rank.

        Returns:
            The number of terms of the loss.

        Raises:
            LossNotAdditive: If the loss is not a sum of means, or compares samples.
            UnkeyedRandomness: If a random number was drawn that cannot be tied to samples.
        """
        _check_scalar(loss)
        self._check_draws()
        slot = self.slot
        self.num_adds += 1
        loss = loss.reshape(()) if loss.dim() else loss
        readings = self.gradient.read(loss, len(slot.micro_batch), num_targets)
        readings = [replace(r, key=(self.num_adds, r.key)) for r in readings]
        if self._rehearsal is not None and not slot.is_filler:
            self._compare(loss, readings)
        sync = self._sync_when_last if is_last else self._sync
        if slot.is_rehearsal:
            self.gradient.note_rehearsal(readings)
        elif slot.is_filler:
            self.gradient.add_nothing(loss, readings, sync=sync)
        else:
            self.gradient.add(loss, readings, retain_graph=retain_graph, sync=sync)
        self.draws.after_backward()
        return len(readings)

    def _check_draws(self) -> None:
        """Check that no random number was drawn since the micro-batch began but by keyed draws.

        Raises:
            UnkeyedRandomness: If one was.
        """
        if self.draws.allow_unkeyed:
            return
        moved = moved_generators(self._random_states)
        unkeyed = self.draws.unkeyed_after_backward
        if not moved and unkeyed is None:
            return
        source = unkeyed or f"from the generator of {' and '.join(moved)}"
        raise UnkeyedRandomness(
            f"the loop or the model drew random numbers ({source}) that cannot be tied to samples, "
            "so they depend on the split of the window. Draw with torch's functions, one row for "
            "each sample, or in the dataset or collate function; or accept it with "
            "Accelerator(allow_split_dependent_randomness=True)."
        )

    def _compare(self, loss: Tensor, readings: Sequence[Reading]) -> None:
        """Record the samples of a rehearsal, or compare those of the window with it.

        Raises:
            LossNotAdditive: If a sample's gradient differs in other company.
        """
        rehearsal = self._rehearsal
        positions = self.slot.micro_batch.positions.tolist()
        data_readings = [r for r in readings if r.term is None or not r.term.is_penalty]
        footprints, is_low_precision = footprints_of(loss, data_readings, self._recorder, positions)
        rehearsal.is_low_precision |= is_low_precision
        if self.slot.is_rehearsal:
            terms = [reading.key for reading in data_readings]
            rehearsal.record(footprints, terms, self.draws.num_reclassified)
            return
        if rehearsal.num_reclassified != self.draws.num_reclassified:
            # Draws of the rehearsal were keyed otherwise.
            self.gradient.must_repeat = "the dims of random numbers that hold samples were found"
            self._rehearsal = Rehearsal()
            return
        difference = rehearsal.difference(footprints)
        if difference is None:
            return
        if not self._request.pad_to_window:
            self.gradient.must_pad = True
            return
        term, before, now = difference
        name = next(r.name for r in readings if r.key == term)
        raise LossNotAdditive(
            f"{name}: the gradient of a sample at the model's outputs was {before:.6g} among some "
            f"samples of the window and {now:.6g} among others, so its loss depends on the other "
            "samples of its micro-batch (BatchNorm, in-batch negatives, statistics or mixtures "
            "over the batch, state that the loop keeps), and no split of the window is the full "
            "batch. Compute it for each sample alone, in the dataset or collate function, or over "
            "the whole window with whole_batch."
        )

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

    def _sync(self) -> AbstractContextManager[None]:
        """Return the context of a backward in which sharded models keep their gradients."""
        return self._sync_models(is_last=False)

    def _sync_when_last(self) -> AbstractContextManager[None]:
        """Return the context of a backward in which sharded models reduce their gradients."""
        return self._sync_models(is_last=True)

    def _sync_models(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the contexts of all models, see `Backend.sync`."""
        stack = ExitStack()
        for model in self._models:
            stack.enter_context(self.gradient.backend.sync(model, is_last))
        return stack

    # The window's end

    def finish(self, *, can_repeat: bool, keeps_sums: bool) -> bool:
        """Finish the window: see `WindowGradient.finish`."""
        if self._rehearsal is not None and self._rehearsal.uncompared and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "hf_ga: no output of the prepared models has rows of samples, so it was not tried "
                "whether a sample's loss depends on the other samples of its micro-batch."
            )
        return self.gradient.finish(
            is_padded=self._request.pad_to_window, can_repeat=can_repeat, keeps_sums=keeps_sums
        )

    def show_mean_so_far(self, times: int) -> None:
        """Set `.grad` to the gradient of the mean so far, for a loop that accumulates by hand."""
        mean = self.gradient.mean_so_far(is_padded=self._request.pad_to_window)
        self.gradient.show(mean, times=times)


def _check_scalar(loss: Tensor) -> None:
    """Check what a loop passed to `backward`.

    Raises:
        LossNotAdditive: If it is no tensor with one element, or needs no gradient.
    """
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
        "equally, for example loss.mean()."
    )


def trainable_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Parameter]:
    """Return the parameters that a loop trains: those of models, then others of its optimizers."""
    parameters = [p for model in models for p in model.parameters()]
    for optimizer in optimizers:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
