"""The search for the cause of a non-finite loss or gradient: which samples, and the first module
whose output is not finite.

It runs only after a window whose loss or gradient is NaN or infinite, and repeats the window's
forwards, so it may be slow. Each rank searches its own micro-batches; then the ranks gather the
results, so that all report the same.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from accelerate.utils import gather_object, send_to_device
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_ga.draws.generators import preserved_random_states
from hf_ga.engine.own_loop import OwnLoop
from hf_ga.engine.slots import Slot, plain_slots
from hf_ga.errors import LossNotAdditive
from hf_ga.loading.window import Window
from hf_ga.loss import Term, read_terms, undivided
from hf_ga.model.forward import (
    argument_filter,
    call_loss_fn,
    callable_module,
    extra_forwards,
    head_loss,
)
from hf_ga.model.outputs import named_tensors
from hf_ga.model.precision import at_least_float32
from hf_ga.parallel.fsdp import local_shard, unwrapped_name

ON_NONFINITE = ("stop", "skip")
MAX_LISTED_SAMPLES = 8  # in a message


@dataclass
class Repetition:
    """Result of one repeated forward, and of its backward if the window's loss is finite.

    Attributes:
        slot: The micro-batch that was computed.
        is_loss_finite: Whether its loss is finite.
        modules: Names of the modules with a non-finite output, in the order in which their forwards
            ended.
        parameter: Name of the last parameter of the model with a non-finite gradient (the one that
            the backward reached first). None: all gradients are finite.
    """

    slot: Slot
    is_loss_finite: bool
    modules: list[str]
    parameter: str | None = None

    @property
    def is_nonfinite(self) -> bool:
        """Whether this micro-batch is a cause of its window's non-finite loss or gradient. (A
        filler, repeated only so that all ranks make the same number of forwards, is not.)
        """
        return self.slot.is_counted and not (self.is_loss_finite and self.parameter is None)


@dataclass
class Cause:
    """The cause of a non-finite loss or gradient, as far as one rank found it.

    Attributes:
        samples: Ids of the samples whose loss or gradient is not finite.
        module: Name of the first module with a non-finite output. None: there is none.
        parameter: Name of the last parameter of the model with a non-finite gradient. None: there
            is none.
    """

    samples: list[int]
    module: str | None
    parameter: str | None


def find_cause(loop: OwnLoop, window: Window, mean_loss: float) -> str:
    """Find the samples of a window, and the module or parameter, from which a non-finite loss or
    gradient comes.

    Call it before the weights change, on all ranks. It sets all gradients to None, and leaves
    weights, buffers, random states and modes unchanged.

    Args:
        loop: The loop that computed the window. The search does not use its speed-ups.
        window: The window that was trained on.
        mean_loss: The loss of the window. If it is finite, the gradient is not.

    Returns:
        One line of text that names what was found, the same on all ranks.
    """
    with preserved_random_states(), extra_forwards(loop.model):
        cause = _search(loop, window, with_backward=math.isfinite(mean_loss))
    loop.model.zero_grad()
    return _describe(window.description, mean_loss, gather_object([cause]))


def _search(loop: OwnLoop, window: Window, with_backward: bool) -> Cause:
    """Search this rank's micro-batches for the cause: repeat them, and then each sample of the
    non-finite ones alone. Leaves gradients behind.

    Under FSDP, samples are not repeated alone: forwards are collectives, and other ranks have other
    micro-batches to repeat.
    """
    if window.state.pad_to_window:
        window = window.padded_to_window()
    window = loop.within_memory_limit(window)
    repetitions = _repeat(loop, window, with_backward)
    is_sharded = loop.engine.backend.is_sharded
    if with_backward and is_sharded:
        # This rank's shards of a gradient may be finite although those of another rank are not.
        _exchange_parameters(loop.model, repetitions)
    nonfinite = [one for one in repetitions if one.is_nonfinite]
    if nonfinite and not is_sharded:
        singles = _repeat(loop, _one_sample_each(window, nonfinite), with_backward)
        repetitions += singles
        nonfinite_singles = [single for single in singles if single.is_nonfinite]
        # If each sample alone is finite, report all samples of the micro-batches.
        nonfinite = nonfinite_singles or nonfinite
    # A module whose output is not finite in a finite micro-batch does that on purpose: a mask with
    # -inf, for example.
    harmless = {module for one in repetitions if not one.is_nonfinite for module in one.modules}
    samples = [int(i) for one in nonfinite for i in one.slot.micro_batch.sample_ids]
    modules = [module for one in nonfinite for module in one.modules if module not in harmless]
    parameters = [one.parameter for one in nonfinite if one.parameter is not None]
    return Cause(
        samples=samples,
        module=modules[0] if modules else None,
        parameter=parameters[0] if parameters else None,
    )


def _one_sample_each(window: Window, repetitions: Sequence[Repetition]) -> Window:
    """Return the window with a micro-batch for each sample of some of its micro-batches."""
    positions = np.concatenate([one.slot.micro_batch.positions for one in repetitions])
    offsets = positions - window.request.positions[0]
    return window.split([np.array([offset]) for offset in offsets])


def _repeat(loop: OwnLoop, window: Window, with_backward: bool) -> list[Repetition]:
    """Repeat the forwards of a window's micro-batches, under FSDP also of fillers, with the random
    numbers of the training step, and record what is not finite. Leaves gradients behind.
    """
    backend = loop.engine.backend
    backend.begin(loop.model)
    backend.reshard(loop.model)
    slots = plain_slots(window)
    if not backend.is_sharded:
        slots = [slot for slot in slots if slot.is_counted]
    with _record_nonfinite_modules(loop.model) as modules:
        repetitions = []
        for slot in slots:
            modules.clear()
            with (
                loop.engine.micro_batch(slot, window.request),
                backend.sync(loop.model, is_last=True),
            ):
                repetitions.append(_repeat_slot(loop, slot, modules, with_backward))
        return repetitions


def _repeat_slot(
    loop: OwnLoop, slot: Slot, modules: Sequence[str], with_backward: bool
) -> Repetition:
    """Repeat the forward and backward of a micro-batch, which `loop.engine` has begun."""
    loss, terms = _loss_of(loop, slot)
    result = Repetition(slot, _is_loss_finite(loss, terms), list(modules))
    # What FSDP's forward began, its backward ends.
    must_run_backward = with_backward or loop.engine.backend.is_sharded
    if must_run_backward and loss.requires_grad:
        loop.model.zero_grad()
        with undivided(terms, [1.0] * len(terms)):
            (loss if slot.is_counted else loss * 0).backward()
        if with_backward:
            result.parameter = _last_nonfinite_gradient(loop.model)
    return result


def _loss_of(loop: OwnLoop, slot: Slot) -> tuple[Tensor, list[Term]]:
    """Run the forward of a micro-batch; return its loss and the terms that could be read. For
    `whole_batch`, the sum of the outputs' squares, which single samples have, too.
    """
    backend = loop.engine.backend
    batch = send_to_device(slot.micro_batch.batch, backend.device)
    with backend.autocast():
        outputs = callable_module(loop.model)(**argument_filter(loop.model)(batch))
        if loop.whole_batch is not None:
            tensors = [tensor for tensor in named_tensors(outputs).values() if tensor.requires_grad]
            return sum(at_least_float32(tensor).square().sum() for tensor in tensors), []
        if loop.loss_fn is not None:
            total, _ = call_loss_fn(loop.loss_fn, outputs, batch)
            return total, []
        loss = head_loss(outputs)
    try:
        return loss, read_terms(loss, num_samples=len(slot.micro_batch))
    except LossNotAdditive:  # with the balancing loss of a mixture of experts
        return loss, []


def _is_loss_finite(loss: Tensor, terms: Sequence[Term]) -> bool:
    """Whether a micro-batch adds finite numbers to the loss of its window. A mean without targets
    is NaN, but adds nothing.
    """
    if _is_finite(loss):
        return True
    with_targets = [term for term in terms if float(term.divisor)]
    if len(with_targets) == len(terms):
        return False
    values = [term.value() for term in with_targets]
    return all(value is not None and _is_finite(value) for value in values)


def _last_nonfinite_gradient(model: nn.Module) -> str | None:
    """Return the name of the last parameter of a model whose gradient is NaN or infinite (the one
    that the backward reached first), or None if all gradients are finite.
    """
    for name, parameter in reversed(list(callable_module(model).named_parameters())):
        if parameter.grad is not None and not _is_finite(local_shard(parameter.grad)):
            return unwrapped_name(name)
    return None


def _exchange_parameters(model: nn.Module, repetitions: Sequence[Repetition]) -> None:
    """Under FSDP, set `parameter` of each repetition to the last parameter of the model whose
    gradient is not finite on any rank. All ranks must call it, with equally many repetitions.
    """
    # None, for finite gradients, comes before all parameters.
    model_order = [None, *(unwrapped_name(name) for name, _ in model.named_parameters())]
    parameters_by_rank = gather_object([[one.parameter for one in repetitions]])
    for index, repetition in enumerate(repetitions):
        candidates = [parameters[index] for parameters in parameters_by_rank]
        repetition.parameter = max(candidates, key=model_order.index)


@contextmanager
def _record_nonfinite_modules(model: nn.Module) -> Iterator[list[str]]:
    """During the block, append name and class of each module that returns NaN or infinity to the
    list that is yielded, in the order in which their forwards end.
    """
    modules: list[str] = []
    with ExitStack() as stack:
        for name, module in callable_module(model).named_modules():
            # FSDP2 makes a subclass of the module's class, whose name users do not know.
            classes = [c for c in type(module).__mro__ if not issubclass(c, FSDPModule)]
            label = f"{unwrapped_name(name) or 'the model itself'} ({classes[0].__name__})"
            hook = partial(_append_if_nonfinite, modules, label)
            handle = module.register_forward_hook(hook)
            stack.callback(handle.remove)
        yield modules


def _append_if_nonfinite(
    modules: list[str], label: str, module: nn.Module, inputs: tuple, output: Any
) -> None:
    """Append the label of a module to `modules` if a tensor of its output is NaN or infinite
    somewhere; with the first two arguments bound, a forward hook.
    """
    if not all(map(_is_finite, named_tensors(output).values())):
        modules.append(label)


def _is_finite(tensor: Tensor) -> bool:
    """Whether no element of a loss, a module's output or a gradient is NaN or infinite."""
    return bool(tensor.detach().isfinite().all())


def _describe(window_name: str, loss: float, causes: Sequence[Cause]) -> str:
    """Describe the cause in one line of text. If the loss is finite, the gradient is not."""
    parts = [f"the loss of {window_name} is {loss}"]
    if math.isfinite(loss):
        parts = [f"the gradient of {window_name} is not finite (its loss {loss:.6g} is)"]
    samples = [sample for cause in causes for sample in cause.samples]
    modules = [cause.module for cause in causes if cause.module is not None]
    parameters = [cause.parameter for cause in causes if cause.parameter is not None]
    if samples:
        parts.append(f"it comes from {_format_samples(samples)}")
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
        parts.append("the outputs of all modules are finite, so the loss is the cause")
    return "; ".join(parts)


def _format_samples(samples: Sequence[int]) -> str:
    """Return the samples that cause a non-finite loss, for the error message: "sample 7" for one
    id, or "samples 7, 9, ..." with at most `MAX_LISTED_SAMPLES` (8) ids for several.
    """
    if len(samples) == 1:
        return f"sample {samples[0]}"
    listed = ", ".join(map(str, samples[:MAX_LISTED_SAMPLES]))
    if len(samples) > MAX_LISTED_SAMPLES:
        listed += ", ..."
    return f"samples {listed}"
