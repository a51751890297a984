"""The gradient of one window: its targets counted over all ranks, forwards and backwards, one
status, one sum over ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache
from torch import nn

from hf_ga.errors import ProcessFailed, UnkeyedRandomness
from hf_ga.exact.backend import Backend, RankStatus, added
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.forward import argument_filter, callable_module, gradients_apart
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.loss import Loss
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.memory import TooLarge, is_out_of_memory, num_elements, too_large_for
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window


class Forward:
    """Forwards of a model on a window's micro-batches, with hooks. Training, evaluation and the
    search for non-finite numbers use it.

    Args:
        model: as it was prepared. hooks: the loss among them.

    Example:
        forward = Forward(accelerator, model, window, hooks)
        with forward.scope():
            call, outputs = forward(Call(micro_batch, counts))
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, window: Window, hooks: Sequence[Hook]
    ) -> None:
        self.model, self.window, self.hooks, self.device = model, window, hooks, accelerator.device
        self.micro_batch: MicroBatch | None = None  # that was computed last
        self._module, self._accepted = callable_module(model), argument_filter(model)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around all forwards and backwards of the window."""
        with ExitStack() as stack:
            for hook in self.hooks:
                stack.enter_context(hook.scope(self.model))
            yield

    def __call__(self, call: Call) -> tuple[Call, Any]:
        """The call on the device, and the model's outputs."""
        self.micro_batch, request = call.micro_batch, self.window.request
        keys = sample_keys(request.seed, request.epoch, call.micro_batch.positions)
        shared = window_key(request.seed, request.epoch, request.index)
        batch, keys, shared = send_to_device(
            [call.micro_batch.batch, keys, shared], self.device, non_blocking=True
        )
        call = replace(call, batch=batch, keys=keys, window_key=shared)
        for hook in self.hooks:
            hook.before(call)
        return call, self._module(**self._accepted(call.batch))


@dataclass(frozen=True)
class Step:
    """How windows of one model become gradients.

    Attributes:
        model: prepared, in training mode. loss: what its micro-batches add up to. hooks: keyed
            dropout, then speed-ups.
        pad_to_window: micro-batches must be as wide as their window.
        unused: names of trainable parameters that got no gradient in the proof.
        allow_split_dependent_randomness: do not check that no random generator moved.
    """

    backend: Backend
    model: nn.Module
    loss: Loss
    hooks: Sequence[Hook]
    pad_to_window: bool = False
    unused: frozenset[str] = frozenset()
    allow_split_dependent_randomness: bool = False

    def add_gradients(self, window: Window) -> StepResult:
        """Add the gradient of the window's mean loss to `.grad`.

        Where memory runs out on a rank, all ranks drop the window's gradients and compute it again
        in smaller micro-batches.

        Raises: see `hf_ga.backward_window`.
        """
        self.backend.begin(self.model, self.loss)
        for retries in itertools.count():
            buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
            try:
                return replace(self._add_gradients(window), retries=retries)
            except TooLarge as error:
                window.state.max_elements = error.num_elements // 2
            with torch.no_grad():
                for buffer, before in buffers:  # what counts samples must not count them twice
                    buffer.copy_(before)
            clear_device_cache(
                garbage_collection=True
            )  # after the traceback has released the failed try's tensors

    def _add_gradients(self, window: Window) -> StepResult:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        forward = Forward(self.backend.accelerator, self.model, window, (self.loss, *self.hooks))
        before = random_states()
        with forward.scope(), gradients_apart(parameters):
            status = self._own_share(forward, window, parameters)
            if (
                not self.allow_split_dependent_randomness
                and status.failure is None
                and (moved := moved_generators(before))
            ):
                status.failure = UnkeyedRandomness(
                    f"window {window.index} of epoch {window.epoch} drew from "
                    f"{' and '.join(moved)} although the probing forward "
                    "did not: this randomness depends on the split of the window. Switch it off, "
                    "or accept it with "
                    "allow_split_dependent_randomness."
                )
            status = self.backend.all_reduce_status(status)
            self.backend.reduce_gradients(self.model, status, self.unused)
            total = sum(status.counts)
            result = StepResult(
                status.loss, int(total) if float(total).is_integer() else total, skipped=total == 0
            )
            if self.loss.counts_in_forward:  # until now the divisor was the number of samples
                factor = window.num_samples / (total or 1.0)
                result.loss_tensor = result.loss_tensor * factor
                if gradients := [p.grad for p in parameters if p.grad is not None]:
                    torch._foreach_mul_(gradients, factor)
        return result

    def _own_share(
        self, forward: Forward, window: Window, parameters: Sequence[nn.Parameter]
    ) -> RankStatus:
        """This rank's part of the gradient, in `.grad`.

        A failure is kept for the exchange of status, so that no rank waits for one that is gone.
        Under FSDP, where every forward is a collective, a failing rank ends at once.
        """
        loss = torch.zeros((), dtype=sum_dtype(forward.device), device=forward.device)
        status = RankStatus(loss, (0,) * self.loss.num_means, (False,) * len(parameters))
        try:
            window = window.padded_to_window() if self.pad_to_window else window
            forward.window = window if self.backend.reason_not_to_cut else window.fitting()
            calls, totals = self._calls(forward.window, status)
            self._accumulate(forward, calls, totals, status)
        except (ProcessFailed, TooLarge):
            raise
        except Exception as error:
            status.failure, micro_batch = error, forward.micro_batch
            if is_out_of_memory(error) and micro_batch is not None:
                reason, rank = (
                    self.backend.reason_not_to_cut,
                    self.backend.accelerator.process_index,
                )
                can_be_cut = len(micro_batch) > 1 and not reason
                status.failure = (
                    TooLarge(num_elements(micro_batch))
                    if can_be_cut
                    else too_large_for(rank, micro_batch, reason)
                )
        if self.backend.is_sharded and status.failure is not None:
            raise status.failure
        status.has_gradient = tuple(p.grad is not None for p in parameters)
        return status

    def _calls(self, window: Window, status: RankStatus) -> tuple[list[Call], Counts]:
        """The calls of this rank, and the targets of the window over all ranks. Where only the
        forwards can count them it is the number of samples for now, which keeps the size of the
        gradients.
        """
        calls = [
            Call(m, index=i, counts=self.loss.count(m.batch, len(m)))
            for i, m in enumerate(window.micro_batches)
        ]
        totals: Counts = (window.num_samples,)
        if not self.loss.counts_in_forward:
            status.counts = added(status.counts, *(call.counts for call in calls))
            totals = self.backend.all_reduce_status(status).counts
        if not any(totals):
            return [], totals
        return self.backend.equalize(
            window, [c for c in calls if self.loss.contributes(c.counts)], self.loss
        ), totals

    def _accumulate(
        self, forward: Forward, calls: Sequence[Call], totals: Counts, status: RankStatus
    ) -> None:
        """Forward, term of the window's mean loss, backward: of one micro-batch after the other."""
        all_reduce, autocast = (
            partial(self.backend.all_reduce, status=status),
            self.backend.accelerator.autocast,
        )
        with autocast():
            totals = self.loss.prepare(calls, totals, forward, all_reduce, forward.device)
        for index, planned in enumerate(calls):
            with self.backend.sync(self.model, is_last=index == len(calls) - 1):
                with autocast():  # a prepared model has its own; another one is not left in float32
                    call, outputs = forward(planned)
                    sums, counts = self.loss.sums(outputs, call)
                    term = self.loss.mean(sums, totals)
                weight = call.weight * self.loss.contributes(counts)
                self.backend.backward(term, weight)
            if weight:
                self.backend.collect(
                    call, term.detach(), counts if self.loss.counts_in_forward else (), status
                )
