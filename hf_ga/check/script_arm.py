"""One run of a user's script up to its first update, in a split that the script did not choose.

The script is not changed: where it makes an accelerator or a trainer, it gets a subclass with
`SplitAccelerator` or `SplitTrainer`, which changes the sizes of micro-batches and keeps the
gradient of the first update. `script.py` starts a process for each run.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import new_class
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from hf_ga.engine.divisors import on_host
from hf_ga.engine.window_engine import WindowEngine
from hf_ga.errors import ConfigError, HfGaError
from hf_ga.run import exact_accelerator, exact_trainer, replace_classes, run_as_main

SEED = 0  # of a script that sets none
REPORT = "report.json"
GRADIENTS = "gradients.safetensors"
OUTPUT = "output.txt"
REFUSED = 2  # exit code after an error of hf_ga, which is the last line, after this prefix
PREFIX = "error of hf_ga: "


@dataclass
class ArmRequest:
    """How to run a script.

    Attributes:
        is_exact: With hf_ga's accelerators and trainers, or with those of the script.
        num_own: Number of micro-batches of a window as the script splits it. None: not known yet,
            and not changed.
        num_micro_batches: Number of micro-batches to split it into.
        is_by_hand: Whether the script divides its losses by `num_own` itself.
    """

    is_exact: bool
    num_own: int | None = None
    num_micro_batches: int | None = None
    is_by_hand: bool = False


@dataclass
class ArmReport:
    """What a run found.

    Attributes:
        kind: "Accelerator" or "Trainer".
        num_micro_batches: Number of micro-batches of the window.
        is_by_hand: Whether the script accumulates by hand.
        num_samples: Number of samples of the window. None without hf_ga.
        is_low_precision: Whether forwards ran in bf16 or fp16.
        weights: Sum of the absolute weights before the update.
        terms: For each term of the loss, its name and what it divides by in each micro-batch.
        draws: Random functions whose numbers belong to samples: name -> where they are called.
    """

    kind: str
    num_micro_batches: int
    is_by_hand: bool = False
    num_samples: int | None = None
    is_low_precision: bool = False
    weights: float = 0.0
    terms: list[tuple[str, list[float]]] = field(default_factory=list)
    draws: dict[str, str] = field(default_factory=dict)


class FirstUpdate(BaseException):
    """Ends the script when the gradient of its first update is kept. No `except Exception` of the
    script catches it.
    """


class Arm:
    """Keeps the gradient of the first update of a script.

    Args:
        request: How the script is split.
        folder: The folder for the results.
    """

    def __init__(self, request: ArmRequest, folder: Path) -> None:
        """Start before the script."""
        self.request = request
        self.folder = folder
        self.kind = "Accelerator"
        self.num_steps = 1
        self.num_backwards = 0
        self.is_low_precision = False
        self.owner: Any = None  # the accelerator or the trainer

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the gradient before an optimizer steps; a hook of all optimizers.

        Raises:
            FirstUpdate: If there is a gradient.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self.owner is not None and any(p.grad is not None for p in parameters):
            self.keep(parameters)

    def after_backward(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the gradient after a backward of a script that accumulates by hand, which would step
        too late: its losses are divided by the number of its own micro-batches.

        Raises:
            FirstUpdate: If it is the window's last backward.
        """
        request = self.request
        self.num_backwards += 1
        if request.is_by_hand and self.num_backwards == request.num_micro_batches:
            self.keep(parameters, factor=request.num_own / request.num_micro_batches)

    def keep(self, parameters: Sequence[nn.Parameter], factor: float = 1.0) -> None:
        """Write the gradients and the report, and end the script.

        Raises:
            FirstUpdate: Always.
        """
        gradients = {
            str(index): (parameter.grad.detach().float() * factor).cpu().contiguous()
            for index, parameter in enumerate(parameters)
            if parameter.grad is not None
        }
        save_file(gradients, self.folder / GRADIENTS)
        report = self.report()
        report.weights = sum(float(p.detach().double().abs().sum()) for p in parameters)
        (self.folder / REPORT).write_text(json.dumps(asdict(report)))
        raise FirstUpdate

    def report(self) -> ArmReport:
        """Return what is known of the window."""
        report = ArmReport(self.kind, self.num_steps, is_low_precision=self.is_low_precision)
        engine = self.engine
        if engine is None or engine.gradient is None:
            return report
        if self.kind == "Accelerator":
            num_parts = self.owner.training_loop.num_parts_by_hand
            report.is_by_hand = num_parts > 1
            report.num_micro_batches = max(num_parts, report.num_micro_batches)
        readings = on_host([r for r in engine.gradient.readings if r.is_counted])
        of_first_term = [r for r in readings if r.key == readings[0].key]
        report.num_samples = sum(reading.num_samples for reading in of_first_term)
        names: dict[Any, str] = {}
        divisors: dict[Any, list[float]] = {}
        for reading in readings:
            names.setdefault(reading.key, reading.name.split(", factor")[0])
            divisors.setdefault(reading.key, []).append(float(reading.divisor))
        report.terms = [(names[key], divisors[key]) for key in names]
        report.draws = dict(engine.draws.places)
        return report

    @property
    def engine(self) -> WindowEngine | None:
        """The engine of an exact accelerator or trainer."""
        if not self.request.is_exact:
            return None
        if self.kind == "Trainer":
            window = self.owner._window
            return None if window is None else window.engine
        return self.owner.training_loop.engine

    def batch_size(self, own: int) -> int:
        """Return the batch size of a loader in the requested split.

        Args:
            own: Its batch size in the script.
        """
        request = self.request
        if request.num_micro_batches is None:
            return own
        return max(1, own * request.num_own // request.num_micro_batches)

    def split(self, loader: Any) -> Any:
        """Return a loader with other batches of the same samples.

        Raises:
            ConfigError: If it has a batch sampler of its own.
        """
        is_prepared = getattr(loader, "_is_accelerate_prepared", False)
        if self.request.num_micro_batches is None or not isinstance(loader, DataLoader):
            return loader
        if is_prepared:
            return loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        if not is_stream and type(loader.batch_sampler) is not BatchSampler:
            raise ConfigError(
                f"the batches of a {type(loader.batch_sampler).__name__} cannot be split otherwise."
            )
        options = {} if is_stream else {"sampler": loader.sampler}
        return DataLoader(
            loader.dataset,
            batch_size=self.batch_size(loader.batch_size),
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            generator=loader.generator,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            **options,
        )


class SplitAccelerator:
    """A mixin for an accelerator of a script."""

    arm: Arm

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the accelerator with another number of micro-batches."""
        super().__init__(*args, **kwargs)
        arm = self.arm
        arm.owner = self
        arm.is_low_precision |= self.mixed_precision != "no"
        if arm.request.num_micro_batches is not None and not arm.request.is_by_hand:
            self.gradient_accumulation_steps = arm.request.num_micro_batches
        arm.num_steps = self.gradient_accumulation_steps
        if arm.request.is_exact and arm.request.num_micro_batches is not None:
            # A rehearsed window has one micro-batch less. The run as written is rehearsed.
            self.training_loop.engine.rehearses = False

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader with batches of another size."""
        return super().prepare_data_loader(self.arm.split(data_loader), *args, **kwargs)

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

        arm = self.arm
        arm.kind = "Trainer"
        arm.owner = self
        for settings in (*args, *kwargs.values()):
            if isinstance(settings, TrainingArguments):
                self._split(settings)
        super().__init__(*args, **kwargs)
        arm.num_steps = self.args.gradient_accumulation_steps

    def _split(self, settings: Any) -> None:
        """Change the settings of a trainer."""
        request = self.arm.request
        own = settings.per_device_train_batch_size
        settings.per_device_train_batch_size = self.arm.batch_size(own)
        if request.num_micro_batches is not None:
            settings.gradient_accumulation_steps = request.num_micro_batches
        settings.max_grad_norm = 0.0  # the gradient is compared
        self.arm.is_low_precision |= settings.bf16 or settings.fp16


def run_arm(request: ArmRequest, folder: Path, arguments: Sequence[str]) -> None:
    """Run a script up to its first update.

    Args:
        request: How to run it.
        folder: The folder for the results.
        arguments: The script and its arguments.
    """
    arm = Arm(request, folder)

    def with_split(base: type, mixin: type) -> type:
        """Return the class of an object that the script makes."""
        return new_class(base.__name__, (mixin, base), exec_body=lambda body: body.update(arm=arm))

    def accelerators(cls: type) -> type:
        """Return the class of an accelerator."""
        return with_split(exact_accelerator(cls) if request.is_exact else cls, SplitAccelerator)

    def trainers(cls: type) -> type:
        """Return the class of a trainer."""
        return with_split(exact_trainer(cls) if request.is_exact else cls, SplitTrainer)

    replace_classes(accelerators, trainers)
    register_optimizer_step_pre_hook(arm.before_step)
    set_seed(SEED)
    try:
        run_as_main(arguments)
    except FirstUpdate:
        return
    print(
        "the script ended without an update of an accelerate.Accelerator or a "
        "transformers.Trainer, so there is nothing to compare.",
        file=sys.stderr,
    )


def run_in_process(request: ArmRequest, folder: Path, arguments: Sequence[str]) -> None:
    """Run a script up to its first update; the function of a new process, which it ends.

    What the script prints is written to the file OUTPUT.

    Args:
        request: How to run it.
        folder: The folder for the results.
        arguments: The script and its arguments.
    """
    with (folder / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        try:
            run_arm(request, folder, arguments)
        except HfGaError as error:
            in_one_line = " ".join(str(error).split())
            print(f"\n{PREFIX}{in_one_line}", file=sys.stderr, flush=True)
            sys.exit(REFUSED)
