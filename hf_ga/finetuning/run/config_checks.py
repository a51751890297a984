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
}
_BELOW |= {"adam_beta1": 1, "adam_beta2": 1}
_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_NAMES |= {list[str]: "a list of strings", list[float]: "a list of numbers"}
_NAMES |= {list[int]: "a list of whole numbers"}


def check_fields(config: Any) -> None:
    """Check the types of a dataclass's fields, which neither Python nor a configuration file
    enforces, and the bounds of numbers.

    Raises:
        ConfigError: a value has the wrong type, is an empty string, out of bounds or not finite.
    """
    for name, hint in get_type_hints(type(config)).items():
        kinds, value = (
            (get_args(hint) if isinstance(hint, UnionType) else (hint,)),
            getattr(config, name),
        )
        if not any(_is_of(value, kind) for kind in kinds):
            expected = " or ".join(_NAMES[kind] for kind in kinds if kind is not NoneType)
            raise ConfigError(
                f"{name} must be {expected}, got {value!r:.80} ({type(value).__name__})."
            )
        if value in ("", []) or (isinstance(value, list) and "" in value):
            raise ConfigError(f"{name} is an empty string or list: give a value, or omit it.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_bounds(name, value, _AT_LEAST.get(name, 1 if int in kinds else 0))


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(part, *get_args(kind)) for part in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check_bounds(name: str, value: float, least: int) -> None:
    if name in _ABOVE_0 and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be greater than 0 and finite, got {value}.")
    if name not in _ABOVE_0 and not least <= value < float("inf"):
        raise ConfigError(
            f"{name} must be at least {least}{' and finite' * isinstance(value, float)}, got "
            f"{value}."
        )
    if value >= _BELOW.get(name, float("inf")):
        raise ConfigError(f"{name} must be below {_BELOW[name]}, got {value}.")
    if isinstance(value, int) and value >= 2**32:
        raise ConfigError(f"{name} must be at most {2**32 - 1}, got {value}.")


def check_one_of(name: str, value: str, known: Iterable[str]) -> None:
    """Raise ConfigError for an unknown value."""
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}: use one of {', '.join(known)}.")


def check_output_dir(
    output_dir: str, *, resume_from: str | None = None, only_adds: bool = False
) -> None:
    """Check that a folder can be written and contains no run to lose.

    Args:
        resume_from: the checkpoint to resume from, or "auto". only_adds: allow any content, as
            files are only added.

    Raises:
        ConfigError: the folder cannot be used.
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
            "auto, delete it, or name another "
            "folder."
        )
    if (
        resume_from != "auto"
        and list_checkpoints(folder)
        and Path(resume_from).resolve().parent != folder.resolve()
    ):
        raise ConfigError(
            f"output_dir {folder} contains checkpoints, but {resume_from} is not one of them: a "
            "run resumed from "
            "elsewhere would mix with them. Resume one of them with --resume_from_checkpoint "
            "auto, or name another folder."
        )
