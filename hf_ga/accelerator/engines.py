"""Makes the engine that computes a window of a user's own training loop."""

from dataclasses import replace

import accelerate
from torch import nn

from hf_ga.errors import ConfigError, HfGaError, NoLoss
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import unwrapped
from hf_ga.exact.rule import Rule
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.speed.lazy_logits import ChunkedLoss
from hf_ga.speed.packing import Packing
from hf_ga.training import LossSettings, engine_for, recorded_settings, remember


def engine_if_provable(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    window: Window,
    loss_settings: LossSettings,
    *,
    batches_are_mappings: bool,
) -> Engine | None:
    """Make the engine that computes a window of a user's loop. A model that is not proven yet is
    proven first: trial forwards and backwards test how its loss adds up over samples. The settings
    and the result of the proof are stored for later windows.

    Args:
        accelerator: The accelerator of the loop.
        model: The prepared model.
        window: The window that begins.
        loss_settings: The user's settings for the model's loss and its proof.
        batches_are_mappings: Whether the user's collate function returns dicts or other mappings,
            so that the proof can call `model(**batch)`.

    Returns:
        The engine, or None if the model cannot be proven by calling `model(**batch)`: then the
        loop's first forward will show how it is called and what its loss is.

    Raises:
        ConfigError: If `whole_batch` was given, but batches are not mappings.
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """
    _store_settings(accelerator, model, loss_settings)
    is_proven = _is_proven(accelerator, model, window)
    if not is_proven and not batches_are_mappings:
        if loss_settings.whole_batch is not None:
            raise ConfigError(
                "whole_batch needs batches with named entries, as hf_ga calls the model with them "
                "once more: let the collate function return a dict, and call model(**batch)."
            )
        return None
    try:
        return engine_for(accelerator, model, window)
    except NoLoss:
        return None
    except HfGaError:
        raise
    except Exception:
        if is_proven or loss_settings.whole_batch is not None:
            raise
        return None  # the loop calls the model in another way, or its own call will fail, too


def _store_settings(
    accelerator: accelerate.Accelerator, model: nn.Module, loss_settings: LossSettings
) -> None:
    """Attach the user's settings for a model's loss to `hf_ga.Accelerator`, where the engine of the
    loop's windows reads them.

    Does nothing if the model has settings there: those of a model that was proven before FSDP
    sharded it contain the result of its proof.
    """
    if recorded_settings(accelerator, model) is None:
        remember(accelerator, model, loss_settings)


def _is_proven(accelerator: accelerate.Accelerator, model: nn.Module, window: Window) -> bool:
    """Return whether the model of a user's loop is proven already: its `Rule`, the result of the
    proof, is known from before FSDP sharded the model, or from an earlier window of the loader.
    """
    settings = recorded_settings(accelerator, model)
    return settings.rule is not None or unwrapped(model) in window.state.rules


def rule_for_loop(
    rule: Rule, accelerator: accelerate.Accelerator, *, passes_own_loss: bool
) -> Rule:
    """Remove the speed-ups that change outputs which a user's loop may read from a model's `Rule`,
    which says what the loss averages over and which speed-ups were tested.

    - Packing leaves the hidden states at padding positions empty, so it is used only while the
      loop passes the model's own loss and needs no other output.
    - Under FSDP, logits that are computed lazily would need weights that are sharded again after
      the forward, so the chunked loss is not used.

    Args:
        rule: The rule of the model.
        accelerator: The accelerator of the loop.
        passes_own_loss: Whether the loop passed the very tensor that the model returned as its
            loss to `accelerator.backward`.

    Returns:
        A copy of the rule with the other speed-ups.
    """
    excluded: list[type] = []
    if not passes_own_loss:
        excluded.append(Packing)
    if is_sharded(accelerator):
        excluded.append(ChunkedLoss)
    usable = tuple(hook for hook in rule.speed_ups if not isinstance(hook, tuple(excluded)))
    return replace(rule, speed_ups=usable)
