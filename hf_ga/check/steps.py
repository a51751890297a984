"""Run the training steps under test on one window: hf_ga's own `backward_window`, and any
`step(model, micro_batches)`. Also the copy of the model and the Accelerator that they run with.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs, send_to_device
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_ga.check.gradients import Gradients, clip, take_gradients
from hf_ga.draws.draw import Draw
from hf_ga.draws.generators import seed_generators
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.look.trial import LossFacts
from hf_ga.engine.whole.whole_window import WholeBatchLoss
from hf_ga.errors import HfGaError
from hf_ga.loading.fetch import Collate
from hf_ga.loading.window import Window
from hf_ga.loading.window_loader import WindowLoader
from hf_ga.model.forward import argument_filter, restored_state
from hf_ga.model.override import restored
from hf_ga.parallel.backend import sum_over_ranks
from hf_ga.parallel.prepare import enable_fp16_on_cpu, enable_fsdp_on_cpu
from hf_ga.training import LossSettings, backward_window

StepFunction = Callable[..., Any]  # step(model, micro_batches), see `check_equivalence`
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_SCALE = 1024.0  # loss scale that keeps small gradients above fp16's smallest number


class ReferenceDraws(KeyedDraws):
    """Keyed draws for a model that computes in float64 what it trains in float32."""

    def draw(self, *args: Any, **kwargs: Any) -> Draw:
        """Return the next draw of the micro-batch, see `KeyedDraws.draw`."""
        draw = super().draw(*args, **kwargs)
        return _Float32Draw(draw.keys, draw.site, draw.shape, draw.sample_dim)


class _Float32Draw(Draw):
    """A draw whose numbers have the digits of float32 in float64, too: with more digits, normal
    numbers are others altogether.
    """

    def _draw(self, from_hashes: partial) -> Tensor:
        """Draw the numbers from hashes; those of float64 in float32."""
        if from_hashes.keywords.get("dtype") != torch.float64:
            return super()._draw(from_hashes)
        return super()._draw(partial(from_hashes, dtype=torch.float32)).double()


@dataclass
class CheckContext:
    """What all arms (training steps under test) of one `check_equivalence` call share.

    Attributes:
        model: The working copy of the user's model.
        samples: The samples of the full window.
        collate_fn: List of samples -> model arguments.
        accelerator: The check's own, for all launched processes, in the checked precision.
        precision: "fp32", "bf16" or "fp16".
        seed: Seed of dropout masks and of the random draws of the user's steps.
        max_grad_norm: L2 norm that the window's gradient is clipped to. None: no clipping.
        settings: The user's loss, and whether draws that belong to no sample are accepted.
        draws: The random draws of the reference, keyed by sample as hf_ga's are.
        facts: What hf_ga found out about the loss. None: hf_ga refuses the model.
        refusal: Why hf_ga refuses the model. None: it does not.
        prepared: The model that hf_ga's own step trains: `model` itself on one process, a copy
            under DDP or FSDP on several. Set only if hf_ga does not refuse it.
    """

    model: nn.Module
    samples: list[Any]
    collate_fn: Collate
    accelerator: Accelerator
    precision: str
    seed: int
    max_grad_norm: float | None
    settings: LossSettings
    draws: KeyedDraws = field(default_factory=partial(ReferenceDraws, allow_unkeyed=True))
    facts: LossFacts | None = None
    refusal: HfGaError | None = None
    prepared: nn.Module = field(init=False)

    @property
    def has_batch_norm(self) -> bool:
        """Whether the model normalises by statistics of the micro-batch."""
        return any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())

    def loader(self, num_samples: int, **arguments: Any) -> WindowLoader:
        """Return a loader with one window of the first samples, in their order."""
        return WindowLoader(
            self.samples[:num_samples],
            self.collate_fn,
            accelerator=self.accelerator,
            global_batch_size=num_samples,
            seed=self.seed,
            shuffle=False,
            **arguments,
        )

    def first_samples_window(self, num_samples: int, **arguments: Any) -> Window:
        """Return the window of the first samples."""
        return next(iter(self.loader(num_samples, **arguments)))


def run_hf_ga_step(context: CheckContext, window: Window) -> tuple[float, Gradients]:
    """Run hf_ga's own step on this process's micro-batches of a window; return the mean loss of the
    whole window and its unscaled gradients, clipped once. Raises the error with which hf_ga refuses
    the model, if it does.
    """
    if context.refusal is not None:
        raise context.refusal
    model = context.prepared
    context.facts.note_padding(window.state)
    with restored_state(model):
        result = backward_window(context.accelerator, model, window)
    gradients = take_gradients(model)
    if context.accelerator.scaler is not None:
        torch._foreach_div_(list(gradients.values()), context.accelerator.scaler.get_scale())
    clip(gradients, context.max_grad_norm)
    return result.loss, gradients


def run_user_step(
    step: StepFunction, context: CheckContext, window: Window, accumulation_steps: int
) -> tuple[float | None, Gradients]:
    """Run a step of the user's, of Trainer or of Accelerate on a copy of the model.

    Args:
        step: The step function, see `check_equivalence`.
        context: The model and the settings of the check.
        window: The window; all of its micro-batches are passed to the step.
        accumulation_steps: Micro-batches of a full window over all processes.

    Returns:
        The loss that the step returned, averaged over the processes, or None; and the gradients by
        parameter name, zeros where the step left none.
    """
    model = copy.deepcopy(context.model)
    device = device_of(model)
    batches = [send_to_device(micro.batch, device) for micro in window.micro_batches]
    if context.settings.loss_fn is None and context.settings.whole_batch is None:
        batches = [argument_filter(model)(batch) for batch in batches]
    num_processes = context.accelerator.num_processes
    optional_arguments = {
        "accumulation_steps": -(-accumulation_steps // num_processes),
        "precision": context.precision,
    }
    declared = inspect.signature(step).parameters
    arguments = {name: value for name, value in optional_arguments.items() if name in declared}
    # The random draws of the step must be the same whenever the check runs it.
    seed_generators(context.seed)
    with own_accelerate_state(), torch.enable_grad():
        returned = step(model, batches, **arguments)
    loss, gradients = returned if isinstance(returned, tuple) else (returned, take_gradients(model))
    if loss is not None:
        local_loss = float(torch.as_tensor(loss).detach())
        loss = sum_over_ranks(context.accelerator, [local_loss])[0] / num_processes
    return loss, {
        name: gradients[name] if name in gradients else torch.zeros_like(parameter)
        for name, parameter in context.model.named_parameters()
        if parameter.requires_grad
    }


def make_accelerator(model: nn.Module, precision: str) -> Accelerator:
    """Make the check's accelerator, for the model's device and all launched processes. FSDP and
    fp16 also work on CPUs.
    """
    accelerator = Accelerator(
        cpu=device_of(model).type == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=FP16_SCALE)] if precision == "fp16" else None,
    )
    enable_fsdp_on_cpu(accelerator)
    enable_fp16_on_cpu(accelerator)
    return accelerator


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next(model.parameters()).device


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Run the block with an empty Accelerate state, so that it can build an Accelerator with other
    settings. Then restore the state and the environment variables.
    """
    with restored(os.environ), ExitStack() as stack:
        for state_class in (AcceleratorState, PartialState, GradientState):
            stack.enter_context(restored(state_class._shared_state))
            state_class._shared_state.clear()
        yield


def working_copy(
    model: nn.Module, whole_batch: WholeBatchLoss | None
) -> tuple[nn.Module, WholeBatchLoss | None]:
    """Copy the user's unwrapped model, in training mode and without gradients or Accelerate's
    autocast; and `whole_batch` too if it is a module.
    """
    # One deepcopy for both, as they may share parameters. deepcopy returns functions as they are.
    model, whole_batch = copy.deepcopy((model, whole_batch))
    if "_original_forward" in vars(model):
        # Accelerate prepared the model under mixed precision: its wrapped `forward` would still
        # call the caller's model, not the copy.
        model.forward = vars(model).pop("_original_forward")
    if not model.training:
        # A model in training mode may keep some modules in evaluation mode on purpose.
        model.train()
    model.zero_grad()
    return model, whole_batch
