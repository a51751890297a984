"""Where a number that is not finite comes from: the samples and the first module, found by running a window's forwards again.

It runs only where a window's loss or gradient was not finite, so it may be slow. Each rank searches its own share, and the
ranks exchange what they found, so that all report the same.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from hf_ga.parallel.fsdp import backend_for

ON_NONFINITE = ("stop", "skip")
MOST_NAMED = 8  # sample ids in a message
WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # parts of names that wrappers add
NEARLY_OVERFLOWS = 1e18  # its square is near the end of float32


@dataclass(frozen=True)
class Case:
    """What was computed when the number came out."""

    backend: Backend
    model: nn.Module
    window: Window
    loss: Loss
    dropout: KeyedDropout

    @property
    def is_sharded(self) -> bool:
        return self.backend.is_sharded


@dataclass
class Seen:
    """One forward, run again.

    Attributes:
        call: of which micro-batch. modules: those whose output was not finite, in the order in which they ended.
        parameter: one whose gradient was not finite, the last in the order of the model, where a backward was run.
        largest: the largest absolute gradient, the parameter that has it, and the samples.
    """

    call: Call
    is_finite: bool
    modules: list[str]
    parameter: str | None = None
    largest: tuple[float, str, list[int]] = (0.0, "", [])

    @property
    def is_bad(self) -> bool:
        return not self.is_finite or self.parameter is not None


@dataclass
class Found:
    """What one process found. Sample ids of samples that are bad alone, and of micro-batches that only are so together."""

    alone: list[int] = field(default_factory=list)
    together: list[int] = field(default_factory=list)
    module: str | None = None
    parameter: str | None = None
    largest: tuple[float, str, list[int]] = (0.0, "", [])
    weights: list[str] = field(default_factory=list)
    failure: str | None = None


def find_cause(
    accelerator: Accelerator, model: nn.Module, window: Window, loss: Loss, dropout: KeyedDropout, mean_loss: float
) -> str:
    """One line that says which samples of the window, and which module or parameter, gave a number that is not finite.

    All ranks must call it, with the weights of the window; all get the same text. Weights, buffers, random states and modes stay;
    gradients of the model are what they were.

    Args:
        window: as it was computed. loss: how its micro-batches were added up. dropout: the model's.
        mean_loss: of the window. If it is finite, it was the gradient that is not.
    """
    backend = backend_for(accelerator)
    case = Case(backend, model, window if backend.is_sharded else window.fitting(), loss, dropout)
    with _untouched(case):
        found = _guarded_search(case, backward=math.isfinite(mean_loss))
    everybody = gather_object([found]) if accelerator.num_processes > 1 else [found]
    return _in_words(case, mean_loss, everybody)


@contextmanager
def _untouched(case: Case) -> Iterator[None]:
    """Keyed dropout as in the step; whatever forwards and backwards change is put back."""
    parameters = list(case.model.parameters())
    gradients = [p.grad for p in parameters]
    with ExitStack() as stack:
        stack.enter_context(preserved_random_states())
        stack.enter_context(restored_buffers(case.model))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # checkpointing under no_grad
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def _guarded_search(case: Case, *, backward: bool) -> Found:
    """A search that fails is part of its result, for which the other ranks wait. Under FSDP, where forwards are collectives, it
    raises.
    """
    try:
        return _search(case, backward=backward)
    except Exception as error:
        if case.is_sharded:
            raise
        return Found(weights=_bad_weights(case.model), failure=f"{type(error).__name__}: {error}")


def _search(case: Case, *, backward: bool) -> Found:
    """Micro-batch by micro-batch, then sample by sample in those that are bad (not under FSDP, where forwards are collectives)."""
    found = Found(weights=_bad_weights(case.model))
    seen = _run(case, case.window, backward=backward)
    if backward and case.is_sharded:
        _exchange_parameters(case.model, seen)  # of a gradient in shards, what is bad may lie on another process
    bad, alone = [one for one in seen if one.is_bad and one.call.weight], []
    for one in bad:
        singles = [] if case.is_sharded else _run(case, _sample_by_sample(case.window, one), backward=backward)
        seen += singles
        alone += (causes := [single for single in singles if single.is_bad])
        ids, causes = (found.alone, causes) if causes else (found.together, [one])
        ids += [int(i) for cause in causes for i in cause.call.micro_batch.sample_ids]
    # A module whose output is not finite in a good forward too means it so: a mask of minus infinities.
    healthy = {module for one in seen if not one.is_bad for module in one.modules}
    causes = alone or bad
    found.module = next((module for one in causes for module in one.modules if module not in healthy), None)
    found.parameter = next((one.parameter for one in causes if one.parameter is not None), None)
    found.largest = max((one.largest for one in seen), default=found.largest)
    return found


def _sample_by_sample(window: Window, seen: Seen) -> Window:
    return window.split([np.array([offset]) for offset in seen.call.micro_batch.positions - window.positions[0]])


def _run(case: Case, window: Window, *, backward: bool) -> list[Seen]:
    """The window's forwards on this rank, with their own dropout. Gradients are left behind."""
    calls, seen = _calls(case, window), []
    forward = Forward(case.backend.accelerator, case.model, window, (case.loss, case.dropout))
    with forward.scope(), _watched(case.model) as modules, torch.set_grad_enabled(backward):
        for planned in calls:
            modules.clear()
            with case.backend.accelerator.autocast():
                call, outputs = forward(planned)
                tally = case.loss.tally(outputs, call)
                loss = case.loss.mean_of(tally) if case.loss.targets_of(tally) else torch.zeros(())
            one = Seen(call, _is_finite(loss), list(modules))
            if backward and loss.requires_grad:
                _look_at_gradients(case.model, loss * call.weight, one)
            seen.append(one)
    return seen


def _calls(case: Case, window: Window) -> list[Call]:
    """As in the step: micro-batches without targets are left out, and under FSDP all ranks make equally many forwards."""
    micro_batches = window.micro_batches
    if case.loss.counts_in_forward:
        calls = [Call(m) for m in micro_batches]
    else:
        counted = [Call(m, counts=case.loss.count(m.batch, len(m))) for m in micro_batches]
        calls = [call for call in counted if case.loss.contributes(call.counts)]
    return case.backend.equalize(window, calls, case.loss)


def _look_at_gradients(model: nn.Module, loss: Tensor, seen: Seen) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    for name, parameter in callable_module(model).named_parameters():
        if parameter.grad is None or not (gradient := own_part(parameter.grad)).numel():
            continue
        if not _is_finite(gradient):
            seen.parameter = _plain_name(name)  # the last one is kept: gradients flow from the loss backwards
        else:
            ids = seen.call.micro_batch.sample_ids.tolist()
            seen.largest = max(seen.largest, (float(gradient.abs().max()), _plain_name(name), ids))


def _exchange_parameters(model: nn.Module, seen: Sequence[Seen]) -> None:
    order = [None, *(_plain_name(name) for name, _ in model.named_parameters())]
    everybody = gather_object([[one.parameter for one in seen]])
    for one, parameters in zip(seen, zip(*everybody, strict=True), strict=True):
        one.parameter = max(parameters, key=order.index)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """A list that gets every module whose forward ends with an output that is not finite."""
    modules: list[str] = []
    with ExitStack() as stack:
        for name, module in callable_module(model).named_modules():
            own_class = next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))  # under FSDP2 it is a subclass
            label = f"{_plain_name(name) or 'the model itself'} ({own_class.__name__})"
            stack.callback(module.register_forward_hook(partial(_note, modules, label)).remove)
        yield modules


def _note(modules: list[str], label: str, module: nn.Module, inputs: tuple, output: Any) -> None:
    if not all(_is_finite(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)):
        modules.append(label)


def _bad_weights(model: nn.Module) -> list[str]:
    """Parameters that are not finite, and buffers with NaN: an infinity in a buffer may be a mask."""
    named = callable_module(model)
    parameters = [name for name, p in named.named_parameters() if not _is_finite(own_part(p))]
    buffers = [name for name, b in named.named_buffers() if bool(own_part(b).isnan().any())]
    return [_plain_name(name) for name in (*parameters, *buffers)]


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def _in_words(case: Case, loss: float, everybody: Sequence[Found]) -> str:
    """What all processes found, in one line; the same on all of them."""
    window = f"window {case.window.index} of epoch {case.window.epoch}"
    is_finite = math.isfinite(loss)
    said = [f"the gradient of {window} is not finite (its loss {loss:.6g} is)" if is_finite else f"the loss of {window} is {loss}"]
    alone, together = [i for f in everybody for i in f.alone], [i for f in everybody for i in f.together]
    if alone or together:
        said.append(_where(case, is_finite, everybody))
        said += [f"it comes from {_samples(alone)}"] * bool(alone)
        why = "single ones are not tried under FSDP" if case.is_sharded else "none of them is so alone"
        said += [f"it comes from a whole micro-batch, of {_samples(together)}; {why}"] * bool(together)
    else:
        said.append(_nothing_found(is_finite, everybody))
    weights = list(dict.fromkeys(name for f in everybody for name in f.weights))
    said += [f"before this step {', '.join(weights[:MOST_NAMED])} held numbers that are not finite"] * bool(weights)
    said += [f"the search on process {i} failed: {f.failure}" for i, f in enumerate(everybody) if f.failure is not None]
    return "; ".join(said)


def _where(case: Case, is_finite: bool, everybody: Sequence[Found]) -> str:
    module = next((f.module for f in everybody if f.module is not None), None)
    parameter = next((f.parameter for f in everybody if f.parameter is not None), None)
    first = f"the first module with an output that is not finite is {module}" if module is not None else ""
    if parameter is not None:
        return f"the gradient of {parameter} is not" + (f", and {first}" if first else "")
    if first:
        return first
    return f"the outputs of all modules are finite, so it came out of {'loss_fn' if case.loss.name == 'loss_fn' else 'the sum'}"


def _samples(ids: Sequence[int]) -> str:
    named, rest = ", ".join(map(str, ids[:MOST_NAMED])), len(ids) - MOST_NAMED
    return f"sample{'s' * (len(ids) > 1)} {named}" + (f" and {rest} more ({len(ids)} in all)" if rest > 0 else "")


def _nothing_found(is_finite: bool, everybody: Sequence[Found]) -> str:
    largest, name, ids = max(f.largest for f in everybody)
    if is_finite and largest > NEARLY_OVERFLOWS:
        return (
            f"those of its micro-batches are finite, up to {largest:.3g} in {name} for that of {_samples(ids)}, but their sum or "
            "its norm overflows float32"
        )
    return "the same forwards again gave finite numbers: look for random draws that are not keyed, hooks, or a failing device"
