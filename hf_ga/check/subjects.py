"""What is checked, on one window each: hf_ga's own `backward_window`, and any `step(model, micro_batches)`."""

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, send_to_device
from torch import Tensor, nn

from hf_ga.check.gradients import Gradients, MakeOptimizer, adamw, clip, take_gradients
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
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 1024.0  # keeps small gradients above fp16's least number; it is divided out


@dataclass(frozen=True)
class CheckSettings:
    """How a check is made.

    Attributes:
        loss_fn: (outputs, batch) -> (sum of the loss, number of targets); wins over the head's own loss.
        precision: "fp32", "bf16" or "fp16", by autocast.
        seed: of dropout masks and of what a step draws by itself.
        parameters: name patterns (`*.layer.0.*`); only the gradients of these parameters are computed and compared.
        max_memory_gib: limit for the references. Default: 70 % of the free memory. Where float64 does not fit, the full batch in
            the checked precision is the reference, and the report says so.
        optimizer: list of parameters -> optimizer of the compared update.
        max_grad_norm: the reference, and hf_ga, clip the window's gradient once to this L2 norm.
        allow_split_dependent_randomness: accept random draws that cannot be tied to a sample; they are switched off in the check.
    """

    loss_fn: LossFunction | None = None
    precision: str = "fp32"
    seed: int = 0
    parameters: str | list[str] | None = None
    max_memory_gib: float | None = None
    optimizer: MakeOptimizer = adamw
    max_grad_norm: float | None = None
    allow_split_dependent_randomness: bool = False

    def __post_init__(self) -> None:
        if self.precision not in DTYPES:
            raise ConfigError(f"precision must be one of {', '.join(DTYPES)}, got {self.precision!r}.")
        if self.max_memory_gib is not None and not self.max_memory_gib > 0:
            raise ConfigError(f"max_memory_gib must be greater than 0, got {self.max_memory_gib}.")


@dataclass
class Subject:
    """What every arm is given: the working copy of the model and how its windows are made.

    Attributes:
        rule: what was proven; None where hf_ga refuses the model. refused: why it does.
        dropout: the model's dropout sites, known in both cases.
        without_float64: why there is no reference in float64; None where there is one.
    """

    model: nn.Module
    samples: list[Any]
    collate_fn: Collate
    accelerator: Accelerator
    settings: CheckSettings
    rule: ProvenLoss | None = None
    refused: str | None = None
    dropout: KeyedDropout = field(init=False)
    without_float64: str | None = None

    @property
    def proof_arguments(self) -> dict[str, Any]:
        """Of `prove_targets` and `backward_window`."""
        return {
            "loss_fn": self.settings.loss_fn,
            "allow_split_dependent_randomness": self.settings.allow_split_dependent_randomness,
        }


@dataclass
class Outcome:
    """What an arm left.

    Attributes:
        loss: the window's mean loss, if the arm reports it. gradients: by name; zeros where it left none.
        update: the change of the weights, of an arm that made the optimizer step itself and left no gradient.
    """

    loss: float | None
    gradients: Gradients
    update: Gradients | None = None


def run_ours(subject: Subject, window: Window) -> Outcome:
    """`backward_window`, then clipping once if asked for."""
    with restored_buffers(subject.model):
        result = backward_window(subject.accelerator, subject.model, window, targets=subject.rule, **subject.proof_arguments)
    gradients = take_gradients(subject.model)
    if subject.accelerator.scaler is not None:
        torch._foreach_div_(list(gradients.values()), subject.accelerator.scaler.get_scale())
    clip(gradients, subject.settings.max_grad_norm)
    return Outcome(result.loss, gradients)


def run_step(step: Step, subject: Subject, window: Window, accumulation_steps: int) -> Outcome:
    """Another step, on a copy of the model."""
    model = copy.deepcopy(subject.model)
    batches = [send_to_device(m.batch, device_of(model)) for m in window.micro_batches]
    if subject.settings.loss_fn is None:
        batches = [argument_filter(model)(batch) for batch in batches]
    known = {"accumulation_steps": accumulation_steps, "precision": subject.settings.precision}
    seed_generators(subject.settings.seed)  # what it draws by itself is the same in every check
    with own_accelerate_state(), torch.enable_grad():
        returned = step(model, batches, **{k: v for k, v in known.items() if k in inspect.signature(step).parameters})
    trainable = {name: p.detach() for name, p in subject.model.named_parameters() if p.requires_grad}
    after = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name in trainable}
    if lost := trainable.keys() - after.keys():
        raise ConfigError(f"a step must leave the model's parameters where they are, but {min(lost)} is gone.")
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach() for name, p in after.items()}
    if any(p.grad is not None for p in after.values()) or all(torch.equal(p, trainable[name]) for name, p in after.items()):
        return Outcome(_as_number(returned), gradients)
    return Outcome(_as_number(returned), gradients, {name: p.detach() - trainable[name] for name, p in after.items()})


def make_accelerator(model: nn.Module, precision: str) -> Accelerator:
    """An Accelerator for the model's device and the precision."""
    accelerator = Accelerator(
        cpu=device_of(model).type == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=FP16_SCALE)] if precision == "fp16" else None,
    )
    enable_fp16_on_cpu(accelerator)
    return accelerator


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter."""
    return next(model.parameters()).device


def check_one_process() -> None:
    """Raise ConfigError where several processes were launched: the check would run in each of them."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ConfigError(
            f"a check runs on one process, but {processes} were launched: start it with plain python, or with "
            "`accelerate launch --num_processes 1`."
        )


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Give the block an empty Accelerate state; then restore the caller's, and the environment, which passes settings on, too."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))
        for kind in (AcceleratorState, PartialState, GradientState):
            stack.enter_context(patch.dict(kind._shared_state, clear=True))
        yield


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


def _as_number(returned: Any) -> float | None:
    if isinstance(returned, Tensor) and returned.numel() == 1:
        return float(returned.detach())
    return float(returned) if isinstance(returned, int | float) and not isinstance(returned, bool) else None
