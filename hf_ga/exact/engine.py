"""The engine: computes the gradient of a window's mean loss, micro-batch by micro-batch.

Every loop uses it: `train_step`, Accelerate's loop with `hf_ga.Accelerator`, Trainer's loop in
`ExactTrainer`, the evaluation, the search for non-finite numbers, and the proof.

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

from hf_ga.errors import DataError, ProcessFailed, UnkeyedRandomness
from hf_ga.exact.backend import Backend, RankStatus, sum_counts
from hf_ga.exact.forward import argument_filter, callable_module, extra_forwards
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import FirstPass, Loss, Sums
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.memory import TooLarge, is_out_of_memory, num_elements, out_of_memory_error
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window
from hf_ga.exact.window_audit import WindowAudit

# `Call.index` of a filler: a forward of weight 0 that runs because ranks or loops need one more.
FILLER_INDEX = -1


class Engine:
    """Computes the gradient of a window's mean loss for one model, as the sum over micro-batches.

    Args:
        backend: How ranks communicate, from `hf_ga.parallel.fsdp.backend_for`.
        model: The prepared model.
        rule: The result of the proof: how the model's loss is split over micro-batches.
        module: The module to call with a batch. None: the model (without its DDP wrapper).
        allow_split_dependent_randomness: Whether to skip the check that no random numbers are drawn
            other than keyed dropout.
        is_audited: Whether to test the rule again on samples of the windows (see `audit.py`).

    Attributes:
        window: The current window, in the micro-batches that are computed.
        calls: The forwards of this rank in the current window, in the order in which they run.
        call: The current or last forward, with its batch on the device. None before the first one.
        totals: Number of targets of the window over all ranks, one for each mean of the loss.
        has_targets: Whether the window has any targets.
        is_training: Whether the current window is computed with backwards.
        status: The loss, the target counts and the failure of this rank so far.

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
    ) -> None:
        """Prepare to compute windows of a model, and record its trainable parameters.

        See the class for the arguments.
        """
        self.backend = backend
        self.model = model
        # Audits compare repeated forwards, so every random draw must be keyed.
        has_unkeyed_draws = bool(getattr(rule.dropout, "unkeyed", ()))
        is_random = allow_split_dependent_randomness or has_unkeyed_draws
        self.is_audited = is_audited and not is_random
        # All ranks must run the same number of forwards in their audits.
        self.audits_together = backend.is_sharded
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
        self._filter_arguments = argument_filter(self._module)

    # Call these in order: begin, then forward and backward for each micro-batch, then end.

    def begin(
        self,
        window: Window,
        *,
        training: bool = True,
        skip_empty: bool = True,
    ) -> None:
        """Begin a window: count its targets over all ranks, and plan the forwards of this rank.

        Sets `window`, `calls` and `totals`. Afterwards, run each of `calls` in `micro_batch`, then
        call `end`.

        Args:
            window: The window. Its micro-batches are those of this rank.
            training: Whether backwards follow. If False (an evaluation), ranks do not communicate.
            skip_empty: Whether to skip micro-batches without targets, whose own mean loss would be
                0 / 0.

        Raises:
            ConfigError: If exact gradients are impossible with the current settings.
            ProcessFailed: If another rank failed.
        """
        self.window = window
        self.calls = []
        self.call = None
        self.is_training = training
        self.loss = self.rule.loss
        self.status = self._initial_status()
        if training:
            self.backend.begin(self.model, self.loss)
        with self.deferring_failures():
            self._plan(window, skip_empty)
            self.audit = WindowAudit(self)
        if self.status.failure is not None:
            self.backend.all_reduce_status(self.status)  # raises on all ranks
        if self.audits_together:
            self.audit.run_together()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Enable keyed dropout and the loss's patches of the model in the `with` block.

        All forwards and backwards of a window run in this block.
        """
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.scope(self._module))
            yield

    @contextmanager
    def micro_batch(self, index: int) -> Iterator[dict[str, Any]]:
        """Run one forward and backward in the `with` block, which yields the batch on the device.

        The speed-ups that may be used for this micro-batch are on in the block.

        Args:
            index: Index of the planned forward in `calls`.

        Raises:
            UnkeyedRandomness: If the block drew random numbers from a global random generator.
        """
        planned = self.calls[index]
        is_last = index == len(self.calls) - 1
        states_before = random_states() if self.is_training else {}
        with (
            self.backend.sync(self.model, is_last or not self.is_training),
            self._as_current_call(planned),
        ):
            yield self.call.batch
            self.check_generators(states_before)

    def check_generators(self, states_before: dict[str, bytes]) -> None:
        """Check that the forwards of a window drew no random numbers from the global generators.

        Such numbers would depend on how the window is split. No check is made if
        `allow_split_dependent_randomness` is set.

        Args:
            states_before: The result of `random_states()` before these forwards.

        Raises:
            UnkeyedRandomness: If random numbers were drawn.
        """
        moved = moved_generators(states_before)
        if moved and not self.allow_split_dependent_randomness:
            raise UnkeyedRandomness(
                f"{self.window.description} drew from {' and '.join(moved)} although the proof's "
                "forwards did not: these random numbers depend on the split of the window. Turn "
                "them off, or accept them with allow_split_dependent_randomness."
            )

    def arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return only those entries of a micro-batch that the model's forward accepts."""
        return self._filter_arguments(batch)

    def forward(self, batch: dict[str, Any]) -> Any:
        """Run the model's forward on a micro-batch on the device, under autocast.

        Returns what the model returns. Entries of the batch that the forward does not accept are
        dropped.
        """
        # A prepared model enables autocast itself, but `module` may be another one.
        with self.backend.autocast():
            return self._module(**self._filter_arguments(batch))

    def sums(self, outputs: Any) -> tuple[Sums, Counts]:
        """Return the summed loss and the number of targets of the current micro-batch.

        Args:
            outputs: What the model returned for the micro-batch, or its loss alone.

        Returns:
            (sums, counts): the sums of the loss and the numbers of targets. Each is a tuple with
            one entry, or several entries if the head's loss is a sum of several means.
        """
        return self.loss.sums(outputs, self.call)

    def mean(self, outputs: Any) -> Tensor:
        """Return the mean loss over the targets of the current micro-batch alone, a scalar.

        Args:
            outputs: What the model returned for the micro-batch, or its loss alone.
        """
        return torch.as_tensor(self.loss.mean(*self.sums(outputs)))

    def loss_term(
        self, outputs: Any, *, is_recomputable: bool = True
    ) -> tuple[Tensor | float, Counts]:
        """Return what the current micro-batch adds to the window's mean loss.

        This term is the micro-batch's summed loss, divided by the number of targets of the whole
        window. The terms of all micro-batches on all ranks add up to the window's mean loss.

        Args:
            outputs: What the model returned for the micro-batch, or its loss alone.
            is_recomputable: Whether another forward would give this loss again. If so, it is
                recorded for the audit. False if the training loop added something to the loss, for
                example a penalty.

        Returns:
            (term, counts): the term, a scalar, and the numbers of targets of the micro-batch, a
            tuple with one entry (several if the head's loss is a sum of several means).
        """
        sums, counts = self.sums(outputs)
        if is_recomputable:
            self.audit.keep(outputs, sums, counts)
        return self.loss.mean(sums, self.totals), counts

    def backward(self, outputs: Any, *, is_recomputable: bool = True) -> None:
        """Run the backward of the current micro-batch's term of the window's mean loss.

        Args:
            outputs: What the model returned for the micro-batch, or its loss alone.
            is_recomputable: Whether another forward would give this loss again. If so, it is
                recorded for the audit of its additivity.
        """
        with self.backend.autocast():
            term, counts = self.loss_term(outputs, is_recomputable=is_recomputable)
        self.backward_term(term, counts)

    def backward_term(self, term: Tensor | float, counts: Counts) -> None:
        """Run the backward of the current micro-batch's term, and add it to the window's loss.

        If the micro-batch has no targets or is a filler, its term is not added, and a backward runs
        only if it is a collective (FSDP). If the window has no targets, nothing is done.

        Args:
            term: A scalar, already divided by the number of targets of the window.
            counts: Numbers of targets of the micro-batch, as `loss_term` returns them.
        """
        if not self.has_targets:
            return
        weight = self.call.weight * self.loss.contributes(counts)  # 0 or 1
        self.backend.backward(term, weight)
        if weight:
            new_counts = counts if self.loss.counts_in_forward else ()
            loss = torch.as_tensor(term).detach()
            self.backend.after_backward(self.call, loss, new_counts, self.status)

    def end(self) -> StepResult:
        """End the window after its last backward: all-reduce the status and the gradients.

        Afterwards, `.grad` of the trainable parameters is the gradient of the window's mean loss
        (times the loss scale under fp16).

        Returns:
            The window's mean loss and number of targets. `skipped` is set if it has no targets.

        Raises:
            Exception: The exception that `deferring_failures` recorded on this rank.
            ProcessFailed: If another rank failed. No weights were changed on any rank.
            DataError: If the forwards counted 0 targets in total, but the sum of the loss is not 0.
        """
        if not self.audits_together:
            with self.deferring_failures():
                self.audit.run()
        self.status.has_gradient = [p.grad is not None for p in self.parameters]
        status = self.backend.all_reduce_status(self.status)
        self.backend.reduce_gradients(self.model, status, self.rule.unused)
        # Gradients that the loss computed itself for the whole window, before the forwards.
        for parameter, gradient in self.loss.direct_gradients:
            accumulate_gradient(parameter, gradient)
        total = sum(status.counts)
        if total == 0 and self.loss.counts_in_forward and bool(status.loss != 0):
            raise DataError(
                f"{self.window.description}: the numbers of targets (or weights) add up to 0, but "
                f"the sum of the loss is {float(status.loss):.4g}, so there is no mean. No weights "
                "were changed: remove such samples from the dataset, or make the window larger."
            )
        num_targets = int(total) if float(total).is_integer() else total
        result = StepResult(status.loss, num_targets, skipped=total == 0)
        if self.loss.counts_in_forward:
            self._rescale_to_mean(total, result)
        return result

    def _rescale_to_mean(self, total: float, result: StepResult) -> None:
        """Divide the loss and the gradients by the number of targets that the forwards counted.

        Before the forwards that number was unknown, so the terms were divided by the number of
        samples of the window. Changes `result.loss_tensor` and `.grad` of all parameters.

        Args:
            total: Number of targets of the window over all ranks.
            result: The result of the window.
        """
        # If no targets were counted, loss and gradients are 0, and any divisor will do.
        factor = self.window.num_samples / (total or 1.0)
        result.loss_tensor = result.loss_tensor * factor
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    @contextmanager
    def deferring_failures(self) -> Iterator[None]:
        """Record an exception of the `with` block in the window's `status` instead of raising it.

        It is raised in the next all-reduce of the status, on all ranks, so that no rank waits
        forever for one that has failed. Under FSDP, where every forward is a collective, the
        exception is raised at once. `ProcessFailed` and `TooLarge` are raised at once, too, as all
        ranks have them.
        """
        try:
            yield
        except (ProcessFailed, TooLarge):
            raise
        except Exception as error:
            self.status.failure = self._error_to_report(error)
            if self.backend.is_sharded:
                raise self.status.failure from error

    def can_rejoin(self, error: Exception) -> bool:
        """Return whether this rank can continue the window, with `rejoin`, after an exception.

        True for the first out-of-memory error of the window under FSDP2, in a micro-batch of
        several samples.

        Args:
            error: The exception that occurred in the current micro-batch.
        """
        return (
            self.backend.can_rejoin
            and is_out_of_memory(error)
            and self.status.failure is None
            and len(self.call.micro_batch) > 1
        )

    def rejoin(self, index: int) -> None:
        """Continue the window under FSDP2 after this rank ran out of memory in a micro-batch.

        The other ranks wait for this one in every forward and backward, so this and all later
        micro-batches of this rank are replaced by fillers: one sample of the window with weight 0.
        The failure is recorded, and `end` raises it on all ranks.

        Args:
            index: Index in `calls` of the micro-batch that did not fit.
        """
        self.status.failure = TooLarge(num_elements(self.call.micro_batch))
        filler = replace(stand_in_call(self.window, self.loss), weight=0, index=FILLER_INDEX)
        self.calls[index:] = [filler] * (len(self.calls) - index)
        self.backend.rejoin(self.model)
        clear_device_cache(garbage_collection=True)

    def _error_to_report(self, error: Exception) -> Exception:
        """Return the exception to report for an exception in a micro-batch of the window.

        For an out-of-memory error it is a `TooLarge`, if the window can be computed again in
        smaller micro-batches, or else an error that names the micro-batch and remedies. Any other
        exception is returned as it is.
        """
        if not is_out_of_memory(error) or self.call is None:
            return error
        micro_batch = self.call.micro_batch
        reason_not_to_split = self.backend.reason_not_to_split
        if len(micro_batch) > 1 and not reason_not_to_split:
            return TooLarge(num_elements(micro_batch))
        return out_of_memory_error(self.backend.process_index, micro_batch, reason_not_to_split)

    def _initial_status(self) -> RankStatus:
        """Return the status of this rank before its first forward: zero loss and target counts."""
        return RankStatus(
            loss=torch.zeros((), dtype=sum_dtype(self.backend.device), device=self.backend.device),
            counts=(0,) * self.loss.num_means,
            has_gradient=(False,) * len(self.parameters),
        )

    def _plan(self, window: Window, skip_empty: bool) -> None:
        """Choose the forwards of this rank and count the targets of the window over all ranks.

        Sets `window`, `calls`, `totals` and `has_targets`. A loss that needs a first pass over the
        window makes it here.

        Args:
            window: The window, with this rank's micro-batches.
            skip_empty: Whether to skip micro-batches without targets.
        """
        self.window = self._with_final_micro_batches(window)
        calls = [
            Call(micro_batch, index=i, counts=self.loss.count(micro_batch.batch, len(micro_batch)))
            for i, micro_batch in enumerate(self.window.micro_batches)
        ]
        if self.is_training:
            self.totals = self._count_targets(calls)
            self.has_targets = any(self.totals)
        if self.has_targets or not self.is_training:
            needed = calls
            if skip_empty:
                needed = [call for call in calls if self.loss.contributes(call.counts)]
            self.calls = self.backend.equalize_calls(self.window, needed, self.loss)
        if self.loss.needs_first_pass and self.has_targets and self.is_training:
            with self.scope(), self.backend.autocast(), extra_forwards(self.model):
                self.totals = self.loss.prepare(self._make_first_pass())

    def _with_final_micro_batches(self, window: Window) -> Window:
        """Return the window in the micro-batches that are computed.

        They are padded to the window's longest sample if the rule needs that, and split where they
        exceed the memory limit.
        """
        if self.rule.pad_to_window:
            window = window.padded_to_window()
        if self.backend.can_split:
            window = window.split_to_memory_limit()
        return window

    def _make_first_pass(self) -> FirstPass:
        """Return the inputs of `Loss.prepare`: some losses run forwards without gradients over the
        whole window before its training forwards.

        A rank without micro-batches gets one sample with weight 0.
        """
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

    def _count_targets(self, calls: list[Call]) -> Counts:
        """Count the targets of the window over all ranks, in an all-reduce.

        If the loss counts targets in its forwards only, return the number of samples as a
        preliminary divisor (see `_rescale_to_mean`). It keeps gradients at a normal scale.

        Args:
            calls: All micro-batches of this rank, with their counts.

        Returns:
            One number for each mean of the loss.
        """
        if self.loss.counts_in_forward:
            return (self.window.num_samples,)
        self.status.counts = sum_counts(self.status.counts, *(call.counts for call in calls))
        return self.backend.all_reduce_status(self.status).counts

    def forward_only(self, call: Call) -> Any:
        """Run the forward of a call outside `micro_batch`, and return the model's outputs.

        For forwards without a backward: an audit, or a loss's first pass over the window. Use it
        within `scope`.

        Args:
            call: A call whose batch is on the host. It becomes the engine's current call, with its
                batch on the device.
        """
        with self._as_current_call(call):
            return self.forward(self.call.batch)

    @contextmanager
    def _as_current_call(self, planned: Call) -> Iterator[None]:
        """Set `self.call` to a planned forward with its batch on the device, and enable its
        speed-ups.

        The forward and its backward run in the `with` block. Micro-batches for which some
        speed-up may not be used are counted in `LoaderState.num_plain`.

        Args:
            planned: The planned forward of a micro-batch, with its batch on the host.
        """
        # Set it before the transfer to the device, as the message of an error there needs it.
        self.call = planned
        arguments = self._filter_arguments(planned.micro_batch.batch)
        speed_ups = self.rule.speed_ups_for(planned, arguments)
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
        """Return a copy of a planned forward with its batch and its dropout keys on the device."""
        request = self.window.request
        keys = sample_keys(request.seed, request.epoch, planned.micro_batch.positions)
        key_of_window = window_key(request.seed, request.epoch, request.index)
        batch, keys, key_of_window = send_to_device(
            [planned.micro_batch.batch, keys, key_of_window],
            self.backend.device,
            non_blocking=True,
        )
        return replace(planned, batch=batch, keys=keys, window_key=key_of_window)


def accumulate_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient that the loss computed itself for the whole window to `parameter.grad`, or set
    `.grad` to it if that is None.
    """
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def stand_in_call(window: Window, loss: Loss) -> Call:
    """Return a planned forward of one sample of the window, for a rank that has no micro-batch.

    Args:
        window: The window.
        loss: Counts the targets of the samples.

    Returns:
        The call for the first sample that has targets, so that its loss is finite; for the last
        sample if none has.
    """
    for offset in range(window.num_samples):
        micro_batch = window.split([np.array([offset])]).micro_batches[0]
        call = Call(micro_batch, counts=loss.count(micro_batch.batch, 1))
        counts_in_forward = not call.counts
        if counts_in_forward or any(call.counts):
            break
    return call
