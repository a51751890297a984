"""The target rules that a loader has seen proven: a model is proven once, not in every window."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_ga.errors import ConfigError
from hf_ga.exact.forward import LossFunction, module_modes, unwrapped
from hf_ga.exact.windows import Window
from hf_ga.proof.targets import TargetRule, prove_targets

NUM_PROOF_SAMPLES = 64  # from all over the dataset


def proven_rule(
    model: nn.Module, window: Window, loss_fn: LossFunction | None, allow_unkeyed: bool, *, padding_free: bool = False
) -> TargetRule:
    """The rule kept on the window's loader; proven now if the model, its modes or the loss are new to it.

    Raises:
        ConfigError: it would have to be proven now, on the shards of FSDP1.
    """
    base, identity = unwrapped(model), _identity(loss_fn)
    for known_model, known_loss, rule in window.proofs:
        if known_model is base and _same(known_loss, identity) and rule.modes == module_modes(base):
            return rule
    if isinstance(model, FullyShardedDataParallel):
        raise ConfigError(
            "under FSDP1 a model must be proven before it is wrapped: rule = hf_ga.prove_targets(model, samples, collate_fn) before"
            " prepare, then targets=rule."
        )
    samples = window.probe_samples(NUM_PROOF_SAMPLES)
    asked = {"loss_fn": loss_fn, "allow_unkeyed": allow_unkeyed, "padding_free": padding_free}
    rule = prove_targets(model, samples, window.fetcher.collate_fn, **asked)
    window.proofs[:] = [proof for proof in window.proofs if proof[0] is not base] + [(base, identity, rule)]
    return rule


def _identity(function: Callable | None) -> Any:
    """What makes a loss function the same: a lambda written in the loop is a new object in every window, with the same code."""
    if isinstance(function, partial):
        return _identity(function.func), function.args, tuple(sorted(function.keywords.items()))
    closure = tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    names = ("__self__", "__defaults__")
    return getattr(function, "__code__", function), closure, *(getattr(function, name, None) for name in names)


def _same(value: Any, other: Any) -> bool:
    """Equal numbers and texts, else the same objects: tensors in a closure have no single truth value to compare by."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return value is other or (isinstance(value, int | float | str) and type(value) is type(other) and value == other)
