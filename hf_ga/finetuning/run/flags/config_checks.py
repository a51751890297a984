"""Checks of the flags of a run before any data is read: types, bounds, and the output folder."""

import os
from collections.abc import Iterable
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hf_ga.errors import ConfigError
from hf_ga.recovery.latest import list_checkpoints
from hf_ga.recovery.lock import is_empty_folder

# Smallest allowed values of flags that differ from the usual ones: 1 for an int, 0 for a float.
_MINIMUM = {
    "max_length": 2,
    "block_size": 2,
    "dataloader_num_workers": 0,
    "show_samples": 0,
    "shuffle_buffer_size": 0,
    "seed": 0,
}
# Flags that must be greater than 0.
_POSITIVE = (
    "learning_rate",
    "num_train_epochs",
    "validation_split_percentage",
    "mlm_probability",
    "lora_alpha",
    "adam_epsilon",
    "temperature",
    "class_weights",
)
# Flags that must be below a value.
_UPPER_BOUND = {
    "label_smoothing_factor": 1,
    "lora_dropout": 1,
    "mlm_probability": 1,
    "validation_split_percentage": 100,
    "adam_beta1": 1,
    "adam_beta2": 1,
}
# How an error message describes a type.
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list[str]: "a list of strings",
    list[float]: "a list of numbers",
    list[int]: "a list of whole numbers",
}


def check_fields(config: Any) -> None:
    """Check the value of each flag of a fine-tuning run, a field of a dataclass, against its type
    hint, which neither Python nor a configuration file enforces, and check the bounds of numbers.

    Args:
        config: The dataclass instance, such as a `FinetuneConfig`.

    Raises:
        ConfigError: If a value has the wrong type, is an empty string or list or a list with an
            empty string, is out of bounds, or is not finite.
    """
    for name, type_hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        allowed_types = get_args(type_hint) if isinstance(type_hint, UnionType) else (type_hint,)
        if not any(_has_type(value, allowed) for allowed in allowed_types):
            expected = " or ".join(
                _TYPE_NAMES[allowed] for allowed in allowed_types if allowed is not NoneType
            )
            raise ConfigError(
                f"{name} must be {expected}, got {value!r:.80} ({type(value).__name__})."
            )
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise ConfigError(f"{name} is an empty string or list: give a value, or omit it.")
        is_whole = not {int, list[int]}.isdisjoint(allowed_types)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_bounds(name, number, is_whole)


def _has_type(value: Any, expected: Any) -> bool:
    """Whether the value of a flag has the expected type, such as `int` or `list[str]`. An int is
    also accepted as a float, but a bool is not accepted as an int.
    """
    if get_origin(expected) is list:
        (item_type,) = get_args(expected)
        return isinstance(value, list) and all(_has_type(item, item_type) for item in value)
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, int | float if expected is float else expected)


def _check_bounds(name: str, value: float, is_whole: bool) -> None:
    """Raise ConfigError if the value of a numeric flag is out of bounds or not finite. That of one
    that must be whole is below 2^32.
    """
    minimum = _MINIMUM.get(name, int(is_whole))
    if name in _POSITIVE:
        if not 0 < value < inf:
            raise ConfigError(f"{name} must be greater than 0 and finite, got {value}.")
    elif not minimum <= value < inf:
        and_finite = " and finite" if isinstance(value, float) else ""
        raise ConfigError(f"{name} must be at least {minimum}{and_finite}, got {value}.")
    if value >= _UPPER_BOUND.get(name, inf):
        raise ConfigError(f"{name} must be below {_UPPER_BOUND[name]}, got {value}.")
    if is_whole and value >= 2**32:
        raise ConfigError(f"{name} must be at most {2**32 - 1}, got {value}.")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Check that the value of a flag of a fine-tuning run is among the supported ones.

    Args:
        name: The name of the flag.
        value: The value.
        known: The supported values, which the error lists.

    Raises:
        ConfigError: If the value is not supported.
    """
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}: use one of {', '.join(map(str, known))}.")


def check_output_dir(
    output_dir: str, *, resume_from: str | None = None, only_adds: bool = False
) -> None:
    """Check that the flag `output_dir` of a fine-tuning run is a folder that can be written and
    that contains no other run, whose files would be overwritten.

    Args:
        output_dir: The folder. It need not exist.
        resume_from: The folder of the checkpoint to resume from, or "auto" for the newest one in
            `output_dir`. None: a new run.
        only_adds: Whether the command only adds files, so that the folder may have any content.

    Raises:
        ConfigError: If the folder cannot be written, contains a run that is not resumed, or
            contains checkpoints while the one to resume from is in another folder.
    """
    folder = Path(output_dir)
    folder_and_parents = (folder, *folder.parents)
    existing = next(path for path in folder_and_parents if path.exists())
    if existing.is_file():
        raise ConfigError(
            f"output_dir {folder} cannot be created: {existing} is a file. Name a folder."
        )
    if not os.access(existing, os.W_OK):
        raise ConfigError(
            f"output_dir {folder} cannot be written: {existing} is read-only for this user. Name "
            "another folder."
        )
    if only_adds or is_empty_folder(folder):
        return
    if resume_from is None:
        raise ConfigError(
            f"output_dir {folder} contains another run. Continue it with --resume_from_checkpoint "
            "auto, delete it, or name another folder."
        )
    if resume_from == "auto":
        return
    is_elsewhere = Path(resume_from).resolve().parent != folder.resolve()
    if is_elsewhere and list_checkpoints(folder):
        raise ConfigError(
            f"output_dir {folder} contains checkpoints, but {resume_from} is not one of them: a "
            "run resumed from elsewhere would mix with them. Resume one of them with "
            "--resume_from_checkpoint auto, or name another folder."
        )
