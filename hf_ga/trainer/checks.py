"""Checks, before training, for settings of Trainer that `ExactTrainer` cannot make exact."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import sort_checkpoints
from transformers.training_args import OptimizerNames

from hf_ga.errors import ConfigError
from hf_ga.model.precision import check_precision, check_step
from hf_ga.parallel.backend import check_supported
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.trainer.pairs import has_pairs

# Methods of Trainer that only the mixin may override: another override would use its own order or
# batches.
OWNED_METHODS = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")


class WindowSize(TrainerCallback, ExportableState):
    """A Trainer callback that saves the window size in each checkpoint's trainer_state.json.

    The file has it below the name of this class.

    Args:
        window_size: The number of samples in a window over all processes.
    """

    def __init__(self, window_size: int) -> None:
        """Make the callback for an `ExactTrainer` with `window_size` samples per optimizer step."""
        self.window_size = window_size

    def state(self) -> dict[str, Any]:
        """Return `ExactTrainer`'s window size in the form in which Trainer saves a callback's state
        in a checkpoint.
        """
        return {"args": {"window_size": self.window_size}, "attributes": {}}

    def check_checkpoint(self, folder: str | bool | None, args: Any) -> None:
        """Check that the checkpoint from which `ExactTrainer` resumes was saved with the same
        window size, the number of samples in one optimizer step.

        A checkpoint without a window size, such as Trainer's own, passes.

        Args:
            folder: The checkpoint; True if there is none, None or False to start from the
                beginning.
            args: The trainer's `TrainingArguments`.

        Raises:
            ConfigError: If the checkpoint was saved with another size, because the resumed run
                would visit other samples.
        """
        if not isinstance(folder, str | os.PathLike) or not folder:
            return
        saved = _saved_window_size(Path(folder, "trainer_state.json"))
        if saved not in (None, self.window_size):
            raise ConfigError(
                f"{folder} was saved with windows of {saved} samples, but {args.world_size} "
                f"process(es) x per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} are "
                f"{self.window_size}: change one of them so that the product is {saved}."
            )


def last_complete_checkpoint(output_dir: str) -> str | None:
    """Return the last complete checkpoint of Trainer in a folder; None if there is none.

    Trainer writes `trainer_state.json` after everything else, so a checkpoint without a readable
    one was left by a run that was killed while it saved.
    """
    checkpoints = sort_checkpoints(output_dir) if Path(output_dir).is_dir() else []
    for checkpoint in reversed(checkpoints):
        with suppress(OSError, ValueError):
            json.loads(Path(checkpoint, "trainer_state.json").read_text())
            return checkpoint
    return None


def _saved_window_size(path: Path) -> int | None:
    """Read the window size in a checkpoint's `trainer_state.json`; None if there is none."""
    if not path.exists():
        return None
    callbacks = json.loads(path.read_text()).get("stateful_callbacks", {})
    return callbacks.get("WindowSize", {}).get("args", {}).get("window_size")


def check_trainer(trainer: Any, mixin: type) -> None:
    """Check, before training, that a trainer and its arguments allow exact accumulation.

    Unsupported settings are collected and reported in one error.

    Args:
        trainer: An `ExactTrainer`, or another trainer with the mixin.
        mixin: `ExactTrainerMixin`, whose methods may override Trainer's.

    Raises:
        ConfigError: If there is an unsupported argument, an overridden method, FSDP1, processes
            that would train alone, an optimizer that needs a closure, or a precision that
            Accelerate would not apply.
    """
    problems = [
        *_problems_of_arguments(trainer.args),
        *_problems_of_processes(trainer),
        *_problems_of_overrides(trainer, mixin),
        *_problems_of_loss_and_data(trainer),
    ]
    if problems:
        raise ConfigError("ExactTrainer cannot make this run exact: " + "; ".join(problems) + ".")
    check_precision(trainer.accelerator)
    if trainer.optimizer is not None:
        check_step(trainer.optimizer)


def _problems_of_arguments(args: Any) -> Iterator[str]:
    """Yield a message for each of the `TrainingArguments` that ExactTrainer does not support."""
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if strategy not in ("random", "sequential"):
        yield (
            f"train_sampling_strategy {strategy!r} builds windows that depend on the per-device "
            "batch size: use 'random'"
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size changes the window during a run: set "
            "per_device_train_batch_size yourself"
        )
    if args.torch_compile:
        yield (
            "torch_compile compiles the whole model, so its loss cannot be read: omit it, and call "
            "hf_ga.compile_layers(model) before"
        )
    if args.use_liger_kernel:
        yield (
            "use_liger_kernel computes the loss's gradient in the forward, where what the loss "
            "divides by cannot be read: omit it"
        )
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        yield (
            f"optim={str(args.optim.value)!r} updates inside each backward, before the window is "
            "complete: use another optimizer"
        )


def _problems_of_processes(trainer: Any) -> Iterator[str]:
    """Yield a message for each way of using processes and devices that `ExactTrainer` does not
    support.
    """
    accelerator = trainer.accelerator
    try:
        check_supported(accelerator)
    except ConfigError as error:
        yield str(error).removesuffix(".")
    is_fsdp = is_sharded(accelerator)
    if is_fsdp and not accelerator.is_fsdp2:
        yield "FSDP1 gathers parameters for one backward only: set fsdp_version to 2"
    if is_fsdp and trainer.label_smoother and _is_causal_lm(trainer.model):
        yield (
            "label_smoothing_factor: FSDP2 renames the class, by which Trainer decides to shift "
            "the labels: use DDP"
        )
    wants_fsdp = trainer.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if wants_fsdp and not is_fsdp:
        yield (
            f"FSDP was requested, but training runs {accelerator.num_processes} process under "
            f"{accelerator.distributed_type.value}, without shards: start several processes, or "
            "omit it"
        )
    if trainer.args.n_gpu > 1:
        yield (
            f"one process would use {trainer.args.n_gpu} GPUs (nn.DataParallel): select one with "
            "CUDA_VISIBLE_DEVICES"
        )
    if trainer.is_model_parallel:
        yield "the model is on several devices (device_map): load it onto one"


def _is_causal_lm(model: nn.Module) -> bool:
    """Return whether the model of an `ExactTrainer` is, or contains, one of transformers' causal
    language models, whose labels Trainer shifts in its loss with label smoothing.
    """
    class_names = {type(module).__name__ for module in model.modules()}
    return bool(class_names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def _problems_of_overrides(trainer: Any, mixin: type) -> Iterator[str]:
    """Yield a message for each class of a trainer, but the mixin, that overrides a method by which
    ExactTrainer controls the order and the batches.
    """
    for name in OWNED_METHODS:
        for owner in type(trainer).__mro__:
            if name in vars(owner) and owner not in (mixin, Trainer):
                yield (
                    f"{owner.__name__}.{name} overrides the order of samples: remove it, or train "
                    f"with {owner.__name__}"
                )


def _problems_of_loss_and_data(trainer: Any) -> Iterator[str]:
    """Yield a message if `whole_batch` comes together with `loss_sums` or TRL's preference pairs,
    which have losses of their own; if the dataset has no fixed order of samples (streaming); and if
    batches join several samples into one row (padding-free).
    """
    if trainer.whole_batch and (trainer.loss_sums or has_pairs(trainer.data_collator)):
        yield (
            "whole_batch is for a loss that compute_loss computes from the outputs of samples: "
            "leave loss_sums out, and do not train on TRL's preference pairs"
        )
    if isinstance(trainer.train_dataset, IterableDataset):
        yield "a streaming train_dataset has no fixed order: load it without streaming"
    if getattr(trainer, "padding_free", False):  # an attribute of TRL's trainers
        yield (
            "padding_free (or packing) joins samples into one row, so masks cannot be tied to "
            "samples: omit it (hf_ga computes no padding by itself, where the model allows)"
        )
