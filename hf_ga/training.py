"""One optimizer step on one window: the terms of its micro-batches (`terms.py` owns the divisor), then clip and update once."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache
from torch import nn

from hf_ga.errors import ConfigError, NonFinite, ProcessFailed, UnkeyedRandomness
from hf_ga.exact.forward import LossFunction, gradients_apart, module_modes
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.gradients import head_gradients, summed_gradients
from hf_ga.exact.memory import TooLarge, is_out_of_memory, size_of, too_large_for
from hf_ga.exact.parts import PARTS
from hf_ga.exact.precision import check_optimizer, check_precision
from hf_ga.exact.reduce import Share, check_supported, is_sharded, meet, sum_gradients
from hf_ga.exact.terms import add_counts
from hf_ga.exact.update import StepResult, update
from hf_ga.exact.windows import Window
from hf_ga.parallel.sharding import allow_unequal_use, check_sharding, drop_unused, keep_process_group_alive
from hf_ga.proof.known_rules import proven_rule
from hf_ga.proof.targets import TargetRule
from hf_ga.recovery.nonfinite import ON_NONFINITE, find_cause
from hf_ga.speed.compiling import drawing, is_compiled
from hf_ga.speed.lean_forward import lean_forwards
from hf_ga.speed.packing import packed_layers


def backward_window(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    *,
    targets: TargetRule | None = None,
    loss_fn: LossFunction | None = None,
    allow_unkeyed: bool = False,
    sync_each_micro_batch: bool = False,
) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`. Clipping, the optimizer and zeroing are the caller's.

    Under fp16 `.grad` holds the gradient times the loss scale: `accelerator.clip_grad_norm_` or `accelerator.unscale_gradients`
    removes it, once, after the last window that is added and before anything reads the gradient; the prepared optimizer's step does
    so if nobody did. Windows may be added only while the scale is the same: until the next step of any prepared optimizer.

    Where memory runs out on a process, all of them drop the window's gradients and compute it again in smaller micro-batches: the
    same update. The limit found is kept on the loader. Not under FSDP, where a failing process cannot rejoin the others.

    Args:
        model: prepared by the accelerator, in training mode.
        window: from a `WindowLoader`.
        targets: what `prove_targets` returned; left out, it is proven with the first window, on samples of the whole dataset, and
            kept on the loader.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets); wins over the head's own loss.
        allow_unkeyed: go on although some draws depend on the split.
        sync_each_micro_batch: under FSDP, reduce the gradients after every micro-batch instead of once a window: more traffic, but
            no process keeps whole gradients between micro-batches.

    Raises:
        LossNotAdditive, UnkeyedRandomness: see `prove_targets`. ConfigError: a backend that cannot be exact, a precision that would
            not be the one asked for, or the loader's `target_counts` contradict the proven rule. OutOfMemory: a single sample does
            not fit or, under FSDP, a micro-batch. ProcessFailed: another process raised one of these, or anything else, in this
            window.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    check_supported(accelerator)
    check_precision(accelerator)
    check_sharding(accelerator)
    rule = targets or proven_rule(model, window, loss_fn, allow_unkeyed)
    if rule.modes != module_modes(model):
        raise ConfigError(
            "the training modes (or the modules) of the model are not those of the proof: a BatchNorm that was frozen may be in "
            "training mode now. Prove the model again in the mode in which it is trained, or leave `targets` out."
        )
    allow_unequal_use(model, sum_of_means=rule.name in PARTS)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.reducer._reset_state()  # a forward through DDP without a backward (somebody's evaluation) leaves its reducer waiting
        keep_process_group_alive(model)
    retries = 0
    while (result := _tried(accelerator, model, window, rule, loss_fn, allow_unkeyed, sync_each_micro_batch)) is None:
        retries += 1
    result.retries = retries
    return result


def _tried(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    rule: TargetRule,
    loss_fn: LossFunction | None,
    allow_unkeyed: bool,
    sync_each: bool,
) -> StepResult | None:
    """None, on all processes, if memory ran out on one: then micro-batches must be smaller, and nothing is left of the try."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return _add_gradients(accelerator, model, window, rule, loss_fn, allow_unkeyed, sync_each)
    except TooLarge as error:
        size = error.size
    with torch.no_grad():
        for buffer, before in buffers:  # what counts samples must not count them twice
            buffer.copy_(before)
    window.memory.after_failure(size)
    clear_device_cache(garbage_collection=True)  # now that no traceback holds the tensors of the try
    return None


def _add_gradients(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    rule: TargetRule,
    loss_fn: LossFunction | None,
    allow_unkeyed: bool,
    sync_each: bool,
) -> StepResult:
    """Forwards and backwards, the meeting, the sum over processes."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = random_states()
    with ExitStack() as stack, _undivided(accelerator), lean_forwards(model), gradients_apart(parameters):
        stack.enter_context(drawing(model, rule))
        stack.enter_context(packed_layers(None if is_compiled(model) else rule.packing))
        share = _own_share(accelerator, model, rule, window, loss_fn, parameters, sync_each)
        if not allow_unkeyed and (moved := moved_generators(before)) and share.failure is None and share.too_large is None:
            share.failure = UnkeyedRandomness(
                f"window {window.index} of epoch {window.epoch} drew from {' and '.join(moved)} although the probing forward did "
                "not: this randomness depends on the split of the window. Switch it off, or accept it with allow_unkeyed."
            )
        share = meet(accelerator, share)
        result = _result(window, rule, share, is_sum=loss_fn is not None)
        if accelerator.num_processes > 1 and not is_sharded(accelerator):
            sum_gradients(parameters, share.has_gradient)
        drop_unused(accelerator, model, rule.unused)
        if loss_fn is not None and (gradients := [p.grad for p in parameters if p.grad is not None]):
            torch._foreach_mul_(gradients, window.num_samples / (sum(share.counts) or 1.0))
    window.memory.after_success(share.was_cut)
    return result


def _own_share(
    accelerator: Accelerator,
    model: nn.Module,
    rule: TargetRule,
    window: Window,
    loss_fn: LossFunction | None,
    parameters: Sequence[nn.Parameter],
    sync_each: bool,
) -> Share:
    """This process's part of the gradient, in `.grad`. What fails is told to the others when they meet, so that nobody waits for a
    process that is gone, and running out of memory is no failure yet; under FSDP they meet in every forward, so a failing process
    just ends.
    """
    loss = torch.zeros((), dtype=_sum_dtype(accelerator), device=accelerator.device)
    share = Share(loss, (0,) if loss_fn else add_counts(rule.name, []), (False,) * len(parameters))
    try:
        if rule.pad_to_window:
            window = window.padded_to_window()
        if not is_sharded(accelerator):
            planned, window = window, window.memory.fitting(window)
            share.was_cut = window is not planned
        if loss_fn is None:
            head_gradients(accelerator, model, window, rule, share, sync_each=sync_each)
        else:
            summed_gradients(accelerator, model, window, rule, loss_fn, share, sync_each=sync_each)
    except (ProcessFailed, TooLarge):
        raise
    except Exception as error:
        share.failure = error
        if is_out_of_memory(error) and share.in_hand is not None:
            _judge_out_of_memory(accelerator, share)
    if share.failure is not None and (accelerator.num_processes == 1 or is_sharded(accelerator)):
        raise share.failure
    share.has_gradient = tuple(p.grad is not None for p in parameters)
    return share


def _judge_out_of_memory(accelerator: Accelerator, share: Share) -> None:
    """A micro-batch of several samples is too large, and can be cut; else it is a failure."""
    if len(share.in_hand) > 1 and not is_sharded(accelerator):
        share.too_large, share.failure = size_of(share.in_hand), None
    else:
        share.failure = too_large_for(accelerator.process_index, share.in_hand)


def _result(window: Window, rule: TargetRule, share: Share, *, is_sum: bool) -> StepResult:
    total = sum(share.counts)
    if not is_sum and window.expected_targets not in (None, total):
        raise ConfigError(
            f"window {window.index} of epoch {window.epoch} has {int(total)} targets counted as {rule.name}, but target_counts "
            f"say {window.expected_targets}: correct target_counts, or leave them out."
        )
    loss = share.loss / (total or 1.0) if is_sum else share.loss
    return StepResult(loss, int(total) if float(total).is_integer() else total, skipped=total == 0)


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
    sync_each_micro_batch: bool = False,
    on_nonfinite: str = "stop",
) -> StepResult:
    """One update: gradient of the window, clip once, optimizer, scheduler, zero the gradients.

    Under fp16 the gradients of all micro-batches are summed before the loss scale is removed once: an overflow in any of them
    skips the whole window, and lowers the scale once.

    Args:
        optimizer: prepared by the accelerator. scheduler: not prepared (Accelerate would step it once per process); it moves only
            when the optimizer did. Under fp16 build it before `prepare`, or torch warns that the optimizer's step was replaced.
        max_grad_norm: L2 norm of all gradients of the optimizer to clip to; None or 0: no clipping, and no `grad_norm`.
        on_nonfinite: what to do before the optimizer's step where the loss or a gradient is not finite (not under fp16, where the
            scaler skips what overflows): "stop" raises, "skip" leaves the window out. In both cases nothing was updated.
        The others: see `backward_window`.

    Raises:
        ConfigError: also a ReduceLROnPlateau, and under fp16 an optimizer that was not prepared. NonFinite: the loss or a gradient
            of the window is not finite; the message names the samples and the first module that it came from.

    Example:
        for window in windows:
            result = train_step(accelerator, model, optimizer, window, scheduler=scheduler, max_grad_norm=1.0)
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau wants a metric in every step: step it yourself after an evaluation, not in train_step."
        )
    if on_nonfinite not in ON_NONFINITE:
        raise ConfigError(f"on_nonfinite must be one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}.")
    check_optimizer(accelerator, optimizer)
    accelerator.sync_gradients = True  # else, after somebody's unfinished `accumulate`, Accelerate's optimizer would not step
    optimizer.zero_grad(set_to_none=True)
    result = backward_window(
        accelerator,
        model,
        window,
        targets=targets,
        loss_fn=loss_fn,
        allow_unkeyed=allow_unkeyed,
        sync_each_micro_batch=sync_each_micro_batch,
    )
    if result.skipped:
        return result
    update(accelerator, model, optimizer, max_grad_norm, result)
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # the plain one inside a prepared one
    optimizer.zero_grad(set_to_none=True)
    if result.nonfinite:
        rule = targets or proven_rule(model, window, loss_fn, allow_unkeyed)
        result.cause = find_cause(accelerator, model, window, rule, loss_fn, result.loss)
        if on_nonfinite == "stop":
            raise NonFinite(f"{result.cause}. Nothing was updated.")
    return result


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
