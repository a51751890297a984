"""The search for the cause of a non-finite loss or gradient: which samples, and which module first.
It repeats a window's forwards.

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
from hf_ga.exact.update import local_shard
from hf_ga.exact.window import Window
from hf_ga.parallel.fsdp import own_name

ON_NONFINITE = ("stop", "skip")
MAX_NAMED = 8  # samples listed in a message


@dataclass
class Repeated:
    """One repeated forward, with a backward if its loss is finite.

    Attributes:
        call: What was computed.
        is_finite: Whether its loss is finite.
        modules: Modules with a non-finite output, in the order in which their forwards ended.
        parameter: The last parameter of the model with a non-finite gradient, which the backward
            reached first. None: all gradients are finite.
    """

    call: Call
    is_finite: bool
    modules: list[str]
    parameter: str | None = None

    @property
    def is_bad(self) -> bool:
        """Whether its loss or gradient, if it counts, is not finite."""
        if not self.call.weight:
            return False
        return not self.is_finite or self.parameter is not None


@dataclass
class Found:
    """What the search of one rank found.

    Attributes:
        samples: Ids of the samples whose loss or gradient is not finite.
        module: The first module with a non-finite output. None: there is none.
        parameter: The last parameter of the model with a non-finite gradient. None: there is none.
    """

    samples: list[int]
    module: str | None
    parameter: str | None


def find_cause(
    backend: Backend, model: nn.Module, window: Window, rule: Rule, mean_loss: float
) -> str:
    """Find the samples of a window, and the module or parameter, that gave a non-finite number.

    All ranks must call it, before the weights change. It leaves weights, buffers, random states and
    modes as they are, and removes gradients.

    Args:
        backend: How ranks communicate.
        model: The prepared model.
        window: The window that was trained on.
        rule: What was proven about the model. The search does not use its speed-ups.
        mean_loss: The loss of the window. If it is finite, the gradient is not.

    Returns:
        One line of text, the same on all ranks.
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
    """Search micro-batch by micro-batch, then sample by sample in the bad ones (not under FSDP,
    where forwards are collectives).

    Args:
        engine: The engine, which repeats forwards.
        window: The window that was trained on.
        backward: Whether to look for non-finite gradients, too.
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
        one_by_one = computed.split([np.array([offset]) for offset in offsets])
        singles = _repeat(engine, one_by_one, backward)
        repeated += singles
        # If no sample alone is bad, report the micro-batch.
        bad = [single for single in singles if single.is_bad] or bad
    # A module whose output is non-finite in a good forward too does so on purpose: a mask of -inf.
    healthy = {module for one in repeated if not one.is_bad for module in one.modules}
    samples = [int(i) for one in bad for i in one.call.micro_batch.sample_ids]
    modules = [module for one in bad for module in one.modules if module not in healthy]
    parameters = [one.parameter for one in bad if one.parameter is not None]
    return Found(
        samples=samples,
        module=modules[0] if modules else None,
        parameter=parameters[0] if parameters else None,
    )


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
    """Run the backward of a micro-batch's mean loss.

    Returns:
        The name of the last parameter whose gradient is not finite. None: all are finite.
    """
    engine.model.zero_grad()
    engine.backend.backward(mean, engine.call.weight)
    module = callable_module(engine.model)
    for name, parameter in reversed(list(module.named_parameters())):
        if parameter.grad is None:
            continue
        if not _is_finite(local_shard(parameter.grad)):
            return own_name(name)
    return None


def _exchange_parameters(model: nn.Module, repeated: Sequence[Repeated]) -> None:
    """Set `parameter` of each forward, which all ranks made, to the last one of all ranks."""
    order = [None, *(own_name(name) for name, _ in model.named_parameters())]
    parameters_of_ranks = gather_object([[one.parameter for one in repeated]])
    for index, one in enumerate(repeated):
        found = [parameters[index] for parameters in parameters_of_ranks]
        one.parameter = max(found, key=order.index)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the modules with a non-finite output."""
    modules: list[str] = []
    with ExitStack() as stack:
        for name, module in callable_module(model).named_modules():
            # FSDP2 makes a subclass of the module's class.
            classes = [c for c in type(module).__mro__ if not issubclass(c, FSDPModule)]
            label = f"{own_name(name) or 'the model itself'} ({classes[0].__name__})"
            handle = module.register_forward_hook(partial(_note, modules, label))
            stack.callback(handle.remove)
        yield modules


def _note(modules: list[str], label: str, module: nn.Module, inputs: tuple, output: Any) -> None:
    """Append the label of a module to `modules` if its output is not finite: a forward hook."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if not all(_is_finite(tensor) for tensor in tensors):
        modules.append(label)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    return bool(tensor.detach().isfinite().all())


def _describe(window: str, rule: str, loss: float, gathered: Sequence[Found]) -> str:
    """Return what the ranks found as one line of text, the same on all ranks."""
    parts = [f"the loss of {window} is {loss}"]
    if math.isfinite(loss):
        parts = [f"the gradient of {window} is not finite (its loss {loss:.6g} is)"]
    samples = [sample for found in gathered for sample in found.samples]
    modules = [found.module for found in gathered if found.module is not None]
    parameters = [found.parameter for found in gathered if found.parameter is not None]
    if samples:
        parts.append(f"it comes from {_listed_samples(samples)}")
    else:
        parts.append(
            "each micro-batch alone gives finite numbers: their sum or its norm overflows "
            "float32, or some randomness is not keyed"
        )
    if modules:
        parts.append(f"the first module with a non-finite output is {modules[0]}")
    if parameters:
        parts.append(f"the gradient of {parameters[0]} is not finite")
    if samples and not modules and not parameters:
        parts.append(f"the outputs of all modules are finite, so the loss is the cause ({rule})")
    return "; ".join(parts)


def _listed_samples(samples: Sequence[int]) -> str:
    """Return "sample 7", or "samples 7, 9, ..." with at most `MAX_NAMED` of them."""
    if len(samples) == 1:
        return f"sample {samples[0]}"
    named = ", ".join(map(str, samples[:MAX_NAMED]))
    if len(samples) > MAX_NAMED:
        named += ", ..."
    return f"samples {named}"
