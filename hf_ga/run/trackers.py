"""Experiment trackers, as Accelerate knows them."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from hf_ga.errors import ConfigError


def tracker_names(report_to: str) -> list[str]:
    """The trackers that the flag `report_to` names.

    Raises:
        ConfigError: an unknown tracker, or one whose package is not installed.

    >>> tracker_names("none")
    []
    """
    installed = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    if names == ["all"]:
        return installed
    known = sorted(str(name) for name in LOGGER_TYPE_TO_CLASS)
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"report_to knows no {unknown[0]!r}: it is none, all, or some of {', '.join(known)}.")
    if missing := [name for name in names if name not in installed]:
        raise ConfigError(f"report_to {missing[0]} needs its package, which is not installed: pip install {missing[0]}.")
    return names


def start_trackers(accelerator: Accelerator, settings: dict[str, Any], output_dir: Path) -> None:
    """Open them, with the settings of the run; Accelerate does so on the main process only. Files lie in `output_dir/trackers`."""
    if accelerator.log_with:
        if accelerator.is_main_process:
            (output_dir / "trackers").mkdir(parents=True, exist_ok=True)
        plain = {name: value if isinstance(value, int | float | str | bool) else str(value) for name, value in settings.items()}
        accelerator.init_trackers("hf_ga", config=plain)
