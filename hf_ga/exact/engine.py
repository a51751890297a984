"""The engine: turns the micro-batches of a window into the gradient of the window's mean loss.

Every loop drives it: `train_step`, Accelerate's own loop with `hf_ga.Accelerator`, Trainer's in
`ExactTrainer`, evaluation, the search for non-finite numbers, and the proof.

    loss of the window = sum over all micro-batches of (sum of the loss) / (targets of the window)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn

from hf_ga.errors import ConfigError, DataError, ProcessFailed, UnkeyedRandomness
from hf_ga.exact.backend import Backend, RankStatus, sum_counts
from hf_ga.exact.forward import argument_filter, callable_module, extra_forwards, unwrapped
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import FirstPass, Loss, Sums
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.memory import TooLarge, is_out_of_memory, num_elements, too_large_for
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window
from hf_ga.exact.window_audit import WindowAudit

FILLER_INDEX = -1  # the index of a call that repeats a sample because a loop needs one more batch


class Engine:
    """Computes windows of one model.

    Args:
        backend: How ranks communicate, from `hf_ga.parallel.fsdp.backend_for`.
        model: The prepared model.
        rule: What was proven about the model.
        module: What computes the outputs and the loss of a batch, if it is not the model itself.
        allow_split_dependent_randomness: Do not check that no random generator moved.
        is_audited: Test the rule again on the data that is trained on (see `audit.py`).
        audits_together: All ranks make the same number of forwards in their audits, because the
            loss of a batch is a collective.

    Attributes:
        window: The window that was begun.
        calls: The forwards of this rank in this window, in their order.
        call: The last call that was begun, with its batch on the device.
        totals: The targets of the window over all ranks.
        has_targets: Whether there are any.
        status: What this rank computed so far.

    Example:
        engine.begin(window)
        with engine.scope():
            for index in range(len(engine.calls)):
                with engine.micro_batch(index) as batch:
                    engine.backward(engine.forward(batch))
        result = engine.end()
    """

    def __init__(
        self,
        backend: Backend,
        model: nn.Module,
        rule: Rule,
        *,
        module: nn.Module | None = None,
        allow_split_dependent_randomness: bool = False,
        is_audited: bool = False,
        audits_together: bool = False,
    ) -> None:
        self.backend = backend
        self.model = model
        draws_apart = allow_split_dependent_randomness or getattr(rule.dropout, "unkeyed", ())
        self.is_audited = is_audited and not draws_apart
        self.audits_together = audits_together or backend.is_sharded
        self.rule = rule
        self.loss = rule.loss
        self.hooks = (rule.loss, rule.dropout)
        backend.reshard(model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.allow_split_dependent_randomness = allow_split_dependent_randomness
        self.calls: list[Call] = []
        self.call: Call | None = None
        self.totals: Counts = ()
        self.has_targets = True
        self.is_training = True
        self._module = callable_module(model) if module is None else module
        self._accepted = argument_filter(self._module)

    # The order of calls: begin, then for each micro-batch forward and backward, then end.

    def begin(
        self,
        window: Window,
        *,
        training: bool = True,
        skip_empty: bool = True,
        num_calls: int | None = None,
    ) -> None:
        """Count the targets of a window, and plan the forwards of this rank.

        Args:
            window: The window; its micro-batches are those of this rank.
            training: False for forwards only, as in an evaluation: ranks exchange nothing.
            skip_empty: Leave out micro-batches without targets, whose own mean would be 0 / 0.
            num_calls: Plan exactly this many calls, for a loop that makes one forward for each
                batch of a loader of known length. Those beyond this rank's micro-batches repeat a
                sample and have weight 0.

        Raises:
            ConfigError: If a setting makes exact gradients impossible.
            ProcessFailed: If another rank failed.
        """
        self.window = window
        self.calls = []
        self.call = None
        self.is_training = training
        self.loss = self.rule.loss
        self.status = self._empty_status()
        if training:
            self.backend.begin(self.model, self.loss)
        with self.deferring_failures():
            self._plan(window, skip_empty, num_calls)
            self.audit = WindowAudit(self)
        # Sums that are made during the backward are no place to learn that a rank has failed.
        if self.status.failure is not None or self.backend.overlaps_all_reduce:
            self.backend.all_reduce_status(self.status)  # raises on all ranks
        if self.audits_together:
            self.audit.run_together()

    def count_in_forward(self, loss: Loss) -> None:
        """Before the first backward: the loop passes other sums than the proven loss has, and
        counts their targets itself.

        Args:
            loss: Takes what is passed to `backward`; it counts in the forward.

        Raises:
            ConfigError: Under FSDP, if micro-batches were left out because they have no labels.
        """
        own = {call.index for call in self.calls if call.weight}
        if self.backend.is_sharded and len(own) < len(self.window.micro_batches):
            raise ConfigError(
                "under FSDP a micro-batch without labels is left out, so its num_targets cannot be "
                "counted: use DDP, or leave samples without labels out."
            )
        self.loss = loss
        self.totals = (self.window.num_samples,)
        self.has_targets = True
        self.status.counts = (0,)
        self.calls = [
            call if call.index == FILLER_INDEX else replace(call, weight=1) for call in self.calls
        ]
        self.call = replace(self.call, weight=int(self.call.index != FILLER_INDEX))

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around forwards and backwards: keyed dropout is in effect."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.scope(self._module))
            yield

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[dict[str, Any]]:
        """Around one forward and backward, with the speed-ups that change nothing for this
        micro-batch. Gives the batch on the device.

        Args:
            index: Which of the planned `calls`.

        Raises:
            UnkeyedRandomness: If the block drew from a random generator.
        """
        planned = self.calls[index]
        is_last = index == len(self.calls) - 1
        before = random_states() if self.is_training else {}
        with (
            self.backend.sync(self.model, is_last or not self.is_training),
            self._started(planned),
        ):
            yield self.call.batch
            self.check_generators(before)

    def check_generators(self, before: dict[str, bytes]) -> None:
        """Check that no random generator moved.

        Args:
            before: `random_states`.

        Raises:
            UnkeyedRandomness: If one did.
        """
        moved = moved_generators(before)
        if moved and not self.allow_split_dependent_randomness:
            raise UnkeyedRandomness(
                f"{self.window.description} drew from {' and '.join(moved)} although the probing "
                "forward did not: this randomness depends on the split of the window. Switch it "
                "off, or accept it with allow_split_dependent_randomness."
            )

    def arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the entries of a batch that the model's forward accepts."""
        return self._accepted(batch)

    def forward(self, batch: dict[str, Any]) -> Any:
        """Compute the model's outputs for a batch on the device, under autocast."""
        # A prepared model has autocast of its own; another one must not be left in float32.
        with self.backend.autocast():
            return self._module(**self._accepted(batch))

    def sums(self, outputs: Any) -> tuple[Sums, Counts]:
        """Sum the loss of the current micro-batch over its targets, and count them.

        Args:
            outputs: What the model returned for it, or its loss alone.
        """
        return self.loss.sums(outputs, self.call)

    def mean(self, outputs: Any) -> Tensor:
        """Compute the mean loss over the targets of the current micro-batch alone."""
        return torch.as_tensor(self.loss.mean(*self.sums(outputs)))

    def loss_term(
        self, outputs: Any, *, is_recomputable: bool = True
    ) -> tuple[Tensor | float, Counts]:
        """Compute what the current micro-batch adds to the window's mean loss, and its targets.

        Args:
            outputs: What the model returned for it, or its loss alone.
            is_recomputable: False if the loop added something to that loss (a penalty).
        """
        sums, counts = self.sums(outputs)
        if is_recomputable:
            self.audit.keep(outputs, sums, counts)
        return self.loss.mean(sums, self.totals), counts

    def backward(self, outputs: Any, *, is_recomputable: bool = True) -> None:
        """Make the backward of the current micro-batch's term.

        Args:
            outputs: What the model returned for it, or its loss alone.
            is_recomputable: See `loss_term`.
        """
        with self.backend.autocast():
            term, counts = self.loss_term(outputs, is_recomputable=is_recomputable)
        self.backward_term(term, counts)

    def backward_term(self, term: Tensor | float, counts: Counts) -> None:
        """Make the backward of a term of the window's mean loss.

        Args:
            term: A scalar, already divided by the targets of the window.
            counts: The targets of the micro-batch, one number for each mean of the loss.
        """
        if not self.has_targets:
            return
        weight = self.call.weight * self.loss.contributes(counts)
        self.backend.backward(term, weight)
        if weight:
            found = counts if self.loss.counts_in_forward else ()
            self.backend.after_backward(
                self.call, torch.as_tensor(term).detach(), found, self.status
            )

    def end(self) -> StepResult:
        """After the last backward: one status of all ranks, one sum of their gradients.

        Returns:
            The window's mean loss and its number of targets; `.grad` has the window's gradient.

        Raises:
            Exception: A failure of this rank that was kept (see `deferring_failures`).
            ProcessFailed: If another rank failed. Nothing was updated on any rank.
        """
        if not self.audits_together:
            with self.deferring_failures():
                self.audit.run()
        self.status.has_gradient = [p.grad is not None for p in self.parameters]
        if self.has_targets:
            self.backend.finish_overlap(self.status)
        status = self.backend.all_reduce_status(self.status)
        if self.has_targets:
            self.window.state.has_gradient[unwrapped(self.model)] = status.has_gradient
        self.backend.reduce_gradients(self.model, status, self.rule.unused)
        for parameter, gradient in self.loss.own_gradients:
            add_gradient(parameter, gradient)
        total = sum(status.counts)
        if total == 0 and self.loss.counts_in_forward and bool(status.loss != 0):
            raise DataError(
                f"{self.window.description}: the numbers of targets (or weights) add up to 0, but "
                f"the sum of the loss is {float(status.loss):.4g}, so there is no mean. Nothing "
                "was updated: leave such samples out, or make the window larger."
            )
        num_targets = int(total) if float(total).is_integer() else total
        result = StepResult(status.loss, num_targets, skipped=total == 0)
        if self.loss.counts_in_forward:
            self._divide_by(total, result)
        return result

    def _divide_by(self, total: float, result: StepResult) -> None:
        """Divide by the targets that the forwards counted: until now the divisor was the number of
        samples.
        """
        factor = self.window.num_samples / (total or 1.0)
        result.loss_tensor = result.loss_tensor * factor
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @contextmanager
    def deferring_failures(self) -> Iterator[None]:
        """Keep an error of the block for the exchange of status, in which all ranks raise.

        So no rank waits for one that is gone. Under FSDP, where every forward is a collective, a
        rank that fails ends at once, unless it can `rejoin` the others.
        """
        try:
            yield
        except (ProcessFailed, TooLarge):
            raise
        except Exception as error:
            self.status.failure = self._with_remedy(error)
            if self.backend.is_sharded:
                raise self.status.failure from error

    def can_rejoin(self, error: Exception) -> bool:
        """Whether this rank can go on after an error in a micro-batch, with `rejoin`."""
        return (
            self.backend.can_rejoin
            and is_out_of_memory(error)
            and self.status.failure is None
            and len(self.call.micro_batch) > 1
        )

    def rejoin(self, index: int) -> None:
        """Make the forwards and backwards that the other ranks wait for, where every one of them is
        a collective, with one sample that does not count. `end` tells all ranks of the failure.

        Args:
            index: Of the call in which memory ran out.
        """
        self.status.failure = TooLarge(num_elements(self.call.micro_batch))
        filler = replace(stand_in_call(self.window, self.loss), weight=0, index=FILLER_INDEX)
        self.calls[index:] = [filler] * (len(self.calls) - index)
        self.backend.rejoin(self.model)
        clear_device_cache(garbage_collection=True)

    def _with_remedy(self, error: Exception) -> Exception:
        """Return the error, or where memory ran out one that says what can be done about it."""
        if not is_out_of_memory(error) or self.call is None:
            return error
        micro_batch = self.call.micro_batch
        reason_not_to_split = self.backend.reason_not_to_split
        if len(micro_batch) > 1 and not reason_not_to_split:
            return TooLarge(num_elements(micro_batch))
        return too_large_for(self.backend.process_index, micro_batch, reason_not_to_split)

    def _empty_status(self) -> RankStatus:
        """The status of this rank before its first forward."""
        return RankStatus(
            loss=torch.zeros((), dtype=sum_dtype(self.backend.device), device=self.backend.device),
            counts=(0,) * self.loss.num_means,
            has_gradient=(False,) * len(self.parameters),
        )

    def _plan(self, window: Window, skip_empty: bool, num_calls: int | None) -> None:
        """Count targets, exchange the counts, make a first pass if the loss needs one.

        Args:
            window: See `begin`.
            skip_empty: See `begin`.
            num_calls: See `begin`.
        """
        if self.rule.pad_to_window:
            window = window.padded_to_window()
        if self.backend.can_split:
            window = window.fitting()
        self.window = window
        calls = [
            Call(micro_batch, index=i, counts=self.loss.count(micro_batch.batch, len(micro_batch)))
            for i, micro_batch in enumerate(window.micro_batches)
        ]
        if self.is_training:
            self.totals = self._count(window, calls)
            self.has_targets = any(self.totals)
        if self.has_targets or not self.is_training:
            self._equalize(calls, skip_empty)
        if self.has_targets and self.is_training:
            known = window.state.has_gradient.get(unwrapped(self.model))
            self.backend.set_up_overlap(self.parameters, known)
        if num_calls is not None:
            self._fill_up(calls, num_calls)
        if self.loss.needs_first_pass and self.has_targets and self.is_training:
            with self.scope(), self.backend.autocast(), extra_forwards(self.model):
                self.totals = self.loss.prepare(self._first_pass())

    def _fill_up(self, calls: list[Call], num_calls: int) -> None:
        """Add calls with weight 0: those that were left out, then one that repeats a sample.

        Args:
            calls: All of this rank's micro-batches.
            num_calls: How many there must be.
        """
        planned = {call.index for call in self.calls if call.weight}
        others = [replace(call, weight=0) for call in calls if call.index not in planned]
        self.calls = [*self.calls, *others][:num_calls]
        if len(self.calls) < num_calls:
            first = self.calls[0] if self.calls else stand_in_call(self.window, self.loss)
            filler = replace(first, weight=0, index=FILLER_INDEX)
            self.calls += [filler] * (num_calls - len(self.calls))

    def _first_pass(self) -> FirstPass:
        """Collect what a loss may use to look at the whole window before its terms are computed."""
        calls = self.calls or [replace(stand_in_call(self.window, self.loss), weight=0)]
        return FirstPass(
            window=self.window,
            calls=calls,
            totals=self.totals,
            device=self.backend.device,
            process_index=self.backend.process_index,
            parameters=self.parameters,
            forward=torch.no_grad()(self.forward_only),
            all_reduce=partial(self.backend.all_reduce, status=self.status),
            scaled=self.backend.scaled,
        )

    def _equalize(self, calls: list[Call], skip_empty: bool) -> None:
        """Keep the calls to make; where forwards are collectives, as many as on other ranks."""
        if skip_empty:
            calls = [call for call in calls if self.loss.contributes(call.counts)]
        self.calls = self.backend.equalize_calls(self.window, calls, self.loss)

    def _count(self, window: Window, calls: list[Call]) -> Counts:
        """Count the targets of the window over all ranks.

        Where only the forwards can count them, return the number of samples for now, which keeps
        the size of the gradients.
        """
        if self.loss.counts_in_forward:
            return (window.num_samples,)
        self.status.counts = sum_counts(self.status.counts, *(call.counts for call in calls))
        return self.backend.all_reduce_status(self.status).counts

    def forward_only(self, call: Call) -> Any:
        """Compute the model's outputs for a call that has no backward, within `scope`.

        Args:
            call: On the host. It becomes the engine's current call, on the device.
        """
        with self._started(call):
            return self.forward(self.call.batch)

    @contextmanager
    def _started(self, planned: Call) -> Iterator[None]:
        """Bring a call to the device, with the speed-ups that fit it, for its forward and backward.

        Args:
            planned: The call on the host.
        """
        self.call = planned  # for an error on the way
        speed_ups = self.rule.speed_ups_for(planned, self._accepted(planned.micro_batch.batch))
        if len(speed_ups) < len(self.rule.speed_ups):
            self.window.state.num_plain += 1
        with ExitStack() as stack:
            for speed_up in speed_ups:
                stack.enter_context(speed_up.scope(self._module))
            self.call = self._on_device(planned)
            for hook in (*self.hooks, *speed_ups):
                hook.before(self.call)
            yield

    def _on_device(self, planned: Call) -> Call:
        """Return a call with its batch and the keys of its dropout on the device."""
        request = self.window.request
        keys = sample_keys(request.seed, request.epoch, planned.micro_batch.positions)
        key_of_window = window_key(request.seed, request.epoch, request.index)
        batch, keys, key_of_window = send_to_device(
            [planned.micro_batch.batch, keys, key_of_window],
            self.backend.device,
            non_blocking=True,
        )
        return replace(planned, batch=batch, keys=keys, window_key=key_of_window)


def add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to `.grad`, which may be None."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def stand_in_call(window: Window, loss: Loss) -> Call:
    """Make a call for a rank without micro-batches, of one sample of the window.

    Returns:
        The call of the first sample with targets, whose loss is finite; of the last sample if none
        has targets.
    """
    for offset in range(window.num_samples):
        micro_batch = window.split([np.array([offset])]).micro_batches[0]
        call = Call(micro_batch, counts=loss.count(micro_batch.batch, 1))
        if not call.counts or any(call.counts):
            break
    return call
