"""The gradient of one window: forwards and backwards of its micro-batches, one exchange of status, one sum over ranks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn

from hf_ga.errors import ConfigError, ProcessFailed, UnkeyedRandomness
from hf_ga.exact.backend import Backend, RankStatus
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.forward import argument_filter, callable_module, gradients_apart
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.hooks import Call, Counts, Hook
from hf_ga.exact.loss import Loss
from hf_ga.exact.memory import TooLarge, is_out_of_memory, size_of, too_large_for
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window


class Forward:
    """Forwards of a model on a window's micro-batches, with hooks. Training, evaluation and the search for non-finite numbers use
    it.

    Args:
        model: as it was prepared. hooks: the loss among them.

    Example:
        forward = Forward(accelerator, model, window, hooks)
        with forward.scope():
            call, outputs = forward(Call(micro_batch, counts))
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, window: Window, hooks: Sequence[Hook]) -> None:
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
        self.micro_batch = call.micro_batch
        call = call.on_device(self.window, self.device)
        for hook in self.hooks:
            hook.before(call)
        return call, self._module(**self._accepted(call.batch))


@dataclass(frozen=True)
class Step:
    """How windows of one model become gradients.

    Attributes:
        model: prepared, in training mode. loss: what its micro-batches add up to. hooks: keyed dropout, then speed-ups.
        pad_to_window: micro-batches must be as wide as their window.
        unused: names of trainable parameters that got no gradient in the proof.
        allow_split_dependent_randomness: do not check that no random generator moved.
    """

    accelerator: Accelerator
    backend: Backend
    model: nn.Module
    loss: Loss
    hooks: Sequence[Hook]
    pad_to_window: bool = False
    unused: frozenset[str] = frozenset()
    allow_split_dependent_randomness: bool = False

    def add_gradients(self, window: Window) -> StepResult:
        """Add the gradient of the window's mean loss to `.grad`.

        Where memory runs out on a rank, all ranks drop the window's gradients and compute it again in smaller micro-batches.

        Raises: see `hf_ga.backward_window`.
        """
        self.backend.begin(self.model, self.loss)
        retries = 0
        while (result := self._try(window)) is None:
            retries += 1
        result.retries = retries
        return result

    def _try(self, window: Window) -> StepResult | None:
        """None, on all ranks, if memory ran out on one: then nothing is left of the try."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            return self._add_gradients(window)
        except TooLarge as error:
            size = error.size
        with torch.no_grad():
            for buffer, before in buffers:  # what counts samples must not count them twice
                buffer.copy_(before)
        window.state.memory.after_failure(size)
        clear_device_cache(garbage_collection=True)  # now that no traceback holds the tensors of the try
        return None

    def _add_gradients(self, window: Window) -> StepResult:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        forward = Forward(self.accelerator, self.model, window, (self.loss, *self.hooks))
        before = random_states()
        with forward.scope(), _undivided(self.accelerator), gradients_apart(parameters):
            status = self._own_share(forward, window, parameters)
            if not self.allow_split_dependent_randomness and status.failure is None and status.too_large is None:
                status.failure = _moved(before, window)
            status = self.backend.all_reduce_status(status)
            self.backend.reduce_gradients(self.model, status, self.unused)
            result = _result(window, status, self.loss)
            if self.loss.counts_in_forward:  # until now the divisor was the number of samples
                factor = window.num_samples / (sum(status.counts) or 1.0)
                result.loss_tensor = result.loss_tensor * factor
                if gradients := [p.grad for p in parameters if p.grad is not None]:
                    torch._foreach_mul_(gradients, factor)
        return result

    def _own_share(self, forward: Forward, window: Window, parameters: Sequence[nn.Parameter]) -> RankStatus:
        """This rank's part of the gradient, in `.grad`.

        A failure is kept for the exchange of status, so that no rank waits for one that is gone. Under FSDP, where every forward
        is a collective, a failing rank ends at once.
        """
        loss = torch.zeros((), dtype=sum_dtype(forward.device), device=forward.device)
        status = RankStatus(loss, (0,) * self.loss.num_means, (False,) * len(parameters))
        try:
            forward.window = self._fitting(window)
            calls, totals = self._calls(forward.window, status)
            self._accumulate(forward, calls, totals, status)
        except (ProcessFailed, TooLarge):
            raise
        except Exception as error:
            status.failure = error
            if is_out_of_memory(error) and forward.micro_batch is not None:
                self._judge_out_of_memory(forward.micro_batch, status)
        if status.failure is not None and (self.accelerator.num_processes == 1 or self.backend.is_sharded):
            raise status.failure
        status.has_gradient = tuple(p.grad is not None for p in parameters)
        return status

    def _fitting(self, window: Window) -> Window:
        """The window with its micro-batches padded and cut as needed. Under FSDP, ranks must make equal numbers of forwards."""
        window = window.padded_to_window() if self.pad_to_window else window
        return window if self.backend.is_sharded else window.fitting()

    def _calls(self, window: Window, status: RankStatus) -> tuple[list[Call], Counts]:
        """The calls of this rank, and what their sums are divided by: the targets of the window over all ranks. Where only the
        forwards can count them it is the number of samples for now, which keeps the size of the gradients.
        """
        if self.loss.counts_in_forward:
            calls = [Call(m) for m in window.micro_batches]
            return self.backend.equalize(window, calls, self.loss), (window.num_samples,)
        counts = [self.loss.count(m.batch, len(m)) for m in window.micro_batches]
        status.counts = tuple(map(sum, zip(*counts, strict=True))) or status.counts
        known = window.expected_targets is not None and self.loss.num_means == 1 and not self.loss.has_own_count
        if self.accelerator.num_processes > 1 and known:
            totals = (window.expected_targets,)
        else:
            totals = self.backend.all_reduce_status(status).counts
        if not sum(totals):
            return [], totals
        pairs = zip(window.micro_batches, counts, strict=True)
        calls = [Call(m, counts=n) for m, n in pairs if self.loss.contributes(n)]
        return self.backend.equalize(window, calls, self.loss), totals

    def _accumulate(self, forward: Forward, calls: Sequence[Call], totals: Counts, status: RankStatus) -> None:
        """Forward, term of the window's mean loss, backward: of one micro-batch after the other."""
        with self.accelerator.autocast():
            self.loss.prepare(calls, forward, partial(self.backend.all_reduce, status=status), forward.device)
        for index, planned in enumerate(calls):
            with self.backend.sync(self.model, is_last=index == len(calls) - 1):
                with self.accelerator.autocast():  # a prepared model has its own; another one is not left in float32
                    call, outputs = forward(planned)
                    term, counts = self.loss.term(outputs, call, totals)
                weight = call.weight * self.loss.contributes(counts)
                self.backend.backward(term, weight)
            if weight:
                status.loss += term.detach()
                if self.loss.counts_in_forward:
                    status.counts = tuple(map(sum, zip(status.counts, counts, strict=True)))

    def _judge_out_of_memory(self, micro_batch: MicroBatch, status: RankStatus) -> None:
        """A micro-batch of several samples can be cut; anything else is a failure."""
        if len(micro_batch) > 1 and not self.backend.is_sharded:
            status.too_large, status.failure = size_of(micro_batch), None
        else:
            status.failure = too_large_for(self.accelerator.process_index, micro_batch)


def _moved(before: dict[str, bytes], window: Window) -> UnkeyedRandomness | None:
    if not (moved := moved_generators(before)):
        return None
    return UnkeyedRandomness(
        f"window {window.index} of epoch {window.epoch} drew from {' and '.join(moved)} although the probing forward did not: this "
        "randomness depends on the split of the window. Switch it off, or accept it with allow_split_dependent_randomness."
    )


def _result(window: Window, status: RankStatus, loss: Loss) -> StepResult:
    total = sum(status.counts)
    if not loss.has_own_count and window.expected_targets not in (None, total):
        raise ConfigError(
            f"window {window.index} of epoch {window.epoch} has {int(total)} targets counted as {loss.name}, but target_counts say "
            f"{window.expected_targets}: correct target_counts, or leave them out."
        )
    return StepResult(status.loss, int(total) if float(total).is_integer() else total, skipped=total == 0)


@contextmanager
def _undivided(accelerator: Accelerator) -> Iterator[None]:
    """`accelerator.backward` divides by gradient_accumulation_steps, in short windows too: it is 1 while terms divide by
    targets.
    """
    steps = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = 1
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = steps
