"""The engine that computes a window of a user's loop."""

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
from hf_ga.training import Given, engine_for, recorded_settings, remember


def engine_if_provable(
    accelerator: accelerate.Accelerator,
    model: nn.Module,
    window: Window,
    given: Given,
    *,
    has_names: bool,
) -> Engine | None:
    """Return the engine of a window, after the proof of a model that is not proven yet.

    Args:
        accelerator: The accelerator of the loop.
        model: The prepared model.
        window: The window.
        given: What was given to the accelerator about the model's loss.
        has_names: Whether batches have named entries, so that the model can be called with them.

    Returns:
        None if only the first forward of the loop will show how the model is called, and what its
        loss is.

    Raises:
        ConfigError: If `whole_batch` was given, and the batches have no names.
        LossNotAdditive, UnkeyedRandomness: See `hf_ga.prove_targets`.
    """
    is_proven = _is_proven(accelerator, model, window, given)
    if not is_proven and not has_names:
        if given.whole_batch is not None:
            raise ConfigError(
                "whole_batch needs batches by name, as the model is called with them once more: "
                "let the collate function return a dict, and call model(**batch)."
            )
        return None
    try:
        return engine_for(accelerator, model, window)
    except NoLoss:
        return None
    except HfGaError:
        raise
    except Exception:
        if is_proven or given.whole_batch is not None:
            raise
        return None  # the loop calls the model in another way, or its own call fails, too


def _is_proven(
    accelerator: accelerate.Accelerator, model: nn.Module, window: Window, given: Given
) -> bool:
    """Whether the rule of a model is known already. Records the settings `given` on the accelerator
    if none are recorded for the model yet.
    """
    recorded = recorded_settings(accelerator, model)
    if recorded is None:  # a model that was proven before it was sharded has its settings there
        remember(accelerator, model, given)
        recorded = given
    return recorded.rule is not None or unwrapped(model) in window.state.rules


def rule_for_loop(
    rule: Rule, accelerator: accelerate.Accelerator, *, passes_own_loss: bool
) -> Rule:
    """Return a rule without the speed-ups that change outputs which a loop may read.

    Packing leaves hidden states at the padding empty, so it is used once the loop has passed the
    model's own loss. Logits that are computed later would need weights that FSDP has sharded again.

    Args:
        rule: The rule of the model.
        accelerator: The accelerator of the loop.
        passes_own_loss: Whether the loop passes the very loss that the model returned.
    """
    left_out: list[type] = []
    if not passes_own_loss:
        left_out.append(Packing)
    if is_sharded(accelerator):
        left_out.append(ChunkedLoss)
    usable = tuple(hook for hook in rule.speed_ups if not isinstance(hook, tuple(left_out)))
    return replace(rule, speed_ups=usable)
