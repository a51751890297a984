"""Checks of the flags of a run before any data is read: types, bounds, and the output folder."""

import os
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hf_ga.errors import ConfigError
from hf_ga.recovery.latest import list_checkpoints
from hf_ga.recovery.lock import is_empty_folder

# Integers are at least 1, numbers at least 0, except these.
_AT_LEAST = {
    "max_length": 2,
    "block_size": 2,
    "dataloader_num_workers": 0,
    "show_samples": 0,
    "shuffle_buffer_size": 0,
    "seed": 0,
}
_ABOVE_0 = (
    "learning_rate",
    "num_train_epochs",
    "validation_split_percentage",
    "mlm_probability",
    "lora_alpha",
    "adam_epsilon",
    "temperature",
)
_BELOW = {
    "label_smoothing_factor": 1,
    "lora_dropout": 1,
    "mlm_probability": 1,
    "validation_split_percentage": 100,
    "adam_beta1": 1,
    "adam_beta2": 1,
}
_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list[str]: "a list of strings",
    list[float]: "a list of numbers",
    list[int]: "a list of whole numbers",
}


def check_fields(config: Any) -> None:
    """Check the types of a dataclass's fields, which neither Python nor a configuration file
    enforces, and the bounds of numbers.

    Args:
        config: An object of a dataclass.

    Raises:
        ConfigError: If a value has the wrong type, is an empty string or list, out of bounds or not
            finite.
    """
    for name, hint in get_type_hints(type(config)).items():
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        value = getattr(config, name)
        if not any(_is_of(value, kind) for kind in kinds):
            expected = " or ".join(_NAMES[kind] for kind in kinds if kind is not NoneType)
            raise ConfigError(
                f"{name} must be {expected}, got {value!r:.80} ({type(value).__name__})."
            )
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise ConfigError(f"{name} is an empty string or list: give a value, or omit it.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            usual_least = 1 if int in kinds else 0
            _check_bounds(name, value, _AT_LEAST.get(name, usual_least))


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value has a type, such as `int` or `list[str]`. A whole number is also a float."""
    if get_origin(kind) is list:
        (kind_of_part,) = get_args(kind)
        return isinstance(value, list) and all(_is_of(part, kind_of_part) for part in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, Integral)
    if kind is float:
        return isinstance(value, Real)
    return isinstance(value, kind)


def _check_bounds(name: str, value: float, least: int) -> None:
    """Raise ConfigError for a number that is out of bounds.

    Args:
        name: The flag, by which the bounds are looked up.
        value: The number.
        least: The smallest number that is allowed, for flags that are not in `_ABOVE_0`.
    """
    if name in _ABOVE_0 and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be greater than 0 and finite, got {value}.")
    if name not in _ABOVE_0 and not least <= value < float("inf"):
        and_finite = " and finite" if isinstance(value, float) else ""
        raise ConfigError(f"{name} must be at least {least}{and_finite}, got {value}.")
    if value >= _BELOW.get(name, float("inf")):
        raise ConfigError(f"{name} must be below {_BELOW[name]}, got {value}.")
    if isinstance(value, int) and value >= 2**32:
        raise ConfigError(f"{name} must be at most {2**32 - 1}, got {value}.")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Check that a flag has one of its known values.

    Args:
        name: The flag.
        value: Its value.
        known: The known values.

    Raises:
        ConfigError: If it has another value.
    """
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}: use one of {', '.join(known)}.")


def check_output_dir(
    output_dir: str, *, resume_from: str | None = None, only_adds: bool = False
) -> None:
    """Check that a folder can be written and contains no run to lose.

    Args:
        output_dir: The folder. It need not exist.
        resume_from: The checkpoint to resume from, or "auto". None: a new run.
        only_adds: Whether to allow any content, because files are only added.

    Raises:
        ConfigError: If the folder cannot be written, contains a run that is not resumed, or other
            checkpoints than the one to resume from.
    """
    folder = Path(output_dir)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
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
