"""Finds the origin of a non-finite loss or gradient, samples and first module, by repeating a
window's forwards.

It runs only after a window with a non-finite loss or gradient, so it may be slow. Each rank
searches its own micro-batches, and the ranks gather the results, so that all report the same.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from hf_ga.exact.backend import Backend
from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import callable_module, extra_forwards
from hf_ga.exact.generators import preserved_random_states
from hf_ga.exact.hooks import Call
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import own_part
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import own_name

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


@dataclass
class Found:
    """What the search of one rank found.

    Attributes:
        samples: Ids of the bad samples.
        module: The first module with a non-finite output.
        parameter: The last parameter of the model with a non-finite gradient.
    """

    samples: list[int]
    module: str | None
    parameter: str | None


def find_cause(
    backend: Backend, model: nn.Module, window: Window, rule: Rule, mean_loss: float
) -> str:
    """One line with the samples of the window, and the module or parameter, that gave a non-finite
    number.

    All ranks must call it, before the weights change; all return the same text. Weights, buffers,
    random states and modes are unchanged; gradients are removed.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
        window: The window that was trained on.
        rule: What was proven about the model. The search does not use its speed-ups.
        mean_loss: The loss of the window. If it is finite, the gradient is not.
    """
    backward = math.isfinite(mean_loss)
    engine = Engine(
        backend,
        model,
        replace(rule, loss=rule.loss.additive, speed_ups=()),
        allow_split_dependent_randomness=True,
    )
    with preserved_random_states(), extra_forwards(model):
        found = _search(engine, window, backward)
    model.zero_grad()
    name = f"window {window.index} of epoch {window.epoch}"
    return _describe(name, rule.name, mean_loss, gather_object([found]))


def _search(engine: Engine, window: Window, backward: bool) -> Found:
    """Micro-batch by micro-batch, then sample by sample in the bad ones (not under FSDP, where
    forwards are collectives).
    """
    repeated = _repeat(engine, window, backward)
    is_sharded = engine.backend.is_sharded
    if backward and is_sharded:
        # A sharded gradient may be non-finite on another rank only.
        _exchange_parameters(engine.model, repeated)
    bad = [one for one in repeated if one.is_bad]
    if bad and not is_sharded:
        computed = engine.window
        positions = np.concatenate([one.call.micro_batch.positions for one in bad])
        offsets = positions - computed.request.positions[0]
        each = computed.split([np.array([offset]) for offset in offsets])
        singles = _repeat(engine, each, backward)
        repeated += singles
        # If no sample alone is bad, report the micro-batch.
        bad = [single for single in singles if single.is_bad] or bad
    # A module whose output is non-finite in a good forward too does so on purpose: a mask of -inf.
    healthy = {module for one in repeated if not one.is_bad for module in one.modules}
    samples = [int(i) for one in bad for i in one.call.micro_batch.sample_ids]
    modules = [module for one in bad for module in one.modules if module not in healthy]
    parameters = [one.parameter for one in bad if one.parameter is not None]
    return Found(samples, next(iter(modules), None), next(iter(parameters), None))


def _repeat(engine: Engine, window: Window, backward: bool) -> list[Repeated]:
    """Repeat the window's forwards on this rank with the same dropout masks. Leaves gradients."""
    repeated = []
    engine.begin(window, training=False)
    watched = _watched(engine.model)
    with engine.scope(), watched as modules, torch.set_grad_enabled(backward):
        for index in range(len(engine.calls)):
            modules.clear()
            with engine.micro_batch(index) as batch:
                outputs = engine.forward(batch)
                mean = engine.mean(outputs)
            one = Repeated(engine.call, _is_finite(mean), list(modules))
            if backward and mean.requires_grad:
                one.parameter = _bad_gradient(engine, mean)
            repeated.append(one)
    return repeated


def _bad_gradient(engine: Engine, mean: Tensor) -> str | None:
    """The name of the last parameter whose gradient is not finite."""
    engine.model.zero_grad()
    engine.backend.backward(mean, engine.call.weight)
    for name, parameter in reversed([*callable_module(engine.model).named_parameters()]):
        if parameter.grad is not None and not _is_finite(own_part(parameter.grad)):
            return own_name(name)
    return None


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
    samples = [sample for found in gathered for sample in found.samples]
    module = next((found.module for found in gathered if found.module is not None), None)
    parameter = next((found.parameter for found in gathered if found.parameter is not None), None)
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
