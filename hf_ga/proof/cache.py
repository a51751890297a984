"""Proofs that a loader keeps: a model is proven once, not in every window."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hf_ga.exact.forward import LossFunction, module_modes, unwrapped
from hf_ga.exact.window import LoaderState
from hf_ga.proof.targets import ProvenLoss


def find_proof(state: LoaderState, model: nn.Module, loss_fn: LossFunction | None) -> ProvenLoss | None:
    """What was proven of this model with this loss in these training modes; None if nothing was."""
    base, identity = unwrapped(model), _identity(loss_fn)
    for known_model, known_loss, proven in state.proofs:
        if known_model is base and _same(known_loss, identity) and proven.modes == module_modes(base):
            return proven
    return None


def keep_proof(state: LoaderState, model: nn.Module, loss_fn: LossFunction | None, proven: ProvenLoss) -> None:
    """Keep the last proof of each model."""
    base = unwrapped(model)
    state.proofs[:] = [proof for proof in state.proofs if proof[0] is not base] + [(base, _identity(loss_fn), proven)]
    state.pad_to_window |= proven.pad_to_window


def is_same_loss(function: Callable | None, other: Callable | None) -> bool:
    """Whether two loss functions are the same."""
    return _same(_identity(function), _identity(other))


def _identity(function: Callable | None) -> Any:
    """What makes a loss function the same: a lambda written in the loop is a new object in every window, with the same code."""
    if isinstance(function, partial):
        return _identity(function.func), function.args, tuple(sorted(function.keywords.items()))
    closure = tuple(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    names = ("__self__", "__defaults__")
    return getattr(function, "__code__", function), closure, *(getattr(function, name, None) for name in names)


def _same(value: Any, other: Any) -> bool:
    """Equal numbers and strings, else the same objects: tensors in a closure have no single truth value to compare by."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_same, value, other))
    return value is other or (isinstance(value, int | float | str) and type(value) is type(other) and value == other)
