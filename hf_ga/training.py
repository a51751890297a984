"""The functions for a user's own training loop: `prepare` a model once, then call `train_step` on
each window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._triton import has_triton

from hf_ga.engine.nonfinite import ON_NONFINITE, find_cause
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import ConfigError, NonFinite
from hf_ga.exact.backend import check_supported
from hf_ga.exact.base_loader import BaseLoader
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import LossFunction, is_compiled, module_modes, unwrapped
from hf_ga.exact.hooks import SpeedUp
from hf_ga.exact.precision import check_optimizer, check_precision, check_step
from hf_ga.exact.rule import Rule
from hf_ga.exact.step import add_gradients
from hf_ga.exact.update import StepResult, update
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.exact.window import LoaderState, Window
from hf_ga.parallel import prepare as parallel
from hf_ga.parallel.fsdp import backend_for, is_sharded
from hf_ga.parallel.main_proof import prove_where_weights_are
from hf_ga.proof.targets import prove
from hf_ga.speed.fused_attention import FusedAttention
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.packing import Packing

# Number of samples that the proof of a model uses, spread over the whole dataset.
NUM_PROOF_SAMPLES = 64
# The attribute of an accelerator that holds the table unwrapped model -> its `LossSettings`.
_TABLE_ATTRIBUTE = "_hf_ga_loss_settings"


def default_speed_ups(model: nn.Module, accelerator: Accelerator | None = None) -> list[SpeedUp]:
    """Return new objects of the speed-ups that `hf_ga.prepare` and `prove_targets` let the proof
    try on a model by default.

    LeanForward and ChunkedLoss are tried on every model. Packing is added where it pays off: on a
    CPU, and on a GPU with Triton, where a kernel computes its attention. Fused attention is added
    on a CPU only. Models that are sharded by FSDP or compiled support neither of the two.

    Args:
        model: The model, wrapped or not.
        accelerator: The accelerator that will prepare the model, if it is not prepared yet; its
            device decides. Default: the device of the model's parameters decides.
    """
    if accelerator is None:
        device = next(model.parameters()).device
        will_be_sharded = False
    else:
        device = accelerator.device
        will_be_sharded = is_sharded(accelerator)
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    # A method that FSDP2 adds to the modules that it shards.
    is_fsdp2 = hasattr(model, "set_requires_gradient_sync")
    speed_ups: list[SpeedUp] = [LeanForward(), ChunkedLoss()]
    if is_fsdp1 or is_fsdp2 or will_be_sharded or is_compiled(model):
        return speed_ups
    if device.type == "cpu":
        speed_ups += [Packing(), FusedAttention()]
    elif device.type == "cuda" and has_triton():
        speed_ups.append(Packing())
    return speed_ups


def prove_targets(
    model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    *,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    allow_split_dependent_randomness: bool = False,
    speed_ups: Sequence[SpeedUp] | None = None,
) -> Rule:
    """Find out how a model's loss counts its targets, and prove on a few samples that the losses
    of micro-batches add up to the loss of their window. The model, its gradients and all random
    states are unchanged.

    Args:
        model: The model, in any mode, wrapped or not. The proof runs in training mode with keyed
            dropout.
        samples: Some samples of the dataset. The shortest and the longest show whether padding
            affects the loss.
        collate_fn: A function (list of samples) -> keyword arguments of the model.
        loss_fn: A function (outputs, batch) -> (sum of the loss over the targets, number of
            targets), which replaces the head's own loss.
        whole_batch: A function (outputs, batch) -> the loss of all samples of a window, a scalar,
            in place of `loss_fn`; see `prepare`.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample. The
            proof puts the modules that make them into evaluation mode.
        speed_ups: Hooks to try. Those that change the loss or the gradient are not used. Default:
            `default_speed_ups(model)`.

    Returns:
        The rule by which micro-batches of this model add up to their window.

    Raises:
        LossNotAdditive: If no counting rule fits, several different rules fit, or no sample has a
            target.
        ConfigError: If no parameter is trainable, or some are not float32.
        UnkeyedRandomness: If a random draw of the model cannot be tied to its sample.

    Example:
        proven = prove_targets(model, [dataset[i] for i in range(32)], collate_fn)
        proven.name        # 'shifted labels' for a GPT, 'labels' for a BERT with a masked-LM head
    """
    check_one_loss(loss_fn, whole_batch)
    return prove(
        model,
        samples,
        collate_fn,
        loss_fn=loss_fn,
        whole_batch=whole_batch,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
        speed_ups=default_speed_ups(model) if speed_ups is None else speed_ups,
    )


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
    """The loss settings of one model: the arguments of `prepare` that say which loss to train on,
    what is proven about it, and which checks to make.

    Attributes:
        loss_fn: The loss function that replaces the head's own loss; see `prepare`. None: not
            replaced.
        whole_batch: The loss function over all samples of a window; see `prepare`. None: not used.
        allow_split_dependent_randomness: Whether random draws that cannot be tied to a sample are
            accepted.
        rule: The result of the proof. None: the first window of each loader proves it.
        audit: Whether the rule is tested again on the data that is trained on.
    """

    loss_fn: LossFunction | None = None
    whole_batch: WholeBatchLoss | None = None
    allow_split_dependent_randomness: bool = False
    rule: Rule | None = None
    audit: bool = True


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: BaseLoader | None = None,
    *,
    loss_fn: LossFunction | None = None,
    whole_batch: WholeBatchLoss | None = None,
    allow_split_dependent_randomness: bool = False,
    rule: Rule | None = None,
    audit: bool = True,
) -> tuple[nn.Module, Any]:
    """Prepare a model and its optimizer for `train_step`.

    Calls `accelerator.prepare(model, optimizer)`. Before that, it proves how the model's loss
    counts its targets (if `windows` is passed) and records the loss settings on the accelerator.
    Under FSDP it also configures gradients to be reduced in float32.

    Under FSDP2 with `cpu_ram_efficient_loading` only the main process's weights are read: it makes
    the proof, and the other processes may have built their model on the meta device.

    Args:
        accelerator: The accelerator of the run.
        model: The model, not wrapped yet.
        optimizer: The optimizer of the model's parameters.
        windows: The `WindowLoader` of the training samples. With it the proof is made here,
            otherwise by the first step. Required under FSDP1, which shards the model.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets). Replaces
            the head's own loss.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, a scalar. For a loss
            that is not a sum over samples: in-batch negatives, the hardest samples. It gets the
            outputs of all samples over all ranks, one row per sample, and their batch. Each
            micro-batch has two forwards. Parameters of the model, or of a module, that it uses are
            trained, too.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        rule: The result of `prove_targets`, in place of `windows`.
        audit: Test the loss again on the windows that are trained on, before their updates. With
            False, a kind of sample that the proof did not contain may train with a wrong gradient.

    Returns:
        The prepared model and optimizer.

    Raises:
        LossNotAdditive, UnkeyedRandomness, ConfigError: See `prove_targets`.
        ConfigError: Also for an optimizer whose step needs a closure (LBFGS).

    Example:
        windows = hf_ga.WindowLoader(dataset, collate_fn, accelerator=accelerator)
        model, optimizer = hf_ga.prepare(accelerator, model, optimizer, windows)
    """
    check_step(optimizer)
    check_one_loss(loss_fn, whole_batch)
    base_model = unwrapped(model)
    settings = LossSettings(loss_fn, whole_batch, allow_split_dependent_randomness, rule, audit)
    must_prove = windows is not None and rule is None

    def prove_or_use_given_rule() -> Rule | None:
        """Return the rule of a proof made now, or the `rule` argument of `prepare` if there is
        nothing to prove. For a proof, moves the model to the accelerator's device, unless FSDP will
        shard it.
        """
        if not must_prove:
            return rule
        if accelerator.device_placement and not is_sharded(accelerator):
            base_model.to(accelerator.device)
        return _prove(
            base_model,
            windows.probe_samples(NUM_PROOF_SAMPLES),
            windows.collate_fn,
            settings,
            speed_ups=default_speed_ups(base_model, accelerator),
        )

    proven = prove_where_weights_are(
        accelerator, base_model, prove_or_use_given_rule, functions=(loss_fn, whole_batch)
    )
    if must_prove:
        _store_rule(proven, base_model, windows.state)
    else:
        settings = replace(settings, rule=proven)
    remember(accelerator, base_model, settings)
    return parallel.prepare(accelerator, model, optimizer)


def remember(accelerator: Accelerator, model: nn.Module, settings: LossSettings) -> None:
    """Record the loss settings of a model (arguments of `hf_ga.prepare`) on the accelerator that
    trains it, replacing earlier ones; `recorded_settings` returns them to `train_step`.

    Args:
        accelerator: The accelerator that trains the model.
        model: The model, wrapped or not.
        settings: Its loss settings.

    Raises:
        ConfigError: If the settings contain a rule that was proven with another loss than theirs.
    """
    has_loss = settings.loss_fn is not None or settings.whole_batch is not None
    if settings.rule is not None and has_loss and not _has_same_loss(settings.rule, settings):
        raise ConfigError(
            "the loss differs from the one of the proof, and would not be used: pass it to "
            "prove_targets, or omit `rule`."
        )
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
        model: The model, prepared by `hf_ga.prepare` (or by the accelerator), in training mode. If
            `prepare` did not prove its loss, the first window does, on samples of the whole
            dataset.
        window: A window of a `WindowLoader`.

    Returns:
        The window's mean loss and number of targets, the same on all processes.

    Raises:
        LossNotAdditive, UnkeyedRandomness: See `prove_targets`.
        ConfigError: If the distributed backend cannot sum gradients exactly, or Accelerate would
            silently ignore the mixed precision.
        OutOfMemory: If a single sample (under FSDP1, a micro-batch) does not fit.
        ProcessFailed: If another process raised an error in this window.

    Example:
        result = backward_window(accelerator, model, window)
        result.loss, result.num_targets
    """
    return add_gradients(engine_for(accelerator, model, window), window)


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
    # After an unfinished `accumulate`, Accelerate's optimizer would not step.
    accelerator.sync_gradients = True
    optimizer.zero_grad(set_to_none=True)
    engine = engine_for(accelerator, model, window)
    result = add_gradients(engine, window)
    if result.skipped:
        return result
    update(engine.backend, model, optimizer, max_grad_norm, result)
    if scheduler is not None and not result.skipped:
        getattr(scheduler, "scheduler", scheduler).step()  # unwraps a prepared scheduler
    optimizer.zero_grad(set_to_none=True)
    if result.nonfinite:
        # No parameter was updated, so the window's forwards can be repeated to find the cause.
        backend = backend_for(accelerator)
        window.state.pad_to_window |= engine.rule.pad_to_window
        search_engine = WindowEngine(lambda: backend, allow_split_dependent_randomness=True)
        settings = recorded_settings(accelerator, model) or LossSettings()
        loop = OwnLoop(search_engine, model, settings.loss_fn, settings.whole_batch)
        result.cause = find_cause(loop, window, result.loss)
        if on_nonfinite == "stop":
            raise NonFinite(f"{result.cause}. No parameter was updated.")
    return result


def engine_for(accelerator: Accelerator, model: nn.Module, window: Window) -> Engine:
    """Build the engine with which `train_step` computes one window of a model, with the backend of
    the accelerator and the model's rule. Proves the rule first if it is not known yet.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The prepared model, in training mode.
        window: A window of a `WindowLoader`.

    Raises:
        ConfigError: If `window` is not a `Window`, or a setting of the accelerator is not
            supported.
        Others: See `backward_window`.
    """
    if not isinstance(window, Window):
        raise ConfigError(
            f"a window of a WindowLoader is needed, got a {type(window).__name__}: iterate over a "
            "WindowLoader."
        )
    check_supported(accelerator)
    check_precision(accelerator)
    settings = recorded_settings(accelerator, model)
    if settings is None:
        settings = LossSettings()
    rule = rule_for(model, window, settings)
    rule.check_fits(model)
    return Engine(
        backend_for(accelerator, same_bits=window.request.chunk_tree is not None),
        model,
        rule,
        allow_split_dependent_randomness=settings.allow_split_dependent_randomness,
        is_audited=settings.audit,
    )


def rule_for(model: nn.Module, window: Window, settings: LossSettings) -> Rule:
    """Return the proven rule of a model for a window of the user's training loop: the one in its
    settings, else the one that the window's loader has stored.

    If neither has one, or the stored one was proven for other training modes or another loss, make
    the proof now and store its result in the loader.

    Args:
        model: The prepared model.
        window: A window of the loader; the proof takes samples of its whole dataset.
        settings: The loss settings of the model.

    Returns:
        The rule. For a model that was compiled after the proof, without the packing speed-up.

    Raises:
        ConfigError: If a proof is needed, but FSDP1 has already sharded the model.
        LossNotAdditive, UnkeyedRandomness: See `prove_targets`.
    """
    base_model = unwrapped(model)
    rule = settings.rule
    if rule is None:
        rule = window.state.rules.get(base_model)
        if rule is None or not _is_valid(rule, base_model, settings):
            rule = _prove_on_dataset_of(window, model, settings)
            _store_rule(rule, base_model, window.state)
    if is_compiled(model):
        # Compiled layers skip the hooks of packing. The model was compiled after the proof if the
        # rule has packing.
        speed_ups = tuple(hook for hook in rule.speed_ups if not isinstance(hook, Packing))
        if len(speed_ups) < len(rule.speed_ups):
            rule = replace(rule, speed_ups=speed_ups)
    return rule


def _is_valid(rule: Rule, base_model: nn.Module, settings: LossSettings) -> bool:
    """Whether the rule that a loader has stored still holds for `train_step`: it was proven in the
    model's present training modes, with the loss of the settings.

    Args:
        rule: How the model's loss counts its targets, from the proof.
        base_model: The unwrapped model.
        settings: Its loss settings: the arguments of `hf_ga.prepare`.
    """
    return rule.modes == module_modes(base_model) and _has_same_loss(rule, settings)


def _has_same_loss(rule: Rule, settings: LossSettings) -> bool:
    """Whether a rule was proven with the same user-defined loss (or none) as in the loss settings
    that `hf_ga.prepare` recorded.
    """
    return (
        getattr(rule.loss, "loss_fn", None) == settings.loss_fn
        and getattr(rule.loss, "whole_batch", None) == settings.whole_batch
    )


def _prove_on_dataset_of(window: Window, model: nn.Module, settings: LossSettings) -> Rule:
    """Prove a model's loss on samples of the whole dataset that a window comes from, in the first
    `train_step` of a model that `hf_ga.prepare` did not prove.

    Raises:
        ConfigError: If FSDP1 has already sharded the model, so that its loss cannot be proven.
    """
    if isinstance(model, FullyShardedDataParallel):
        raise ConfigError(
            "under FSDP1 a model must be tested before it is sharded: pass the windows, "
            "hf_ga.prepare(accelerator, model, optimizer, windows)."
        )
    samples = window.fetcher.probe_samples(window.request, NUM_PROOF_SAMPLES)
    return _prove(unwrapped(model), samples, window.fetcher.collate_fn, settings)


def _prove(
    base_model: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    settings: LossSettings,
    speed_ups: Sequence[SpeedUp] | None = None,
) -> Rule:
    """Call `prove_targets` with the loss settings that a model got from `hf_ga.prepare`.

    Args:
        base_model: The unwrapped model.
        samples: The samples of the proof.
        collate_fn: A function (list of samples) -> keyword arguments of the model.
        settings: The loss settings; their rule is ignored.
        speed_ups: Hooks to try. None: the default ones for the device of the model.
    """
    return prove_targets(
        base_model,
        samples,
        collate_fn,
        loss_fn=settings.loss_fn,
        whole_batch=settings.whole_batch,
        allow_split_dependent_randomness=settings.allow_split_dependent_randomness,
        speed_ups=speed_ups,
    )


def _store_rule(rule: Rule, base_model: nn.Module, state: LoaderState) -> None:
    """Store a model's proven rule in the state of a `WindowLoader`, for all its windows in the
    user's training loop, and make the loader pad micro-batches to the width of their window if the
    proven loss needs that.
    """
    state.rules[base_model] = rule
    state.pad_to_window |= rule.pad_to_window
