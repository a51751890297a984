"""Checks for settings of Trainer that `ExactTrainer` cannot make exact, before any work."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import OptimizerNames

from hf_ga.errors import ConfigError
from hf_ga.exact.backend import SUPPORTED
from hf_ga.exact.precision import check_precision, check_step
from hf_ga.trainer.pairs import has_pairs

# Methods that must be the mixin's: an override elsewhere would use its own order or batches.
OWNED = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")


class WindowSize(TrainerCallback, ExportableState):
    """Saves the samples of a window in each checkpoint's trainer_state.json."""

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size

    def state(self) -> dict[str, Any]:
        """As Trainer saves it."""
        return {"args": {"window_size": self.window_size}, "attributes": {}}

    def check(self, args: Any, resume_from: str | bool | None) -> None:
        """Check that a checkpoint was saved with windows of the same size.

        Args:
            args: The trainer's `TrainingArguments`.
            resume_from: A checkpoint's folder. True: the last one. None or False: none.

        Raises:
            ConfigError: If it was saved with another size, with which the run would visit other
                samples.
        """
        folder = get_last_checkpoint(args.output_dir) if resume_from is True else resume_from
        if not folder:
            return
        saved = _saved_window_size(Path(folder, "trainer_state.json"))
        if saved not in (None, self.window_size):
            raise ConfigError(
                f"{folder} was saved with windows of {saved} samples, but {args.world_size} "
                f"process(es) x per_device_train_batch_size {args.per_device_train_batch_size} x "
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} are "
                f"{self.window_size}: change one of them so that the product is {saved}."
            )


def _saved_window_size(path: Path) -> int | None:
    """Read the window size from a `trainer_state.json`; None if there is none."""
    if not path.exists():
        return None
    callbacks = json.loads(path.read_text()).get("stateful_callbacks", {})
    return callbacks.get("WindowSize", {}).get("args", {}).get("window_size")


def check_trainer(trainer: Any, mixin: type) -> None:
    """Check a trainer and its arguments; all problems in one message.

    Args:
        trainer: A `transformers.Trainer`.
        mixin: The class whose methods may override Trainer's.

    Raises:
        ConfigError: If there is an unsupported argument, an overridden method, FSDP1, processes
            that would train alone, or a precision that Accelerate would not apply.
    """
    problems = [*_of_arguments(trainer.args), *_of_trainer(trainer, mixin)]
    if problems:
        raise ConfigError("ExactTrainer cannot make this run exact: " + "; ".join(problems) + ".")
    check_precision(trainer.accelerator)
    if trainer.optimizer is not None:
        check_step(trainer.optimizer)


def _of_arguments(args: Any) -> Iterator[str]:
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
            "torch_compile wraps the model and hides its dropout sites: omit it, and call "
            "hf_ga.compile_layers(model) before"
        )
    if args.use_liger_kernel:
        yield (
            "use_liger_kernel replaces the loss by an unproven one that computes gradients in the "
            "forward: omit it"
        )
    if args.neftune_noise_alpha:
        yield "neftune_noise_alpha draws noise that cannot be tied to a sample: omit it"
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        yield (
            f"optim={str(args.optim.value)!r} updates inside each backward, before the window is "
            "complete: use another optimizer"
        )


def _of_trainer(trainer: Any, mixin: type) -> Iterator[str]:
    processes = trainer.accelerator.num_processes
    kind = trainer.accelerator.distributed_type
    if kind not in SUPPORTED:
        yield f"Accelerate runs {processes} processes under {kind.value}: use DDP or FSDP2"
    if kind == DistributedType.FSDP and not trainer.accelerator.is_fsdp2:
        yield "FSDP1 wraps the model that was proven: set fsdp_version to 2"
    classes = {type(module).__name__ for module in trainer.model.modules()}
    is_causal = bool(classes & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    if kind == DistributedType.FSDP and trainer.label_smoother and is_causal:
        yield (
            "label_smoothing_factor: FSDP2 renames the class, by which Trainer decides to shift "
            "the labels: use DDP"
        )
    wants_fsdp = trainer.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if wants_fsdp and kind != DistributedType.FSDP:
        yield (
            f"FSDP was requested, but Accelerate shards on GPUs only and runs {processes} under "
            f"{kind.value}: omit it"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1 and launched != processes:
        yield (
            f"{launched} processes were launched, but each would train alone: without a GPU set "
            "use_cpu=True"
        )
    if trainer.args.n_gpu > 1:
        yield (
            f"one process would use {trainer.args.n_gpu} GPUs (nn.DataParallel): select one with "
            "CUDA_VISIBLE_DEVICES"
        )
    if trainer.is_model_parallel:
        yield "the model is on several devices (device_map): load it onto one"
    if trainer.whole_batch and (trainer.loss_sums or has_pairs(trainer.data_collator)):
        yield (
            "whole_batch is for a loss that compute_loss computes from the outputs of samples: "
            "leave loss_sums out, and do not train on pairs of TRL's"
        )
    for name in OWNED:
        for owner in type(trainer).__mro__:
            if name in vars(owner) and owner not in (mixin, Trainer):
                yield (
                    f"{owner.__name__}.{name} overrides the order of samples: remove it, or train "
                    f"with {owner.__name__}"
                )
    if isinstance(trainer.train_dataset, IterableDataset):
        yield "a streaming train_dataset has no fixed order: load it without streaming"
    if getattr(trainer, "padding_free", False):  # TRL
        yield (
            "padding_free (or packing) joins samples into one row, so masks cannot be tied to "
            "samples: omit it"
        )
