"""One optimizer step on one window. This file is the one owner of the divisor: the targets of the window over all processes.

loss of the window = sum over its micro-batches of (mean loss x targets of the micro-batch) / targets of the window
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_ga.batches import IGNORED_LABEL
from hf_ga.errors import ConfigError, UnkeyedRandomness
from hf_ga.forward import LossFunction, run_forward, unwrapped
from hf_ga.generators import moved_generators, random_states
from hf_ga.keyed import sample_keys, window_key
from hf_ga.reduce import check_supported, sum_over_processes
from hf_ga.targets import TargetRule, prove_targets
from hf_ga.windows import MicroBatch, Window

MAX_PROOF_SAMPLES = 32


@dataclass
class StepResult:
    """What a step did. The numbers stay on the device until they are read: `loss` and `grad_norm` wait for it.

    Attributes:
        num_targets: targets of the window over all processes.
        skipped: nothing was updated (a window without targets, or gradients that overflowed under fp16).
    """

    loss_tensor: Tensor
    num_targets: int | float
    grad_norm_tensor: Tensor | None = None
    skipped: bool = False

    @property
    def loss(self) -> float:
        """Mean loss over the targets of the window."""
        return float(self.loss_tensor)

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the gradient before clipping; None if it was not asked for."""
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

    Args:
        model: prepared by the accelerator, in training mode.
        window: from a `WindowLoader`.
        targets: what `prove_targets` returned; left out, it is proven on the first window and kept on the loader.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets); wins over the head's own loss.
        allow_unkeyed: go on although some draws depend on the split.

    Raises:
        LossNotAdditive, UnkeyedRandomness: see `prove_targets`. ConfigError: more than one process, or the loader's
            `target_counts` contradict the proven rule.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    check_supported(accelerator)
    if loss_fn is None and _has_no_labels_that_count(window):
        return StepResult(torch.zeros((), device=accelerator.device), 0, skipped=True)
    rule = targets or _proven(model, window, loss_fn, allow_unkeyed)
    if rule.pad_to_window:
        window = window.padded_to_window()
    before = random_states()
    with ExitStack() as stack:
        stack.enter_context(_undivided(accelerator))
        stack.enter_context(accelerator.no_sync(model))
        stack.enter_context(rule.places.active())
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

    Args:
        optimizer: prepared by the accelerator. scheduler: not prepared (Accelerate would step it once per process); it moves only
            when the optimizer did. max_grad_norm: global L2 norm to clip to; None: no clipping, and no norm is computed.
        The others: see `backward_window`.

    Example:
        for window in windows:
            result = train_step(accelerator, model, optimizer, window, scheduler=scheduler, max_grad_norm=1.0)
    """
    accelerator.sync_gradients = True  # else, after somebody's unfinished `accumulate`, Accelerate's optimizer would not step
    optimizer.zero_grad(set_to_none=True)
    result = backward_window(accelerator, model, window, targets=targets, loss_fn=loss_fn, allow_unkeyed=allow_unkeyed)
    if result.skipped:
        return result
    if max_grad_norm is not None:
        result.grad_norm_tensor = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    result.skipped = accelerator.optimizer_step_was_skipped
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # the plain one inside a prepared one
    optimizer.zero_grad(set_to_none=True)
    return result


def _backward_head(accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule) -> StepResult:
    """The head's own mean loss: targets are counted first, on the host, so the divisor is known before any forward."""
    counts = [rule.count(m.batch, len(m)) for m in window.micro_batches]
    total = sum_over_processes(accelerator, sum(counts))
    if window.expected_targets not in (None, total):
        raise ConfigError(
            f"window {window.index} of epoch {window.epoch} has {total} targets counted as {rule.name}, but target_counts say "
            f"{window.expected_targets}: correct target_counts, or leave them out."
        )
    loss_sum = torch.zeros((), dtype=_sum_dtype(accelerator), device=accelerator.device)
    # A micro-batch without targets has no mean (0 / 0): it contributes nothing and is left out.
    counted = [(m, count) for m, count in zip(window.micro_batches, counts, strict=True) if count]
    batches = _keyed_batches(accelerator, window, rule, [m for m, _ in counted])
    for batch, (_, count) in zip(batches, counted, strict=True):
        loss, _ = run_forward(model, batch, None)
        accelerator.backward(loss * (count / total))
        loss_sum += loss.detach().to(loss_sum.dtype) * count
    return StepResult(loss_sum / max(total, 1), total, skipped=total == 0)


def _backward_sums(
    accelerator: Accelerator, model: nn.Module, window: Window, rule: TargetRule, loss_fn: LossFunction
) -> StepResult:
    """An own loss counts during its forward, so the divisor is known at the end: gradients are divided by the samples first (which
    keeps their size) and corrected once. Gradients that were there before are put aside meanwhile.

    A count that is a number, not a tensor on the device, saves waiting for the device.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    earlier = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss_sum = torch.zeros((), dtype=_sum_dtype(accelerator), device=accelerator.device)
    total = 0.0
    try:
        for batch in _keyed_batches(accelerator, window, rule, window.micro_batches):
            with accelerator.autocast():
                loss, count = run_forward(model, batch, loss_fn)
            if count := float(count):  # without targets the sum may be 0 / 0: it contributes nothing and is left out
                accelerator.backward(loss / window.num_samples)
                loss_sum += loss.detach().to(loss_sum.dtype)
                total += count
        if gradients := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(gradients, window.num_samples / total)
    except BaseException:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            parameter.grad = gradient
        raise
    for parameter, gradient in zip(parameters, earlier, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return StepResult(loss_sum / (total or 1.0), int(total) if total.is_integer() else total, skipped=total == 0)


def _keyed_batches(
    accelerator: Accelerator, window: Window, rule: TargetRule, micro_batches: Iterable[MicroBatch]
) -> Iterator[dict]:
    """Each micro-batch on the device, with its samples' keys set for the dropout of the next forward."""
    for_window = window_key(window.seed, window.epoch, window.index).to(accelerator.device)
    for micro_batch in micro_batches:
        keys = sample_keys(window.seed, window.epoch, micro_batch.positions)
        rule.places.set_keys(keys.to(accelerator.device, non_blocking=True), for_window)
        yield send_to_device(micro_batch.batch, accelerator.device, non_blocking=True)


def _proven(model: nn.Module, window: Window, loss_fn: LossFunction | None, allow_unkeyed: bool) -> TargetRule:
    """The rule kept on the window's loader, proven now if this model and loss are new to it."""
    # A lambda written in the loop is a new object in every window, with the same code.
    new = (unwrapped(model), getattr(loss_fn, "__code__", loss_fn))
    for known_model, known_loss, rule in window.proofs:
        if known_model is new[0] and known_loss is new[1]:
            return rule
    samples = window.samples()[:MAX_PROOF_SAMPLES]
    rule = prove_targets(model, samples, window.fetcher.collate_fn, loss_fn=loss_fn, allow_unkeyed=allow_unkeyed)
    window.proofs.append((*new, rule))
    return rule


def _has_no_labels_that_count(window: Window) -> bool:
    """Whether all labels of the window are to be ignored, so that nothing could be proven on it and there is nothing to learn."""
    labels = [m.batch.get("labels") for m in window.micro_batches]
    return bool(labels) and all(isinstance(v, Tensor) and bool((v == IGNORED_LABEL).all()) for v in labels)


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
