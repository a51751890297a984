"""One optimizer step on one window: the terms of its micro-batches (`terms.py` owns the divisor), then clip and update once."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.forward import LossFunction, accepted_arguments, gradients_apart, module_modes, run_forward, unwrapped
from hf_ga.generators import moved_generators, random_states
from hf_ga.keyed import sample_keys, window_key
from hf_ga.known_rules import proven_rule
from hf_ga.precision import check_optimizer, check_precision
from hf_ga.reduce import check_supported, sum_over_processes
from hf_ga.router import BalanceCall, add_calls
from hf_ga.targets import TargetRule
from hf_ga.terms import add_counts, count_targets, window_term
from hf_ga.windows import MicroBatch, Window


@dataclass
class StepResult:
    """What a step did. The numbers stay on the device until they are read: `loss` and `grad_norm` wait for it.

    Attributes:
        num_targets: targets of the window over all processes.
        skipped: nothing was updated: a window without targets, gradients that overflowed under fp16, or an optimizer none of
            whose parameters got a gradient.
        overflowed: it was skipped because a gradient was not finite under fp16; the scale was lowered once.
        loss_scale: under fp16 the scale that the gradients of this window had, on the host; None else, or where nothing was scaled.
    """

    loss_tensor: Tensor
    num_targets: int | float
    grad_norm_tensor: Tensor | None = None
    skipped: bool = False
    overflowed: bool = False
    loss_scale: float | None = None

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the window; inf or NaN if a forward overflowed."""
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the gradient before clipping, without the loss scale; None if it was not asked for. That of a window
        that overflowed is inf or NaN: look at `overflowed` before averaging it.
        """
        return None if self.grad_norm_tensor is None else float(self.grad_norm_tensor)


def backward_window(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    *,
    targets: TargetRule | None = None,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`. Clipping, the optimizer and zeroing are the caller's.

    Under fp16 `.grad` holds the gradient times the loss scale: `accelerator.clip_grad_norm_` or `accelerator.unscale_gradients`
    removes it, once, after the last window that is added and before anything reads the gradient; the prepared optimizer's step does
    so if nobody did. Windows may be added only while the scale is the same: until the next step of any prepared optimizer.

    Args:
        model: prepared by the accelerator, in training mode.
        window: from a `WindowLoader`.
        targets: what `prove_targets` returned; left out, it is proven with the first window, on samples of the whole dataset, and
            kept on the loader.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets); wins over the head's own loss.
        allow_unkeyed: go on although some draws depend on the split.

    Raises:
        LossNotAdditive, UnkeyedRandomness: see `prove_targets`. ConfigError: more than one process, a precision that would not
            be the one asked for, or the loader's `target_counts` contradict the proven rule.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    check_supported(accelerator)
    check_precision(accelerator)
    rule = targets or proven_rule(model, window, loss_fn, allow_unkeyed)
    if rule.modes != module_modes(unwrapped(model)):
        raise ConfigError(
            "the training modes (or the modules) of the model are not those of the proof: a BatchNorm that was frozen may be in "
            "training mode now. Prove the model again in the mode in which it is trained, or leave `targets` out."
        )
    if rule.pad_to_window:
        window = window.padded_to_window()
    before = random_states()
    with ExitStack() as stack:
        stack.enter_context(_undivided(accelerator))
        stack.enter_context(accelerator.no_sync(model))
        stack.enter_context(rule.places.active())
        stack.enter_context(gradients_apart([p for p in model.parameters() if p.requires_grad]))
        if loss_fn is None:
            result = _backward_head(accelerator, model, window, rule)
        else:
            result = _backward_sums(accelerator, model, window, rule, loss_fn)
    if not allow_unkeyed and (moved := moved_generators(before)):
        raise UnkeyedRandomness(
            f"window {window.index} of epoch {window.epoch} drew from {' and '.join(moved)} although the probing forward did "
            "not: this randomness depends on the split of the window. Switch it off, or accept it with allow_unkeyed."
        )
    return result


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
    targets: TargetRule | None = None,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
) -> StepResult:
    """One update: gradient of the window, clip once, optimizer, scheduler, zero the gradients.

    Under fp16 the gradients of all micro-batches are summed before the loss scale is removed once: an overflow in any of them
    skips the whole window, and lowers the scale once.

    Args:
        optimizer: prepared by the accelerator. scheduler: not prepared (Accelerate would step it once per process); it moves only
            when the optimizer did. Under fp16 build it before `prepare`, or torch warns that the optimizer's step was replaced.
        max_grad_norm: L2 norm of all gradients of the optimizer to clip to; None or 0: no clipping, and no norm is computed.
        The others: see `backward_window`.

    Raises:
        ConfigError: also a ReduceLROnPlateau, and under fp16 an optimizer that was not prepared.

    Example:
        for window in windows:
            result = train_step(accelerator, model, optimizer, window, scheduler=scheduler, max_grad_norm=1.0)
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants a metric in every step: step it yourself after an evaluation, not in train_step."
        )
    check_optimizer(accelerator, optimizer)
    accelerator.sync_gradients = True  # else, after somebody's unfinished `accumulate`, Accelerate's optimizer would not step
    optimizer.zero_grad(set_to_none=True)
    result = backward_window(accelerator, model, window, targets=targets, loss_fn=loss_fn, allow_unkeyed=allow_unkeyed)
    if result.skipped:
        return result
    _update(accelerator, optimizer, max_grad_norm, result)
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # the plain one inside a prepared one
    optimizer.zero_grad(set_to_none=True)
    return result


def _update(accelerator: Accelerator, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, result: StepResult) -> None:
    """Remove the loss scale, clip, step; `result` is told.

    Not `accelerator.clip_grad_norm_`: it removes the scale from the gradients of all prepared optimizers.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:  # there is nothing to update; a scaler would raise an AssertionError
        result.skipped = True
        return
    accelerator.unscale_gradients(optimizer)
    if max_grad_norm:
        result.grad_norm_tensor = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if accelerator.scaler is None:
        optimizer.step()
        return
    # Read before the step, where the scaler waits for the device anyway to see whether a gradient is not finite. Behind it, it
    # would wait for the optimizer too.
    result.loss_scale = accelerator.scaler.get_scale()
    optimizer.step()
    # Of this optimizer: `accelerator.optimizer_step_was_skipped` tells of the last steps of all of them.
    result.overflowed = optimizer.step_was_skipped
    if _skips_by_itself(optimizer):
        result.overflowed = accelerator.scaler.get_scale() < result.loss_scale
    result.skipped = result.overflowed


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Fused optimizers are called whether or not a gradient overflowed, so Accelerate takes every step for one that was made."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _backward_head(accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule) -> StepResult:
    """The head's own mean loss: targets are counted first, on the host, so the divisor is known before any forward."""
    all_counts = [count_targets(rule.name, m.batch, len(m)) for m in window.micro_batches]
    totals = sum_over_processes(accelerator, add_counts(rule.name, all_counts))
    num_targets = sum(totals)
    if window.expected_targets not in (None, num_targets):
        raise ConfigError(
            f"window {window.index} of epoch {window.epoch} has {num_targets} targets counted as {rule.name}, but target_counts "
            f"say {window.expected_targets}: correct target_counts, or leave them out."
        )
    loss_sum = torch.zeros((), dtype=_sum_dtype(accelerator), device=accelerator.device)
    # A micro-batch without targets has no mean (0 / 0): it contributes nothing and is left out, unless its tokens were routed.
    needed = [(m, n) for m, n in zip(window.micro_batches, all_counts, strict=True) if any(n) or rule.router] if num_targets else []
    micro_batches = [m for m, _ in needed]
    with nullcontext() if rule.router is None else rule.router.active():
        balance = balance_of_window(accelerator, model, window, rule, micro_batches)
        for batch, (_, counts) in zip(_keyed_batches(accelerator, window, rule, micro_batches), needed, strict=True):
            with accelerator.autocast():  # a prepared model has its own; another one is not left in float32
                term = window_term(rule.name, model(**accepted_arguments(model, batch)), batch, counts, totals)
                if rule.router is not None:
                    term = term + rule.router.term(rule.router.take(), balance)
            accelerator.backward(term)
            loss_sum += term.detach()
    return StepResult(loss_sum, num_targets, skipped=num_targets == 0)


@torch.no_grad()
def balance_of_window(
    accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule, micro_batches: Sequence[MicroBatch]
) -> list[BalanceCall]:
    """What experts the tokens of the whole window choose, by forwards that are done again with gradients: the same dropout."""
    calls = []
    if rule.router is not None:
        for batch in _keyed_batches(accelerator, window, rule, micro_batches):
            with accelerator.autocast():
                model(**accepted_arguments(model, batch))
            calls.append(rule.router.take())
    return add_calls(calls)


def _backward_sums(
    accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule, loss_fn: LossFunction
) -> StepResult:
    """An own loss counts during its forward, so the divisor is known at the end: gradients are divided by the samples first (which
    keeps their size) and corrected once.

    A count that is a number, not a tensor on the device, saves waiting for the device.
    """
    loss_sum = torch.zeros((), dtype=_sum_dtype(accelerator), device=accelerator.device)
    total = 0.0
    for batch in _keyed_batches(accelerator, window, rule, window.micro_batches):
        with accelerator.autocast():
            loss, count = run_forward(model, batch, loss_fn)
        if count := float(count):  # without targets the sum may be 0 / 0: it contributes nothing and is left out
            accelerator.backward(loss / window.num_samples)
            loss_sum += loss.detach().to(loss_sum.dtype)
            total += count
    if gradients := [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]:
        torch._foreach_mul_(gradients, window.num_samples / total)
    return StepResult(loss_sum / (total or 1.0), int(total) if total.is_integer() else total, skipped=total == 0)


def set_keys(rule: TargetRule, window: Window, micro_batch: MicroBatch, device: torch.device) -> None:
    """The next forward on `device` draws the dropout of these samples."""
    keys, for_window = (
        sample_keys(window.seed, window.epoch, micro_batch.positions),
        window_key(window.seed, window.epoch, window.index),
    )
    rule.places.set_keys(keys.to(device, non_blocking=True), for_window.to(device, non_blocking=True))


def _keyed_batches(
    accelerator: Accelerator, window: Window, rule: TargetRule, micro_batches: Iterable[MicroBatch]
) -> Iterator[dict]:
    """Each micro-batch on the device, with its samples' keys set for the dropout of the next forward."""
    for micro_batch in micro_batches:
        set_keys(rule, window, micro_batch, accelerator.device)
        yield send_to_device(micro_batch.batch, accelerator.device, non_blocking=True)


@contextmanager
def _undivided(accelerator: Accelerator) -> Iterator[None]:
    """`accelerator.backward` divides by gradient_accumulation_steps, in short windows too: it is 1 while we divide by targets."""
    steps = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = 1
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = steps


def _sum_dtype(accelerator: Accelerator) -> torch.dtype:
    return torch.float32 if accelerator.device.type == "mps" else torch.float64
