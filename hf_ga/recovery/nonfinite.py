"""Finds the origin of a non-finite loss or gradient, samples and first module, by repeating a window's forwards.

It runs only after a window with a non-finite loss or gradient, so it may be slow. Each rank searches its own micro-batches, and
the ranks gather the results, so that all report the same.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from hf_ga.exact.backend import Backend
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import callable_module, restored_buffers
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.hooks import Call
from hf_ga.exact.loss import Loss
from hf_ga.exact.step import Forward
from hf_ga.exact.update import own_part
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import backend_for, own_name

ON_NONFINITE = ("stop", "skip")
MAX_NAMED = 8  # samples listed in a message


@dataclass(frozen=True)
class Case:
    """The computation that gave the non-finite number."""

    backend: Backend
    model: nn.Module
    window: Window
    loss: Loss
    dropout: KeyedDropout


@dataclass
class Repeated:
    """One repeated forward, with a backward if its loss is finite.

    Attributes:
        modules: those with a non-finite output, in the order in which they ended.
        parameter: the last one in the model with a non-finite gradient: gradients flow from the loss backwards.
    """

    call: Call
    is_finite: bool
    modules: list[str]
    parameter: str | None = None

    @property
    def is_bad(self) -> bool:
        return bool(self.call.weight) and (not self.is_finite or self.parameter is not None)


@dataclass
class Found:
    """The result of one rank: sample ids, the names of the first module and of a parameter."""

    samples: list[int]
    module: str | None
    parameter: str | None


def find_cause(
    accelerator: Accelerator, model: nn.Module, window: Window, loss: Loss, dropout: KeyedDropout, mean_loss: float
) -> str:
    """One line with the samples of the window, and the module or parameter, that gave a non-finite number.

    All ranks must call it, before the weights change; all return the same text. Weights, buffers, random states and modes are
    unchanged; gradients are removed.

    Args:
        window: as computed. loss: the window's loss. dropout: the model's keyed dropout.
        mean_loss: of the window. If finite, the gradient is not.
    """
    backend = backend_for(accelerator)
    case = Case(backend, model, window if backend.is_sharded else window.fitting(), loss, dropout)
    with preserved_random_states(), restored_buffers(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpointing under no_grad
        found = _search(case, backward=math.isfinite(mean_loss))
    model.zero_grad()
    return _describe(case, mean_loss, gather_object([found]))


def _search(case: Case, *, backward: bool) -> Found:
    """Micro-batch by micro-batch, then sample by sample in the bad ones (not under FSDP, where forwards are collectives)."""
    repeated = _repeat(case, case.window, backward=backward)
    if backward and case.backend.is_sharded:
        _exchange_parameters(case.model, repeated)  # a sharded gradient may be non-finite on another rank only
    bad = [one for one in repeated if one.is_bad]
    if not case.backend.is_sharded:
        offsets = [offset for one in bad for offset in one.call.micro_batch.positions - case.window.request.positions[0]]
        singles = _repeat(case, case.window.split([np.array([o]) for o in offsets]), backward=backward) if offsets else []
        repeated += singles
        bad = [single for single in singles if single.is_bad] or bad  # if no sample alone is bad, report the micro-batch
    # A module whose output is non-finite in a good forward too does so on purpose: a mask of -inf.
    healthy = {module for one in repeated if not one.is_bad for module in one.modules}
    return Found(
        samples=[int(i) for one in bad for i in one.call.micro_batch.sample_ids],
        module=next((module for one in bad for module in one.modules if module not in healthy), None),
        parameter=next((one.parameter for one in bad if one.parameter is not None), None),
    )


def _repeat(case: Case, window: Window, *, backward: bool) -> list[Repeated]:
    """Repeat the window's forwards on this rank with the same dropout masks. Leaves gradients."""
    calls = [Call(m, counts=case.loss.count(m.batch, len(m))) for m in window.micro_batches]
    calls = [call for call in calls if case.loss.contributes(call.counts)]
    forward, repeated = Forward(case.backend.accelerator, case.model, window, (case.loss, case.dropout)), []
    with forward.scope(), _watched(case.model) as modules, torch.set_grad_enabled(backward):
        for planned in case.backend.equalize(window, calls, case.loss):
            modules.clear()
            with case.backend.accelerator.autocast():
                call, outputs = forward(planned)
                loss = torch.as_tensor(case.loss.mean(*case.loss.sums(outputs, call)))
            one = Repeated(call, _is_finite(loss), list(modules))
            if backward and loss.requires_grad:
                one.parameter = _bad_gradient(case.model, loss * call.weight)
            repeated.append(one)
    return repeated


def _bad_gradient(model: nn.Module, loss: Tensor) -> str | None:
    model.zero_grad()
    loss.backward()
    named = [(name, own_part(p.grad)) for name, p in callable_module(model).named_parameters() if p.grad is not None]
    return next((own_name(name) for name, gradient in reversed(named) if not _is_finite(gradient)), None)


def _exchange_parameters(model: nn.Module, repeated: Sequence[Repeated]) -> None:
    order = [None, *(own_name(name) for name, _ in model.named_parameters())]
    gathered = gather_object([[one.parameter for one in repeated]])
    for one, parameters in zip(repeated, zip(*gathered, strict=True), strict=True):
        one.parameter = max(parameters, key=order.index)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the modules with a non-finite output."""
    modules: list[str] = []
    with ExitStack() as stack:
        for name, module in callable_module(model).named_modules():
            own_class = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))  # FSDP2 subclasses it
            label = f"{own_name(name) or 'the model itself'} ({own_class.__name__})"
            stack.callback(module.register_forward_hook(partial(_note, modules, label)).remove)
        yield modules


def _note(modules: list[str], label: str, module: nn.Module, inputs: tuple, output: Any) -> None:
    if not all(_is_finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
        modules.append(label)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _describe(case: Case, loss: float, gathered: Sequence[Found]) -> str:
    """The results of all ranks in one line, the same on all ranks."""
    window, is_finite = f"window {case.window.index} of epoch {case.window.epoch}", math.isfinite(loss)
    parts = [f"the gradient of {window} is not finite (its loss {loss:.6g} is)" if is_finite else f"the loss of {window} is {loss}"]
    samples = [i for found in gathered for i in found.samples]
    if samples:
        named = ", ".join(map(str, samples[:MAX_NAMED])) + (", ..." if len(samples) > MAX_NAMED else "")
        parts.append(f"it comes from {'samples' if len(samples) > 1 else 'sample'} {named}")
    else:
        parts.append(
            "each micro-batch alone gives finite numbers: their sum or its norm overflows float32, or some randomness is not keyed"
        )
    module = next((found.module for found in gathered if found.module), None)
    parameter = next((found.parameter for found in gathered if found.parameter), None)
    if module is not None:
        parts.append(f"the first module with a non-finite output is {module}")
    if parameter is not None:
        parts.append(f"the gradient of {parameter} is not finite")
    if samples and module is None and parameter is None:
        parts.append(f"the outputs of all modules are finite, so the loss is the cause ({case.loss.name})")
    return "; ".join(parts)
