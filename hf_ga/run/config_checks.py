"""What can be said of the flags of a run before any data is read: values that are none, and flags that do not go together."""

import os
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from hf_ga.data.tasks import TASKS
from hf_ga.errors import ConfigError
from hf_ga.exact.layout import SCALING_RULES
from hf_ga.recovery.latest import list_checkpoints
from hf_ga.recovery.lock import holds_nothing
from hf_ga.recovery.nonfinite import ON_NONFINITE
from hf_ga.run.optimizers import OPTIMIZERS, SCHEDULES

if TYPE_CHECKING:
    from hf_ga.run.config import FinetuneConfig

STREAMED_TASKS = ("causal-lm", "text-classification")
_AT_LEAST = {
    "max_length": 2,
    "max_tokens_per_micro_batch": 1,
    "per_device_eval_batch_size": 1,
    "dataloader_num_workers": 0,
    "shuffle_buffer_size": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "max_steps": 1,
    "max_grad_norm": 0,
    "seed": 0,
    "block_size": 2,
    "label_smoothing": 0,
    "lora_r": 1,
    "lora_dropout": 0,
    "base_batch_size": 1,
    "max_new_tokens": 1,
    "num_beams": 1,
    "early_stopping_patience": 1,
    "eval_steps": 1,
    "save_steps": 1,
    "save_total_limit": 1,
}


def check_config(config: "FinetuneConfig") -> None:
    """Check everything that can be checked without data.

    Raises:
        ConfigError: the first rule that is broken.
    """
    _check_types(config)
    _one_of("task", config.task, TASKS)
    _one_of("optim", config.optim, OPTIMIZERS)
    _one_of("lr_scheduler_type", config.lr_scheduler_type, SCHEDULES)
    _one_of("on_nonfinite", config.on_nonfinite, ON_NONFINITE)
    config.layout(num_processes=1)
    for name, least in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(f"{name} must be at least {least}{' and finite' * isinstance(value, float)}, got {value}.")
    for name in ("learning_rate", "num_train_epochs", "validation_split_percentage", "mlm_probability", "lora_alpha"):
        value = getattr(config, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be greater than 0 and finite, got {value}.")
    if config.validation_split_percentage >= 100:
        raise ConfigError(f"validation_split_percentage must be below 100, got {config.validation_split_percentage}.")
    for name in ("label_smoothing", "lora_dropout", "mlm_probability"):
        if getattr(config, name) >= 1:
            raise ConfigError(f"{name} must be below 1, got {getattr(config, name)}.")
    for name in ("gradient_checkpointing", "padding_free"):
        if config.torch_compile and getattr(config, name):
            raise ConfigError(f"torch_compile and {name} were never tried together: leave one of them out.")
    _check_of_task(config)
    _check_streaming(config)


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list[str]: "a list of texts"}


def _check_types(config: "FinetuneConfig") -> None:
    """Python checks no types, and a parser of flags not those of a configuration that is made in Python."""
    for name, hint in get_type_hints(type(config)).items():
        kinds, value = (get_args(hint) if isinstance(hint, UnionType) else (hint,)), getattr(config, name)
        if not any(_is_of(value, kind) for kind in kinds):
            wanted = " or ".join(_NAMES[kind] for kind in kinds if kind is not NoneType)
            raise ConfigError(f"{name} must be {wanted}, got {value!r:.80} ({type(value).__name__}).")
        if value == "" or (isinstance(value, list) and not all(value)):
            raise ConfigError(f"{name} is an empty text: give a value, or leave it out.")
        if isinstance(value, Integral) and value >= 2**32:
            raise ConfigError(f"{name} must be at most {2**32 - 1}, got {str(value) if value < 10**40 else 'more than 40 digits'}.")


def _is_of(value: Any, kind: Any) -> bool:
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_of_task(config: "FinetuneConfig") -> None:
    """Flags that only some tasks know, and flags that need each other."""
    of_tasks = {
        "block_size": ("causal-lm",),
        "label_smoothing": ("causal-lm", "masked-lm", "text-classification", "token-classification", "seq2seq"),
        "class_weights": ("text-classification", "token-classification"),
        "text_pair_column": (
            *("text-classification", "regression", "multi-label"),
            *("question-answering", "multiple-choice"),
        ),
        "choices_column": ("multiple-choice",),
        "target_column": ("seq2seq",),
        "predict_with_generate": ("seq2seq",),
    }
    for name, tasks in of_tasks.items():
        if getattr(config, name) and config.task not in tasks:
            raise ConfigError(f"{name} is for the task {' or '.join(tasks)}, not {config.task}: leave it out.")
    config.metric_for_best_model = config.metric_for_best_model.removeprefix("eval_")
    _check_metric(config)
    if (config.scale_learning_rate is None) != (config.base_batch_size is None):
        raise ConfigError("scale_learning_rate and base_batch_size need each other: give both, or neither.")
    if config.scale_learning_rate is not None:
        _one_of("scale_learning_rate", config.scale_learning_rate, SCALING_RULES)
        if config.learning_rate is None:
            raise ConfigError("scale_learning_rate needs the learning_rate that was found with base_batch_size.")
    if config.lora_r is None and (config.lora_target_modules or config.lora_alpha or config.lora_dropout):
        raise ConfigError("lora_alpha, lora_dropout and lora_target_modules need lora_r, the rank of the adapters.")
    if config.lora_r is not None and config.freeze:
        raise ConfigError("freeze has no use with lora_r, which freezes all weights but the adapters: leave one of them out.")
    if config.resume_with_changes and config.resume_from_checkpoint is None:
        raise ConfigError("resume_with_changes needs a checkpoint: set resume_from_checkpoint, or leave resume_with_changes out.")
    if config.eval_only and config.resume_from_checkpoint is not None:
        raise ConfigError("eval_only does not resume: name the folder of the model with model_name_or_path.")
    if config.eval_only and config.model_name_or_path is None:
        raise ConfigError("eval_only needs a model: name it with model_name_or_path.")


def _check_metric(config: "FinetuneConfig") -> None:
    metric, task = config.metric_for_best_model, TASKS[config.task]
    _one_of("metric_for_best_model", metric, ("loss", *(task.metrics or ("perplexity",)), *task.generated_metrics))
    if metric in task.generated_metrics and not config.predict_with_generate:
        raise ConfigError(f"metric_for_best_model {metric} compares generated texts: give --predict_with_generate, too.")


def _check_streaming(config: "FinetuneConfig") -> None:
    """What cannot be done with rows that are read once, in order."""
    if not config.streaming:
        return
    refused = {
        f"the task {config.task} (it reads all training rows first)": config.task not in STREAMED_TASKS,
        "block_size": config.block_size,
        "class_weights balanced (it counts all labels)": config.class_weights == "balanced",
        "eval_only": config.eval_only,
        "the embedded corpus stdlib": config.dataset_name == "stdlib",
        f"dataloader_num_workers {config.dataloader_num_workers} (one worker reads ahead)": config.dataloader_num_workers > 1,
    }
    if found := [what for what, is_asked in refused.items() if is_asked]:
        raise ConfigError(f"streaming does not go with {found[0]}: change it, or leave streaming out.")
    if config.max_steps is None:
        raise ConfigError("streaming needs max_steps: nobody knows how many rows a stream has.")


def check_output_dir(config: "FinetuneConfig", *, only_adds: bool = False) -> None:
    """Check that the folder can be written, and that no run in it would be lost.

    Args:
        only_adds: it may hold anything, since only files are added to it.

    Raises:
        ConfigError: it cannot be used.
    """
    folder = Path(config.output_dir)
    if files := [path for path in (folder, *folder.parents) if path.is_file()]:
        raise ConfigError(f"output_dir {folder} cannot be made, as {files[0]} is a file: name a folder.")
    if links := [path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()]:
        raise ConfigError(
            f"output_dir {folder} cannot be made, as {links[0]} is a link to {links[0].readlink()}, which is not there: make "
            "that, or name another folder."
        )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output_dir {folder} cannot be written: {existing} is read-only for this user. Name another folder.")
    used = not holds_nothing(folder)
    if only_adds or config.eval_only:  # which writes files of its own beside a run's
        return
    if used and not config.overwrite_output_dir and config.resume_from_checkpoint is None:
        raise ConfigError(
            f"output_dir {folder} holds another run. Continue it with --resume_from_checkpoint auto, replace it with "
            "--overwrite_output_dir, or name another folder."
        )
    wanted = config.resume_from_checkpoint
    if wanted not in (None, "auto") and list_checkpoints(folder) and Path(wanted).resolve().parent != folder.resolve():
        raise ConfigError(
            f"output_dir {folder} holds checkpoints of its own, and {wanted} is none of them: a run that goes on from elsewhere "
            "would mix with them. Continue them with --resume_from_checkpoint auto, or name another folder."
        )
    if used and config.overwrite_output_dir and not (folder / "metrics.jsonl").exists():
        raise ConfigError(f"overwrite_output_dir would delete {folder}, which no run has made: it has no metrics.jsonl.")
    if config.overwrite_output_dir and config.resume_from_checkpoint is not None:
        raise ConfigError("overwrite_output_dir would delete the checkpoint that resume_from_checkpoint asks for: give one.")


def _one_of(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}: it is one of {', '.join(known)}.")
