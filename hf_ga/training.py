"""The own loop's functions: `prepare` a model once, then `train_step` on each window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._triton import has_triton

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
from hf_ga.recovery.nonfinite import ON_NONFINITE, find_cause
from hf_ga.speed.fused_attention import FusedAttention
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.lean_forward import LeanForward
from hf_ga.speed.packing import Packing

NUM_PROOF_SAMPLES = 64  # spread over the whole dataset


def default_speed_ups(model: nn.Module, accelerator: Accelerator | None = None) -> list[SpeedUp]:
    """The speed-ups to try on a model.

    Packing pays off on a CPU, and on a GPU with Triton, where a kernel computes its attention.
    Fused attention is for a CPU. Sharded or compiled layers support neither.

    Args:
        model: The model, wrapped or not.
        accelerator: Where the model will train, if it is not prepared yet. Default: where it is.
    """
    everywhere = [LeanForward(), ChunkedLoss()]
    device = next(model.parameters()).device if accelerator is None else accelerator.device
    sharded = isinstance(model, FullyShardedDataParallel)
    sharded |= hasattr(model, "set_requires_gradient_sync")
    sharded |= accelerator is not None and is_sharded(accelerator)
    if sharded or is_compiled(model):
        return everywhere
    if device.type == "cpu":
        return [*everywhere, Packing(), FusedAttention()]
    if device.type == "cuda" and has_triton():
        return [*everywhere, Packing()]
    return everywhere


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
    """Find out how a model's loss counts its targets and prove it on a few samples. The model and
    all random states are unchanged.

    Args:
        model: in any mode, wrapped or not; the proof runs in training mode with keyed dropout.
        samples: some samples of the dataset; the shortest and the longest show whether padding
            affects the loss.
        collate_fn: list of samples -> keyword arguments of the model.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets);
            overrides the head's own loss.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, a scalar, in place of
            `loss_fn`; see `prepare`.
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
    """Check that there is one loss.

    Raises:
        ConfigError: If both are given.
    """
    if loss_fn is not None and whole_batch is not None:
        raise ConfigError(
            "loss_fn and whole_batch are two losses: pass one of them, or add the sum of loss_fn "
            "to what whole_batch returns."
        )


@dataclass(frozen=True)
class Given:
    """What is given once for a model, in `prepare`.

    Attributes:
        loss_fn: The loss in place of the head's own.
        whole_batch: The loss of all samples of a window, in place of `loss_fn`.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        rule: What was proven. None: the first window of each loader proves it.
        audit: Test it again on the data that is trained on.
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

    As `accelerator.prepare(model, optimizer)`; also keeps what must be known about the loss, and
    under FSDP lets gradients be reduced in float32.

    Under FSDP2 with `cpu_ram_efficient_loading` only the main process's weights are read: it tests
    the model, and the others may have built theirs on the meta device.

    Args:
        accelerator: The accelerator of the run.
        model: Not wrapped yet.
        optimizer: Of the model's parameters.
        windows: The `WindowLoader` of the training samples. With it the model is tested here,
            otherwise by the first step. Required under FSDP1, which shards the model.
        loss_fn: (outputs, batch) -> (sum of the loss over the targets, number of targets). Replaces
            the head's own loss.
        whole_batch: (outputs, batch) -> the loss of all samples of a window, a scalar. For a loss
            that no sum over samples expresses: in-batch negatives, the hardest samples. It gets
            the outputs of all samples over all ranks, one row per sample, and their batch. Each
            micro-batch has two forwards. Parameters of a module, or of the model, that it uses are
            trained, too.
        allow_split_dependent_randomness: Accept random draws that cannot be tied to a sample.
        rule: The result of `prove_targets`, in place of `windows`.
        audit: Test the loss again on the windows that are trained on, before their updates. False
            accepts that a kind of row which the proof did not see trains a wrong gradient.

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
    base = unwrapped(model)
    check_one_loss(loss_fn, whole_batch)
    given = Given(loss_fn, whole_batch, allow_split_dependent_randomness, rule, audit)

    def prove_now() -> Rule | None:
        if windows is None or rule is not None:
            return rule
        if accelerator.device_placement and not is_sharded(accelerator):
            base.to(accelerator.device)
        samples = windows.probe_samples(NUM_PROOF_SAMPLES)
        speed_ups = default_speed_ups(base, accelerator)
        return _prove(base, samples, windows.collate_fn, given, speed_ups)

    proven = prove_where_weights_are(accelerator, base, prove_now, (loss_fn, whole_batch))
    if windows is None or rule is not None:
        given = replace(given, rule=proven)
    else:
        _keep(proven, base, windows.state)
    remember(accelerator, base, given)
    return parallel.prepare(accelerator, model, optimizer)


def remember(accelerator: Accelerator, model: nn.Module, given: Given) -> None:
    """Keep what was given for a model, for the windows that this accelerator trains it on.

    Raises:
        ConfigError: If the rule was proven with another loss than `loss_fn`.
    """
    has_loss = given.loss_fn is not None or given.whole_batch is not None
    if given.rule is not None and has_loss and not _fits(given.rule, given):
        raise ConfigError(
            "the loss differs from the one of the proof, and would not be used: pass it to "
            "prove_targets, or leave `rule` out."
        )
    known = vars(accelerator).setdefault("_hf_ga_given", WeakKeyDictionary())
    known[unwrapped(model)] = given


def backward_window(accelerator: Accelerator, model: nn.Module, window: Window) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`. The caller clips, steps the optimizer
    and zeroes the gradients.

    Under fp16 `.grad` is the gradient times the loss scale: `accelerator.clip_grad_norm_` or
    `accelerator.unscale_gradients` removes it, once, after the last window that is added and before
    anything reads the gradient; or the prepared optimizer's step does. Add several windows only
    while the scale is the same: until any prepared optimizer steps.

    If a process runs out of memory, all processes drop the window's gradients and recompute them in
    smaller micro-batches: the same update. The loader keeps the limit found. Not under FSDP1, where
    a failing process cannot rejoin the others (under FSDP2 torch 2.13 lets it).

    Under FSDP the gradients are reduced once per window; after every micro-batch with Accelerate's
    `sync_each_batch=True` (`GradientAccumulationPlugin`): more communication, but no process keeps
    unsharded gradients between micro-batches.

    Args:
        accelerator: The accelerator of the run.
        model: Prepared by `hf_ga.prepare` (or by the accelerator), in training mode. A model that
            was not tested in `prepare` is tested with the first window, on samples of the whole
            dataset.
        window: From a `WindowLoader`.

    Raises:
        LossNotAdditive, UnkeyedRandomness: See `prove_targets`.
        ConfigError: If a backend cannot be exact, or Accelerate would not apply a precision.
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
    """One update: gradient of the window, clip once, step optimizer and scheduler, zero the
    gradients.

    Under fp16 the gradients of all micro-batches are summed before the loss scale is removed once:
    an overflow in any of them skips the whole window and lowers the scale once.

    Args:
        accelerator: The accelerator of the run.
        model: See `backward_window`.
        optimizer: Prepared by `hf_ga.prepare` or by the accelerator.
        window: From a `WindowLoader`.
        scheduler: Not prepared (Accelerate would step it once per process). It steps only if the
            optimizer did. Under fp16 build it before `prepare`, or torch warns that the optimizer's
            step was replaced.
        max_grad_norm: Global L2 norm to clip the gradients to. None or 0: no clipping, and no
            `grad_norm`.
        on_nonfinite: What to do before the optimizer's step if the loss or a gradient is not finite
            (not under fp16, where the scaler skips overflows): "stop" raises, "skip" leaves the
            window out. Neither updates any parameter.

    Raises:
        ConfigError: Also for a ReduceLROnPlateau, for an optimizer whose step needs a closure
            (LBFGS), and under fp16 for one that was not prepared.
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
        backend = backend_for(accelerator)
        result.cause = find_cause(backend, model, window, engine.rule, result.loss)
        if on_nonfinite == "stop":
            raise NonFinite(f"{result.cause}. No parameter was updated.")
    return result


def engine_for(accelerator: Accelerator, model: nn.Module, window: Window) -> Engine:
    """The engine for a window: the model's rule, proven now if it was not, and the backend.

    Raises:
        See `backward_window`.
    """
    if not isinstance(window, Window):
        raise ConfigError(
            f"a window of a WindowLoader is needed, got a {type(window).__name__}: iterate over a "
            "WindowLoader."
        )
    check_supported(accelerator)
    check_precision(accelerator)
    given = vars(accelerator).get("_hf_ga_given", {}).get(unwrapped(model), Given())
    rule = rule_for(model, window, given)
    rule.check_fits(model)
    return Engine(
        backend_for(accelerator, same_bits=window.request.chunk_tree is not None),
        model,
        rule,
        allow_split_dependent_randomness=given.allow_split_dependent_randomness,
        is_audited=given.audit,
    )


def rule_for(model: nn.Module, window: Window, given: Given) -> Rule:
    """The rule that was given or that the window's loader keeps. Proves the model now if there is
    none, or if its training modes changed.

    Raises:
        ConfigError: If the model is already sharded by FSDP1, so it cannot be proven now.
    """
    base = unwrapped(model)
    rule = given.rule or window.state.rules.get(base)
    is_kept = rule is not None and rule.modes == module_modes(base) and _fits(rule, given)
    if given.rule is None and not is_kept:
        if isinstance(model, FullyShardedDataParallel):
            raise ConfigError(
                "under FSDP1 a model must be tested before it is sharded: pass the windows, "
                "hf_ga.prepare(accelerator, model, optimizer, windows)."
            )
        samples = window.fetcher.probe_samples(window.request, NUM_PROOF_SAMPLES)
        rule = _prove(base, samples, window.fetcher.collate_fn, given)
        _keep(rule, base, window.state)
    if is_compiled(model) and any(isinstance(hook, Packing) for hook in rule.speed_ups):
        # The model was compiled after its proof: compiled layers skip the hooks of packing.
        others = tuple(hook for hook in rule.speed_ups if not isinstance(hook, Packing))
        rule = replace(rule, speed_ups=others)
    return rule


def _fits(rule: Rule, given: Given) -> bool:
    """Whether a rule was proven with the loss that was given."""
    return (
        getattr(rule.loss, "loss_fn", None) == given.loss_fn
        and getattr(rule.loss, "whole_batch", None) == given.whole_batch
    )


def _prove(
    base: nn.Module,
    samples: Sequence[Any],
    collate_fn: Callable[[list[Any]], Any],
    given: Given,
    speed_ups: Sequence[SpeedUp] | None = None,
) -> Rule:
    return prove_targets(
        base,
        samples,
        collate_fn,
        loss_fn=given.loss_fn,
        whole_batch=given.whole_batch,
        allow_split_dependent_randomness=given.allow_split_dependent_randomness,
        speed_ups=speed_ups,
    )


def _keep(rule: Rule, base: nn.Module, state: LoaderState) -> None:
    """Keep what was proven in the state of the loader."""
    state.rules[base] = rule
    state.pad_to_window |= rule.pad_to_window
