"""One optimizer step on one window: build the exact step from the proof, add the gradient, clip and
update once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_ga.errors import ConfigError, NonFinite
from hf_ga.exact.backend import check_supported
from hf_ga.exact.forward import LossFunction, is_compiled, module_modes, unwrapped
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.precision import check_optimizer, check_precision
from hf_ga.exact.step import Step
from hf_ga.exact.update import StepResult, update
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import backend_for
from hf_ga.proof.identity import identity_of, same
from hf_ga.proof.targets import ProvenLoss, prove
from hf_ga.recovery.nonfinite import ON_NONFINITE, find_cause
from hf_ga.speed.fused_attention import FusedAttention
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.packing import Packing

NUM_PROOF_SAMPLES = 64  # spread over the whole dataset


def default_speed_ups(model: nn.Module) -> list[SpeedUp]:
    """The speed-ups to try on a model. Packing and fused attention pay off on a CPU only
    (docs/performance.md).
    """
    everywhere = [LeanForward(), ChunkedLoss()]
    on_cpu = next(model.parameters()).device.type == "cpu"
    sharded = isinstance(model, FullyShardedDataParallel) or hasattr(
        model, "set_requires_gradient_sync"
    )
    return (
        [*everywhere, Packing(), FusedAttention()]
        if on_cpu and not sharded and not is_compiled(model)
        else everywhere
    )


def prove_targets(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    allow_split_dependent_randomness: bool = False,
    speed_ups: Sequence[SpeedUp] | None = None,
) -> ProvenLoss:
    """Find out how a model's loss counts its targets and prove it on a few samples. The model and
    all random states are unchanged.

    Args:
        model: in any mode, wrapped or not; the proof runs in training mode with keyed dropout.
        samples: some samples of the dataset; the shortest and the longest show whether padding
            affects the loss.
        collate_fn: list of samples -> keyword arguments of the model.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets);
            overrides the head's own loss.
        allow_split_dependent_randomness: accept random draws that cannot be tied to a sample; the
            proof puts the modules that make them into evaluation mode.
        speed_ups: hooks to try; those that change loss or gradient are left out. Default:
            `default_speed_ups(model)`.

    Raises:
        LossNotAdditive: no counting rule fits, several different rules fit, or no sample has a
            target. ConfigError: no parameter is trainable, or some are not float32.
            UnkeyedRandomness: a random draw of the model cannot be tied to its sample.

    Example:
        proven = prove_targets(model, [dataset[i] for i in range(32)], collate_fn)
        proven.name        # 'shifted labels' for a GPT, 'labels' for a BERT with a masked-LM head
    """
    return prove(
        model,
        samples,
        collate_fn,
        loss_fn=loss_fn,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
        speed_ups=default_speed_ups(model) if speed_ups is None else speed_ups,
    )


def backward_window(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    *,
    targets: ProvenLoss | None = None,
    loss_fn: LossFunction | None = None,
    allow_split_dependent_randomness: bool = False,
) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`. The caller clips, steps the optimizer
    and zeroes the gradients.

    Under fp16 `.grad` is the gradient times the loss scale: `accelerator.clip_grad_norm_` or
        `accelerator.unscale_gradients`
    removes it, once, after the last window that is added and before anything reads the gradient; or
    the prepared optimizer's step does. Add several windows only while the scale is the same: until
    any prepared optimizer steps.

    If a process runs out of memory, all processes drop the window's gradients and recompute them in
    smaller micro-batches: the same update. The loader keeps the limit found. Not under FSDP, where
    a failing process cannot rejoin the others.

    Under FSDP the gradients are reduced once per window; after every micro-batch with Accelerate's
    `sync_each_batch=True` (`GradientAccumulationPlugin`): more communication, but no process keeps
    unsharded gradients between micro-batches.

    Args:
        model: prepared by the accelerator, in training mode.
        window: from a `WindowLoader`.
        targets: the result of `prove_targets`. Default: the model is proven with the first window,
            on samples of the whole dataset, and the loader keeps the proof.
        loss_fn, allow_split_dependent_randomness: see `prove_targets`.

    Raises:
        LossNotAdditive, UnkeyedRandomness: see `prove_targets`. ConfigError: a backend that cannot
            be exact, or a precision that Accelerate would not apply. OutOfMemory: a single sample
            (under FSDP, a micro-batch) does not fit. ProcessFailed: another process raised an error
            in this window.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    if not isinstance(window, Window):
        raise ConfigError(
            f"a window of a WindowLoader is needed, got a {type(window).__name__}: iterate over a "
            "WindowLoader."
        )
    check_supported(accelerator)
    check_precision(accelerator)
    proven = targets or _proven(model, window, loss_fn, allow_split_dependent_randomness)
    proven.check_fits(model, loss_fn)
    # For a model that was compiled after its proof: compiled layers skip the hooks of packing.
    hooks = [
        hook for hook in proven.hooks if not (isinstance(hook, Packing) and is_compiled(model))
    ]
    step = Step(
        backend_for(accelerator, same_bits=window.request.chunks is not None),
        model,
        proven.loss,
        hooks,
        pad_to_window=proven.pad_to_window,
        unused=proven.unused,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    return step.add_gradients(window)


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
    targets: ProvenLoss | None = None,
    loss_fn: LossFunction | None = None,
    allow_split_dependent_randomness: bool = False,
    on_nonfinite: str = "stop",
) -> StepResult:
    """One update: gradient of the window, clip once, step optimizer and scheduler, zero the
    gradients.

    Under fp16 the gradients of all micro-batches are summed before the loss scale is removed once:
    an overflow in any of them skips the whole window and lowers the scale once.

    Args:
        optimizer: prepared by the accelerator. scheduler: not prepared (Accelerate would step it
            once per process); it steps only if the optimizer did. Under fp16 build it before
            `prepare`, or torch warns that the optimizer's step was replaced.
        max_grad_norm: global L2 norm to clip the gradients to; None or 0: no clipping, and no
            `grad_norm`.
        on_nonfinite: what to do before the optimizer's step if the loss or a gradient is not finite
            (not under fp16, where the scaler skips overflows): "stop" raises, "skip" leaves the
            window out. Neither updates any parameter.
        The others: see `backward_window`.

    Raises:
        ConfigError: also a ReduceLROnPlateau, and under fp16 an optimizer that was not prepared.
            NonFinite: the loss or a gradient of the window is not finite; the message names the
            samples and the first module with a non-finite output.

    Example:
        for window in windows:
            result = train_step(
                accelerator, model, optimizer, window, scheduler=scheduler, max_grad_norm=1.0
            )
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric in every step: step it yourself after each "
            "evaluation."
        )
    if on_nonfinite not in ON_NONFINITE:
        raise ConfigError(
            f"on_nonfinite must be one of {', '.join(ON_NONFINITE)}, got {on_nonfinite!r}."
        )
    check_optimizer(accelerator, optimizer)
    accelerator.sync_gradients = (
        True  # after an unfinished `accumulate`, Accelerate's optimizer would not step
    )
    optimizer.zero_grad(set_to_none=True)
    proof = {
        "loss_fn": loss_fn,
        "allow_split_dependent_randomness": allow_split_dependent_randomness,
    }
    result = backward_window(accelerator, model, window, targets=targets, **proof)
    if result.skipped:
        return result
    update(backend_for(accelerator), model, optimizer, max_grad_norm, result)
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # unwraps a prepared scheduler
    optimizer.zero_grad(set_to_none=True)
    if result.nonfinite:
        proven = targets or _proven(model, window, **proof)
        window = window.padded_to_window() if proven.pad_to_window else window
        result.cause = find_cause(
            accelerator, model, window, proven.loss, proven.dropout, result.loss
        )
        if on_nonfinite == "stop":
            raise NonFinite(f"{result.cause}. No parameter was updated.")
    return result


def _proven(
    model: nn.Module,
    window: Window,
    loss_fn: LossFunction | None,
    allow_split_dependent_randomness: bool,
) -> ProvenLoss:
    """The proof that the window's loader keeps; proves the model now if it, its modes or the loss
    changed.

    Raises:
        ConfigError: the model is already sharded by FSDP1, so it cannot be proven now.
    """
    base = unwrapped(model)
    proven_with, proven = window.state.proofs.get(base, (None, None))
    if (
        proven is not None
        and same(proven_with, identity_of(loss_fn))
        and proven.modes == module_modes(base)
    ):
        return proven
    if isinstance(model, FullyShardedDataParallel):
        raise ConfigError(
            "under FSDP1 a model must be proven before it is wrapped: proven = "
            "hf_ga.prove_targets(model, samples, collate_fn) "
            "before prepare, then targets=proven."
        )
    proven = prove_targets(
        base,
        window.fetcher.probe_samples(window.request, NUM_PROOF_SAMPLES),
        window.fetcher.collate_fn,
        loss_fn=loss_fn,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    window.state.proofs[base] = (
        identity_of(loss_fn),
        proven,
    )  # after its calls: they may fill its closure
    window.state.pad_to_window |= proven.pad_to_window
    return proven
