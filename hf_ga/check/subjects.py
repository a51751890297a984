"""The steps under check, each run on one window: hf_ga's own `backward_window`, and any
`step(model, micro_batches)`.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, send_to_device
from torch import nn

from hf_ga.check.gradients import Gradients, clip, take_gradients
from hf_ga.exact.backend import sum_over_ranks
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.fetch import Collate
from hf_ga.exact.forward import LossFunction, argument_filter, restored_buffers
from hf_ga.exact.generators import seed_generators
from hf_ga.exact.override import restored
from hf_ga.exact.rule import Rule
from hf_ga.exact.whole_window import WholeBatchLoss
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu
from hf_ga.training import Given, backward_window, remember

StepFunction = Callable[..., Any]  # step(model, micro_batches), see `check_equivalence`
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 1024.0  # keeps small gradients above fp16's smallest number; divided out again


@dataclass
class Subject:
    """The input of every arm: the working copy of the model, what its windows are built from, and
    arguments of `check_equivalence`.

    Attributes:
        model: The working copy.
        samples: Of the window.
        collate_fn: Of the samples.
        accelerator: Of the launched processes, in the checked precision.
        precision: "fp32", "bf16" or "fp16".
        seed: Of dropout masks and of a step's own draws.
        max_grad_norm: What the gradient is clipped to. None: no clipping.
        proof_arguments: Keyword arguments of `prove_targets`.
        rule: The proven loss. None: hf_ga does not support the model.
        refused: Why it does not.
        dropout: The model's dropout sites, set in both cases.
        prepared: What hf_ga trains: the model itself or, on several processes, a copy under DDP or
            FSDP.
    """

    model: nn.Module
    samples: list[Any]
    collate_fn: Collate
    accelerator: Accelerator
    precision: str
    seed: int
    max_grad_norm: float | None
    proof_arguments: dict[str, Any]
    rule: Rule | None = None
    refused: str | None = None
    dropout: KeyedDropout = field(init=False)
    prepared: nn.Module = field(init=False)

    @property
    def loss_fn(self) -> LossFunction | None:
        return self.proof_arguments["loss_fn"]

    @property
    def whole_batch(self) -> WholeBatchLoss | None:
        return self.proof_arguments["whole_batch"]

    def window(self, num_samples: int, **arguments: Any) -> Window:
        """Make the window of the first samples.

        Args:
            num_samples: How many.
            arguments: More arguments of `WindowLoader`.
        """
        loader = WindowLoader(
            self.samples[:num_samples],
            self.collate_fn,
            accelerator=self.accelerator,
            global_batch_size=num_samples,
            seed=self.seed,
            shuffle=False,
            **arguments,
        )
        return next(iter(loader))


def run_ours(subject: Subject, window: Window) -> tuple[float, Gradients]:
    """Run `backward_window` on this process's part of a window, then clip once if `max_grad_norm`
    is set.

    Returns:
        The window's mean loss, and its gradients.
    """
    model = subject.prepared
    remember(subject.accelerator, model, Given(rule=subject.rule, **subject.proof_arguments))
    with restored_buffers(model):
        result = backward_window(subject.accelerator, model, window)
    gradients = take_gradients(model)
    if subject.accelerator.scaler is not None:
        torch._foreach_div_(list(gradients.values()), subject.accelerator.scaler.get_scale())
    clip(gradients, subject.max_grad_norm)
    return result.loss, gradients


def run_step(
    step: StepFunction, subject: Subject, window: Window, accumulation_steps: int
) -> tuple[float | None, Gradients]:
    """Run another step on a copy of the model.

    Args:
        step: See `check_equivalence`.
        subject: The model and the settings of the check.
        window: All of its micro-batches are passed to the step.
        accumulation_steps: Micro-batches of a full window over all processes.

    Returns:
        The step's loss, averaged over the processes, if it reports one; and its gradients, zeros
        where it left none.
    """
    model = copy.deepcopy(subject.model)
    batches = [send_to_device(m.batch, device_of(model)) for m in window.micro_batches]
    if subject.loss_fn is None and subject.whole_batch is None:
        batches = [argument_filter(model)(batch) for batch in batches]
    num_processes = subject.accelerator.num_processes
    known = {
        "accumulation_steps": -(-accumulation_steps // num_processes),
        "precision": subject.precision,
    }
    wanted = inspect.signature(step).parameters
    options = {name: value for name, value in known.items() if name in wanted}
    seed_generators(subject.seed)  # the step's own draws are the same in every check
    with own_accelerate_state(), torch.enable_grad():
        returned = step(model, batches, **options)
    if isinstance(returned, tuple):
        loss, left = returned
    else:
        loss = returned
        left = take_gradients(model)
    if loss is not None:
        own_loss = float(torch.as_tensor(loss).detach())
        loss = sum_over_ranks(subject.accelerator, [own_loss])[0] / num_processes
    gradients = {}
    for name, parameter in subject.model.named_parameters():
        if parameter.requires_grad:
            gradients[name] = left[name] if name in left else torch.zeros_like(parameter)
    return loss, gradients


def make_accelerator(model: nn.Module, precision: str) -> Accelerator:
    """Make an Accelerator for the model's device, a precision, and the launched processes."""
    accelerator = Accelerator(
        cpu=device_of(model).type == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=FP16_SCALE)] if precision == "fp16" else None,
    )
    enable_fsdp_on_cpu(accelerator)
    enable_fp16_on_cpu(accelerator)
    return accelerator


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    return next(model.parameters()).device


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Run the block with an empty Accelerate state; then restore the caller's, and the environment
    variables.
    """
    with restored(os.environ), ExitStack() as stack:
        for kind in (AcceleratorState, PartialState, GradientState):
            stack.enter_context(restored(kind._shared_state))
            kind._shared_state.clear()
        yield


def working_copy(
    model: nn.Module, whole_batch: WholeBatchLoss | None
) -> tuple[nn.Module, WholeBatchLoss | None]:
    """Copy a model, and a loss that is a module.

    Returns:
        The copy in training mode, without gradients and without Accelerate's autocast; the copy of
        the loss.
    """
    # Together, as they may share parameters. A function is not copied.
    model, whole_batch = copy.deepcopy((model, whole_batch))
    if "_original_forward" in vars(model):
        # Prepared under mixed precision: the wrapper calls the caller's model.
        model.forward = vars(model).pop("_original_forward")
    if not model.training:
        # A model in training mode may keep some modules in evaluation mode on purpose.
        model.train()
    model.zero_grad()
    return model, whole_batch
