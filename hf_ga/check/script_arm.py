"""One run of a user's script up to its first update, in a split that the script did not choose.

The script is not changed: where it makes an accelerator or a trainer, it gets a subclass with
`SplitAccelerator` or `SplitTrainer`, which changes the sizes of micro-batches and keeps the
gradient of the first update. `script.py` starts a process for each run.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import new_class
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader

from hf_ga.check.causes.divisors import name_of_term, readings_by_term
from hf_ga.check.gradients import Gradients
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import ConfigError, HfGaError
from hf_ga.run import (
    exact_accelerator,
    exact_trainer,
    in_one_line,
    replace_classes,
    run_as_main,
)

SEED = 0  # of a script that sets none
RESULT = "result.pt"  # an ArmResult, or the message of hf_ga's error
OUTPUT = "output.txt"


@dataclass
class ArmResult:
    """What one run of the script found.

    Attributes:
        kind: "accelerate.Accelerator" or "transformers.Trainer".
        num_micro_batches: Number of micro-batches of the window.
        gradients: The gradient of the first update, by the name of the parameter.
        is_by_hand: Whether the script accumulates by hand: it divides its losses itself.
        num_samples: Number of samples of the window. None without hf_ga.
        is_low_precision: Whether forwards ran in bf16 or fp16.
        weights: Sum of the absolute weights before the update.
        terms: For each term of the loss, its name and what it divides by in each micro-batch.
        draws: Random functions whose numbers belong to samples: name -> where they are called.
        pad_to_window: Whether the rehearsal of hf_ga's accelerator showed that padding matters.
    """

    kind: str
    num_micro_batches: int
    gradients: Gradients = field(default_factory=dict)
    is_by_hand: bool = False
    num_samples: int | None = None
    is_low_precision: bool = False
    weights: float = 0.0
    terms: list[tuple[str, list[float]]] = field(default_factory=list)
    draws: dict[str, str] = field(default_factory=dict)
    pad_to_window: bool = False


class FirstUpdate(BaseException):
    """Ends the script when the gradient of its first update is kept. No `except Exception` of the
    script catches it.
    """


@dataclass
class Arm:
    """One run of the script, up to its first update, whose gradient it keeps.

    Attributes:
        is_exact: With hf_ga's accelerators and trainers, or with those of the script.
        as_written: What a run without a change found. None: this is that run.
        num_micro_batches: Number of micro-batches to split the window into. None in that run.
        result: The gradient, with what was found.
        owner: The accelerator or the trainer.
        num_backwards: Number of backwards so far.
    """

    is_exact: bool
    as_written: ArmResult | None = None
    num_micro_batches: int | None = None
    result: ArmResult | None = None
    owner: Any = None
    num_backwards: int = 0

    @property
    def is_by_hand(self) -> bool:
        """Whether the script divides its losses by its own number of micro-batches."""
        return self.as_written is not None and self.as_written.is_by_hand

    def batch_size(self, own: int) -> int:
        """Return the batch size of a loader whose batch size in the script is `own`."""
        if self.as_written is None:
            return own
        as_written = self.as_written
        size = own * as_written.num_micro_batches // self.num_micro_batches
        if as_written.num_samples is not None:  # fewer than the batch size, perhaps
            size = min(size, as_written.num_samples // self.num_micro_batches)
        return max(1, size)

    @property
    def is_trainer(self) -> bool:
        """Whether the script has a trainer."""
        return isinstance(self.owner, SplitTrainer)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the gradient before an optimizer steps; a hook of all optimizers.

        Raises:
            FirstUpdate: If there is a gradient.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.owner is not None and any(p.grad is not None for p in parameters):
            self.keep(parameters)

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the gradient after the window's last backward of a script that accumulates by hand,
        which would step too late: its losses are divided by the number of its own micro-batches.

        Raises:
            FirstUpdate: If it is the window's last backward.
        """
        self.num_backwards += 1
        if self.is_by_hand and self.num_backwards == self.num_micro_batches:
            own = self.as_written.num_micro_batches
            self.keep(parameters, factor=own / self.num_micro_batches)

    def keep(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Keep the gradients, 0 where there is none, and what is known, and end the script.

        Raises:
            FirstUpdate: Always.
        """
        owner = self.owner
        accelerator = owner.accelerator if self.is_trainer else owner
        settings = owner.args if self.is_trainer else owner
        result = ArmResult(
            kind="transformers.Trainer" if self.is_trainer else "accelerate.Accelerator",
            num_micro_batches=settings.gradient_accumulation_steps,
            is_low_precision=accelerator.mixed_precision != "no",
        )
        names = {
            parameter: f"{index} {name}"
            for index, model in enumerate(accelerator._models)
            for name, parameter in model.named_parameters()
        }
        for index, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            # An optimizer may have them in an order of its own, as that of a set.
            name = names.get(parameter, str(index))
            result.gradients[name] = (gradient.detach().float() * factor).cpu()
        result.weights = sum(float(p.detach().double().abs().sum()) for p in parameters)
        engine = self.engine
        if engine is not None and engine.gradient is not None:
            self._describe_window(result, engine)
        self.result = result
        raise FirstUpdate

    def _describe_window(self, result: ArmResult, engine: WindowEngine) -> None:
        """Write into the result what hf_ga's engine knows of the window."""
        if not self.is_trainer:
            loop = self.owner.training_loop
            result.pad_to_window = loop._window.state.pad_to_window
            num_parts = loop.num_parts_by_hand
            result.is_by_hand = num_parts > 1
            result.num_micro_batches = max(num_parts, result.num_micro_batches)
        counted = [reading for reading in engine.gradient.readings if reading.is_counted]
        terms = readings_by_term(counted)
        result.num_samples = sum(r.num_samples for readings in terms[:1] for r in readings)
        for readings in terms:
            divisors = [float(reading.divisor) for reading in readings]
            result.terms.append((name_of_term(readings), divisors))
        result.draws = dict(engine.draws.places)

    @property
    def engine(self) -> WindowEngine | None:
        """The engine of an exact accelerator or trainer."""
        if not self.is_exact:
            return None
        if self.is_trainer:
            window = self.owner._window
            return None if window is None else window.engine
        return self.owner.training_loop.engine

    def split(self, loader: Any) -> None:
        """Let a loader make other batches of the same samples.

        Raises:
            ConfigError: If it has a batch sampler of its own.
        """
        is_prepared = getattr(loader, "_is_accelerate_prepared", False)
        if self.as_written is None or is_prepared or not isinstance(loader, DataLoader):
            return
        sampler = loader.batch_sampler
        if type(sampler) is not BatchSampler:
            raise ConfigError(
                f"the batches of a {type(sampler).__name__} cannot be split otherwise."
            )
        sampler.batch_size = self.batch_size(sampler.batch_size)
        vars(loader)["batch_size"] = sampler.batch_size  # torch refuses to set it


class SplitAccelerator:
    """A mixin for an accelerator of a script."""

    arm: Arm

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the accelerator with another number of micro-batches."""
        super().__init__(*args, **kwargs)
        self.arm.owner = self
        self.gradient_accumulation_steps = self.gradient_accumulation_steps

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches of a window."""
        return super().gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, number: int) -> None:
        """Set the requested number in place of the script's own, which it may set later."""
        if self.arm.num_micro_batches is not None and not self.arm.is_by_hand:
            number = self.arm.num_micro_batches
        accelerate.Accelerator.gradient_accumulation_steps.fset(self, number)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader with batches of another size."""
        arm = self.arm
        arm.split(data_loader)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if arm.is_exact and arm.as_written is not None:
            # A rehearsed window has one micro-batch less. The run as written is rehearsed.
            self.training_loop.engine.rehearses = False
            prepared.windows.state.pad_to_window = arm.as_written.pad_to_window
        return prepared

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward, and count it."""
        result = super().backward(loss, *args, **kwargs)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self.arm.after_backward([p for group in groups for p in group["params"]])
        return result

    def clip_grad_norm_(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        """Return the norm, and clip nothing: the gradient is compared."""
        return super().clip_grad_norm_(parameters, float("inf"), *args, **kwargs)


class SplitTrainer:
    """A mixin for a trainer of a script."""

    arm: Arm

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer with batches of another size."""
        from transformers import TrainingArguments

        self.arm.owner = self
        for settings in (*args, *kwargs.values()):
            if isinstance(settings, TrainingArguments):
                self._split(settings)
        super().__init__(*args, **kwargs)

    def _split(self, settings: Any) -> None:
        """Change the settings of a trainer."""
        own = settings.per_device_train_batch_size
        settings.per_device_train_batch_size = self.arm.batch_size(own)
        if self.arm.num_micro_batches is not None:
            settings.gradient_accumulation_steps = self.arm.num_micro_batches
        settings.max_grad_norm = 0.0  # the gradient is compared


def run_arm(arm: Arm, arguments: Sequence[str]) -> ArmResult | None:
    """Run a script with its arguments up to its first update. None: it ended without one."""

    def choose(exact: Callable[[type], type], mixin: type, cls: type) -> type:
        """Return the class of an object of the script, exact or not, with the mixin."""
        base = exact(cls) if arm.is_exact else cls
        name = base.__name__
        return new_class(name, (mixin, base), exec_body=lambda body: body.update(arm=arm))

    replace_classes(
        partial(choose, exact_accelerator, SplitAccelerator),
        partial(choose, exact_trainer, SplitTrainer),
    )
    register_optimizer_step_pre_hook(arm.before_step)
    set_seed(SEED)
    try:
        run_as_main(arguments)
    except FirstUpdate:
        return arm.result
    print(
        "the script ended without an update of an accelerate.Accelerator or a "
        "transformers.Trainer, so there is nothing to compare.",
        file=sys.stderr,
    )
    return None


def run_in_process(arm: Arm, folder: Path, arguments: Sequence[str]) -> None:
    """Run a script up to its first update; the function of a new process.

    What the script prints is written to the file OUTPUT, the result or hf_ga's error to RESULT.
    """
    # Processes of the script, such as DataLoader workers, start as without the checker.
    multiprocessing.set_start_method(None, force=True)
    with (folder / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        # So that an error, which is not buffered, comes behind what was printed before it.
        sys.stdout.reconfigure(line_buffering=True)
        try:
            result = run_arm(arm, arguments)
        except HfGaError as error:
            result = in_one_line(error, arguments)
        if result is not None:
            torch.save(result, folder / RESULT)
