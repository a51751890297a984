"""Finds the origin of a non-finite loss or gradient, samples and first module, by repeating a
window's forwards.

It runs only after a window with a non-finite loss or gradient, so it may be slow. Each rank
searches its own micro-batches, and the ranks gather the results, so that all report the same.
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


@dataclass
class Repeated:
    """One repeated forward, with a backward if its loss is finite.

    Attributes:
        modules: those with a non-finite output, in the order in which they ended.
        parameter: the last one in the model with a non-finite gradient: gradients flow from the
            loss backwards.
    """

    call: Call
    is_finite: bool
    modules: list[str]
    parameter: str | None = None

    @property
    def is_bad(self) -> bool:
        return bool(self.call.weight) and (not self.is_finite or self.parameter is not None)


Found = tuple[
    list[int], str | None, str | None
]  # by one rank: sample ids, names of the first module and of a parameter


def find_cause(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    loss: Loss,
    dropout: KeyedDropout,
    mean_loss: float,
) -> str:
    """One line with the samples of the window, and the module or parameter, that gave a non-finite
    number.

    All ranks must call it, before the weights change; all return the same text. Weights, buffers,
    random states and modes are unchanged; gradients are removed.

    Args:
        window: as computed. loss: the window's loss. dropout: the model's keyed dropout.
        mean_loss: of the window. If finite, the gradient is not.
    """
    backend, backward = backend_for(accelerator), math.isfinite(mean_loss)
    with preserved_random_states(), restored_buffers(model), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "None of the inputs have requires_grad"
        )  # checkpointing under no_grad
        found = _search(
            backend,
            model,
            window if backend.is_sharded else window.fitting(),
            loss,
            dropout,
            backward,
        )
    model.zero_grad()
    return _describe(
        f"window {window.index} of epoch {window.epoch}",
        loss.name,
        mean_loss,
        gather_object([found]),
    )


def _search(
    backend: Backend,
    model: nn.Module,
    window: Window,
    loss: Loss,
    dropout: KeyedDropout,
    backward: bool,
) -> Found:
    """Micro-batch by micro-batch, then sample by sample in the bad ones (not under FSDP, where
    forwards are collectives).
    """
    repeat = partial(_repeat, backend, model, loss, dropout, backward)
    repeated = repeat(window)
    if backward and backend.is_sharded:
        _exchange_parameters(
            model, repeated
        )  # a sharded gradient may be non-finite on another rank only
    bad = [one for one in repeated if one.is_bad]
    if not backend.is_sharded:
        offsets = [
            offset
            for one in bad
            for offset in one.call.micro_batch.positions - window.request.positions[0]
        ]
        singles = (
            repeat(window.split([np.array([offset]) for offset in offsets])) if offsets else []
        )
        repeated += singles
        bad = [
            single for single in singles if single.is_bad
        ] or bad  # if no sample alone is bad, report the micro-batch
    # A module whose output is non-finite in a good forward too does so on purpose: a mask of -inf.
    healthy = {module for one in repeated if not one.is_bad for module in one.modules}
    samples = [int(i) for one in bad for i in one.call.micro_batch.sample_ids]
    module = next((module for one in bad for module in one.modules if module not in healthy), None)
    return samples, module, next((one.parameter for one in bad if one.parameter is not None), None)


def _repeat(
    backend: Backend,
    model: nn.Module,
    loss: Loss,
    dropout: KeyedDropout,
    backward: bool,
    window: Window,
) -> list[Repeated]:
    """Repeat the window's forwards on this rank with the same dropout masks. Leaves gradients."""
    calls = [Call(m, counts=loss.count(m.batch, len(m))) for m in window.micro_batches]
    calls = [call for call in calls if loss.contributes(call.counts)]
    forward, repeated = Forward(backend.accelerator, model, window, (loss, dropout)), []
    with forward.scope(), _watched(model) as modules, torch.set_grad_enabled(backward):
        for planned in backend.equalize(window, calls, loss):
            modules.clear()
            with backend.accelerator.autocast():
                call, outputs = forward(planned)
                mean = torch.as_tensor(loss.mean(*loss.sums(outputs, call)))
            one = Repeated(call, _is_finite(mean), list(modules))
            if backward and mean.requires_grad:
                one.parameter = _bad_gradient(model, mean * call.weight)
            repeated.append(one)
    return repeated


def _bad_gradient(model: nn.Module, loss: Tensor) -> str | None:
    model.zero_grad()
    loss.backward()
    named = [
        (name, own_part(p.grad))
        for name, p in callable_module(model).named_parameters()
        if p.grad is not None
    ]
    return next(
        (own_name(name) for name, gradient in reversed(named) if not _is_finite(gradient)), None
    )


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
            own_class = next(
                c for c in type(module).__mro__ if not issubclass(c, FSDPModule)
            )  # FSDP2 subclasses it
            label = f"{own_name(name) or 'the model itself'} ({own_class.__name__})"
            stack.callback(module.register_forward_hook(partial(_note, modules, label)).remove)
        yield modules


def _note(modules: list[str], label: str, module: nn.Module, inputs: tuple, output: Any) -> None:
    if not all(_is_finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
        modules.append(label)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _describe(window: str, rule: str, loss: float, gathered: Sequence[Found]) -> str:
    """The results of all ranks in one line, the same on all ranks."""
    gradient = f"the gradient of {window} is not finite (its loss {loss:.6g} is)"
    parts = [gradient if math.isfinite(loss) else f"the loss of {window} is {loss}"]
    by_rank, modules, parameters = zip(*gathered, strict=True)
    samples = [sample for of_rank in by_rank for sample in of_rank]
    module, parameter = (next(filter(None, names), None) for names in (modules, parameters))
    if samples:
        named = ", ".join(map(str, samples[:MAX_NAMED])) + (
            ", ..." if len(samples) > MAX_NAMED else ""
        )
        parts.append(f"it comes from {'samples' if len(samples) > 1 else 'sample'} {named}")
    else:
        parts.append(
            "each micro-batch alone gives finite numbers: their sum or its norm overflows "
            "float32, or some randomness is not keyed"
        )
    if module is not None:
        parts.append(f"the first module with a non-finite output is {module}")
    if parameter is not None:
        parts.append(f"the gradient of {parameter} is not finite")
    if samples and module is None and parameter is None:
        parts.append(f"the outputs of all modules are finite, so the loss is the cause ({rule})")
    return "; ".join(parts)
