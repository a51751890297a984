"""What is checked: hf_ga's own way through its public interface, and any `step(model, micro_batches)`, each on one window."""

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, send_to_device
from torch import Tensor, nn

from hf_ga.check.reference import FP16_SCALE, Gradients, device_of, taken_gradients
from hf_ga.errors import ConfigError
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.fetch import Collate
from hf_ga.exact.forward import LossFunction, argument_filter, restored_buffers
from hf_ga.exact.generators import seed_generators
from hf_ga.exact.window import Window
from hf_ga.parallel.prepare import enable_fp16_on_cpu
from hf_ga.proof.targets import ProvenLoss
from hf_ga.training import backward_window

Step = Callable[..., Any]  # step(model, micro_batches), see `check_equivalence`


@dataclass
class Subject:
    """What every arm is given: the working copy of the model and how its windows are made.

    Attributes:
        rule: what was proven; None where hf_ga refuses the model. places: where the model draws, known in both cases.
        without_float64: why there is no reference in float64; None where there is one.
    """

    model: nn.Module
    samples: list[Any]
    collate_fn: Collate
    loss_fn: LossFunction | None
    precision: str
    seed: int
    accelerator: Accelerator
    max_grad_norm: float | None
    allow_split_dependent_randomness: bool
    rule: ProvenLoss | None = None
    places: KeyedDropout | None = None
    without_float64: str | None = None


@dataclass
class Outcome:
    """What an arm left: gradients by name (zeros where it left none, see `missing`), or a change of the weights.

    Attributes:
        update: what the arm added to the weights by itself; None where it left them.
    """

    loss: float | None
    gradients: Gradients
    missing: set[str] = field(default_factory=set)
    update: Gradients | None = None


def run_ours(subject: Subject, window: Window) -> Outcome:
    """`backward_window` on the window, then clipping once where that was asked for."""
    model, accelerator = subject.model, subject.accelerator
    with restored_buffers(model):
        result = backward_window(
            accelerator,
            model,
            window,
            targets=subject.rule,
            loss_fn=subject.loss_fn,
            allow_split_dependent_randomness=subject.allow_split_dependent_randomness,
        )
    missing = _missing(model)
    gradients = taken_gradients(model)
    if accelerator.scaler is not None:
        torch._foreach_div_(list(gradients.values()), accelerator.scaler.get_scale())
    clip(gradients, subject.max_grad_norm)
    return Outcome(result.loss, gradients, missing)


def run_step(step: Step, subject: Subject, window: Window, accumulation_steps: int) -> Outcome:
    """Somebody's step on a copy of the model. It leaves gradients, or has changed the weights."""
    model = copy.deepcopy(subject.model)
    batches = [send_to_device(m.batch, device_of(model)) for m in window.micro_batches]
    if subject.loss_fn is None:
        batches = [argument_filter(model)(batch) for batch in batches]
    known = {"accumulation_steps": accumulation_steps, "precision": subject.precision}
    seed_generators(subject.seed)  # what it draws by itself is the same in every check
    with own_accelerate_state(), torch.enable_grad():
        returned = step(model, batches, **{k: v for k, v in known.items() if k in inspect.signature(step).parameters})
    trainable = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    after = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in trainable}
    if lost := trainable.keys() - after.keys():
        raise ConfigError(f"a step must leave the model's parameters where they are, but {min(lost)} is gone.")
    missing = {name for name, p in after.items() if p.grad is None}
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in after.items()}
    moved = {name: p.detach() - trainable[name].detach() for name, p in after.items()}
    has_moved = any(bool(change.any()) for change in moved.values())
    return Outcome(_as_number(returned), gradients, missing, moved if has_moved else None)


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Scale all gradients down to the given global L2 norm, in place; None leaves them."""
    if max_grad_norm:
        values = list(gradients.values())
        norm = torch.stack([v.double() for v in torch._foreach_norm(values)]).norm()
        torch._foreach_mul_(values, min(1.0, max_grad_norm / (float(norm) + 1e-6)))


def make_accelerator(model: nn.Module, precision: str) -> Accelerator:
    """One for the model's device and the precision."""
    accelerator = Accelerator(
        cpu=device_of(model).type == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=FP16_SCALE)] if precision == "fp16" else None,
    )
    enable_fp16_on_cpu(accelerator)
    return accelerator


def check_one_process() -> None:
    """Raise ConfigError where several processes were launched: the check would run in each of them."""
    known = PartialState._shared_state
    processes = PartialState().num_processes if known else int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"a check runs on one process, but {processes} were launched: start it with plain python, or with "
            "`accelerate launch --num_processes 1`."
        )


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Accelerate keeps one state for all accelerators of a process: an empty one for a while, then the caller's again.

    Settings that are handed on in the environment (ACCELERATE_...) are put back too.
    """
    kinds = (AcceleratorState, PartialState, GradientState)
    states = [dict(kind._shared_state) for kind in kinds]
    environment = dict(os.environ)
    for kind in kinds:
        kind._shared_state.clear()
    try:
        yield
    finally:
        for kind, state in zip(kinds, states, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


def working_copy(model: nn.Module, parameters: list[str] | None) -> nn.Module:
    """A copy in training mode without Accelerate's autocast; parameters outside of `parameters` (names) are frozen."""
    model = copy.deepcopy(model)
    if "_original_forward" in model.__dict__:  # prepared under mixed precision: its wrapper would still call the caller's model
        model.forward = model.__dict__.pop("_original_forward")
    if not model.training:  # one that is in training mode keeps what was frozen in evaluation mode
        model.train()
    for name, parameter in model.named_parameters():
        parameter.grad = None
        if parameters is not None and name not in parameters:
            parameter.requires_grad_(False)
    return model


def _missing(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


def _as_number(returned: Any) -> float | None:
    if isinstance(returned, Tensor) and returned.numel() == 1:
        return float(returned.detach())
    return float(returned) if isinstance(returned, int | float) and not isinstance(returned, bool) else None
