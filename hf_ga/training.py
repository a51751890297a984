"""The functions for a user's own training loop: `prepare` a model once, then call `train_step` on
each window.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn

from hf_ga.engine.checks.nonfinite import ON_NONFINITE, find_cause
from hf_ga.engine.look.trial import LossFacts, adopt, try_loss
from hf_ga.engine.own_loop import KeptLoop, OwnLoop
from hf_ga.engine.update import StepResult, update
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.errors import ConfigError, NonFinite
from hf_ga.loading.base_loader import BaseLoader
from hf_ga.loading.window import Window
from hf_ga.model.forward import LossFunction, unwrapped
from hf_ga.model.precision import LOW_PRECISION, check_optimizer, check_precision, check_step
from hf_ga.parallel import prepare as parallel
from hf_ga.parallel.backend import Backend, LocalBackend, check_supported
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.main_weights import loads_on_main
from hf_ga.parallel.processes import call_on_main

NUM_TRIED_SAMPLES = 64  # of a dataset, from which those of the trial are chosen
# The attribute of an accelerator that holds the table unwrapped model -> its `LossSettings`.
_TABLE_ATTRIBUTE = "_hf_ga_loss_settings"
# The attribute of an unwrapped model that holds its `KeptLoop`.
_LOOP_ATTRIBUTE = "_hf_ga_train_step"


def check_one_loss(loss_fn: LossFunction | None, whole_batch: WholeBatchLoss | None) -> None:
    """Check that a user passed at most one of the two kinds of loss functions to `hf_ga.prepare`
    (or another function of the package). If both are None, the model's own loss is used.

    Args:
        loss_fn: A loss that is a sum over samples.
        whole_batch: A loss over all samples of a window.

    Raises:
        ConfigError: If both are passed.
    """
    if loss_fn is not None and whole_batch is not None:
        raise ConfigError(
            "loss_fn and whole_batch are two losses: pass one of them, or add the sum of loss_fn "
            "to what whole_batch returns."
        )


@dataclass(frozen=True)
class LossSettings:
    """The loss settings of one model: arguments of `prepare`.

    Attributes:
        loss_fn: The loss function that replaces the head's own loss; see `prepare`. None: not
            replaced.
        whole_batch: The loss function over all samples of a window; see `prepare`. None: not used.
        allow_split_dependent_randomness: Whether random draws that cannot be tied to a sample are
            accepted.
    """

    loss_fn: LossFunction | None = None
    whole_batch: WholeBatchLoss | None = None
    allow_split_dependent_randomness: bool = False


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: BaseLoader | None = None,
    *,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    allow_split_dependent_randomness: bool = False,
) -> tuple[nn.Module, Any]:
    """Prepare a model and its optimizer for `train_step`.

    Calls `accelerator.prepare(model, optimizer)`, and records the loss settings on the accelerator.
    Under FSDP it also configures gradients to be reduced in float32.

    With `windows`, it first tries the loss on a few samples: an error shows before training, and
    speed-ups that change nothing are used from the first window on. Under FSDP nothing is tried
    later, so pass them there. Under FSDP2 with `cpu_ram_efficient_loading` the main process tries,
    and the others may have built their model on the meta device.

    Args:
        accelerator: The accelerator of the run.
        model: The model, not wrapped yet.
        optimizer: The optimizer of the model's parameters.
        windows: The `WindowLoader` of the training samples.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets). Replaces
            the head's own loss.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, a scalar. For a loss
            that is not a sum over samples: in-batch negatives, the hardest samples. It gets the
            outputs of all samples over all ranks, one row per sample, and their batch. Each
            micro-batch has two forwards. Parameters of the model, or of a module, that it uses are
            trained, too.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.

    Returns:
        The prepared model and optimizer.

    Raises:
        LossNotAdditive: If the loss is not a sum of means, or compares samples.
        UnkeyedRandomness: If random numbers were drawn that cannot be tied to samples.
        ConfigError: If the model cannot be trained exactly, or the optimizer's step needs a closure
            (LBFGS).

    Example:
        windows = hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator)
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    """
    check_step(optimizer)
    check_one_loss(loss_fn, whole_batch)
    settings = LossSettings(loss_fn, whole_batch, allow_split_dependent_randomness)
    if windows is not None:
        samples = windows.trial_samples(NUM_TRIED_SAMPLES)
        facts = try_before(accelerator, model, samples, windows.collate_fn, settings)
        facts.note_padding(windows.state)
    return prepare_with(accelerator, model, optimizer, settings)


def try_before(
    accelerator: Accelerator,
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    settings: LossSettings,
) -> LossFacts:
    """Try the loss of a model before it is prepared. A collective.

    Args:
        accelerator: The accelerator of the run.
        model: The model, not wrapped yet. It is moved to the accelerator's device, unless FSDP will
            shard it.
        samples: Some samples of the dataset.
        collate_fn: A function (list of samples) -> keyword arguments of the model.
        settings: Its loss settings.

    Returns:
        What was found, the same on all processes.

    Raises:
        See `prepare`.
    """
    base_model = unwrapped(model)
    is_alone = not loads_on_main(accelerator)
    if is_alone and any(parameter.is_meta for parameter in base_model.parameters()):
        raise ConfigError(
            "the model has no weights on this process (they are on the meta device), so nothing "
            "can be tried here: load them, or use FSDP2 with fsdp_cpu_ram_efficient_loading, where "
            "the main process tries, and the others get the result."
        )
    if accelerator.device_placement and not is_sharded(accelerator):
        base_model.to(accelerator.device)
    backend = LocalBackend(next(base_model.parameters()).device)
    loop = loop_of(base_model, backend, settings)
    attempt = partial(try_loss, loop, samples, collate_fn)
    with accelerator.autocast() if needs_autocast(base_model) else nullcontext():
        facts = attempt() if is_alone else call_on_main(accelerator, attempt)
    if not (is_alone or accelerator.is_main_process):
        adopt(loop, facts)
    loop.engine.unused = facts.unused
    return facts


def needs_autocast(model: nn.Module) -> bool:
    """Whether a model computes in a mixed precision only: frozen weights in half precision beside
    trainable ones in float32, or FlashAttention, which has no float32.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return bool(dtypes & set(LOW_PRECISION)) or "flash" in attention


def prepare_with(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: LossSettings,
) -> tuple[nn.Module, Any]:
    """Prepare a model and its optimizer for `train_step`, with loss settings that may have been
    tried.
    """
    remember(accelerator, model, settings)
    _allow_steps(accelerator)
    return parallel.prepare(accelerator, model, optimizer)


def loop_of(model: nn.Module, backend: Backend, settings: LossSettings) -> OwnLoop:
    """Return the loop that computes the windows of a model, kept between its steps."""
    kept: KeptLoop = vars(unwrapped(model)).setdefault(_LOOP_ATTRIBUTE, KeptLoop())
    return kept.get(
        model,
        backend,
        settings.loss_fn,
        settings.whole_batch,
        allow_split_dependent_randomness=settings.allow_split_dependent_randomness,
    )


def remember(accelerator: Accelerator, model: nn.Module, settings: LossSettings) -> None:
    """Record the loss settings of a model (arguments of `hf_ga.prepare`) on the accelerator that
    trains it, replacing earlier ones; `recorded_settings` returns them to `train_step`.

    Args:
        accelerator: The accelerator that trains the model.
        model: The model, wrapped or not.
        settings: Its loss settings.
    """
    table = vars(accelerator).setdefault(_TABLE_ATTRIBUTE, WeakKeyDictionary())
    table[unwrapped(model)] = settings


def recorded_settings(accelerator: Accelerator, model: nn.Module) -> LossSettings | None:
    """Return the loss settings that `hf_ga.prepare` recorded for a model on an accelerator (by
    `remember`), for each `train_step`. None if there are none.

    Args:
        accelerator: The accelerator that trains the model.
        model: The model, wrapped or not.
    """
    table = vars(accelerator).get(_TABLE_ATTRIBUTE)
    if table is None:
        return None
    return table.get(unwrapped(model))


def backward_window(accelerator: Accelerator, model: nn.Module, window: Window) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`. The caller clips, steps the optimizer
    and zeroes the gradients.

    Under fp16 `.grad` is the gradient times the loss scale. Remove the scale once, after the last
    window that is added and before anything reads the gradient, with `accelerator.clip_grad_norm_`
    or `accelerator.unscale_gradients`; otherwise the prepared optimizer's step removes it. Add
    several windows only while the scale is the same: until any prepared optimizer steps.

    If a process runs out of memory, all processes drop the window's gradients and recompute them in
    smaller micro-batches: the same update. The window's loader keeps the smaller limit for its next
    windows. FSDP1 does not support this, because a failing process cannot rejoin the others; FSDP2
    does since torch 2.13.

    Under FSDP the gradients are reduced once per window. With Accelerate's `sync_each_batch=True`
    (`GradientAccumulationPlugin`) they are reduced after every micro-batch: more communication, but
    no process keeps unsharded gradients between micro-batches.

    Args:
        accelerator: The accelerator of the run.
        model: The model, prepared by `hf_ga.prepare` (or by the accelerator), in training mode.
        window: A window of a `WindowLoader`.

    Returns:
        The window's mean loss and number of targets, the same on all processes.

    Raises:
        LossNotAdditive, UnkeyedRandomness: See `prepare`.
        ConfigError: If the distributed backend cannot sum gradients exactly, or Accelerate would
            silently ignore the mixed precision.
        OutOfMemory: If a single sample (under FSDP1, a micro-batch) does not fit.
        ProcessFailed: If another process raised an error in this window.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    return loop_for(accelerator, model, window).add_gradients(window)


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Window,
    *,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    max_grad_norm: float | None = None,
    on_nonfinite: str = "stop",
) -> StepResult:
    """Make one update: compute the gradient of the window, clip it once, step the optimizer and
    the scheduler, zero the gradients.

    Under fp16 the gradients of all micro-batches are summed before the loss scale is removed once:
    an overflow in any of them skips the whole window and lowers the scale once.

    Args:
        accelerator: The accelerator of the run.
        model: See `backward_window`.
        optimizer: The optimizer, prepared by `hf_ga.prepare` or by the accelerator.
        window: A window of a `WindowLoader`.
        scheduler: The learning rate scheduler, not prepared (Accelerate would step it once per
            process). It steps only if the optimizer did. Under fp16 build it before `prepare`, or
            torch warns that the optimizer's step was replaced.
        max_grad_norm: Global L2 norm to clip the gradients to. None or 0: no clipping, and no
            `grad_norm`.
        on_nonfinite: What to do before the optimizer's step if the loss or a gradient is not finite
            (not under fp16, where the scaler skips overflows): "stop" raises NonFinite, "skip"
            skips the window. Neither updates any parameter.

    Returns:
        The window's loss and number of targets, the gradient norm, and whether the update was
        skipped.

    Raises:
        ConfigError: If the scheduler is a ReduceLROnPlateau, the optimizer's step needs a closure
            (LBFGS), the optimizer is not prepared under fp16, or for a reason of `backward_window`.
        NonFinite: If the loss or a gradient of the window is not finite. The message names the
            samples and the first module with a non-finite output.
        Others: See `backward_window`.

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
    loop = loop_for(accelerator, model, window)
    optimizer.zero_grad(set_to_none=True)
    result = loop.add_gradients(window)
    if result.skipped:
        return result
    update(loop.engine.backend, model, optimizer, max_grad_norm, result)
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # unwraps a prepared scheduler
    optimizer.zero_grad(set_to_none=True)
    if result.nonfinite:
        # No parameter was updated, so the window's forwards can be repeated to find the cause.
        result.cause = find_cause(loop, window, result.loss)
        if on_nonfinite == "stop":
            raise NonFinite(f"{result.cause}. No parameter was updated.")
    return result


def loop_for(accelerator: Accelerator, model: nn.Module, window: Window) -> OwnLoop:
    """Return what computes the windows of a model for `train_step`.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The prepared model, in training mode.
        window: A window of a `WindowLoader`.

    Raises:
        ConfigError: If `window` is not a `Window`, the model is in evaluation mode, or a setting of
            the accelerator is not supported.
    """
    if not isinstance(window, Window):
        raise ConfigError(
            f"a window of a WindowLoader is needed, got a {type(window).__name__}: iterate over a "
            "WindowLoader."
        )
    if not model.training:
        raise ConfigError(
            "the model is in evaluation mode: call model.train() before a training step."
        )
    check_supported(accelerator)
    check_precision(accelerator)
    _allow_steps(accelerator)
    settings = recorded_settings(accelerator, model) or LossSettings()
    has_chunks = window.request.chunk_tree is not None
    return loop_of(model, backend_for(accelerator, same_bits=has_chunks), settings)


def _allow_steps(accelerator: Accelerator) -> None:
    """After an unfinished `accumulate`, of whichever Accelerator of the process, Accelerate's
    optimizers would neither step nor zero gradients.
    """
    accelerator.sync_gradients = True
