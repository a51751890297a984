"""Experiment trackers (TensorBoard, wandb, MLflow, ...) of a run, through Accelerate."""

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.recovery.files import delete


def tracker_names(report_to: str) -> list[str]:
    """Parse the value of the flag `report_to` into names of trackers, for Accelerate's `log_with`.

    Args:
        report_to: Comma-separated names, "all" for all installed trackers, or "none".

    Returns:
        Names of installed trackers; an empty list for "none".

    Raises:
        ConfigError: If a tracker is unknown or not installed (which Accelerate ignores silently).

    >>> tracker_names("none")
    []
    """
    installed = [str(name) for name in get_available_trackers()]
    names = [name.strip() for name in report_to.split(",")]
    for name in names:
        if name not in ("", "none", "all", *installed):
            raise ConfigError(
                f"report_to {name} is not an installed tracker of Accelerate: install its package, "
                f"or use none, all, or some of {', '.join(installed)}."
            )
    if "all" in names:
        return installed
    return [name for name in names if name in installed]


def start_trackers(accelerator: Accelerator, config: FinetuneConfig, *, resumed: bool) -> None:
    """Start the experiment trackers of a fine-tuning run, which record its flags. TensorBoard and
    wandb write to the folder `output_dir/trackers`.

    Args:
        accelerator: The accelerator of the run, created with the names of the trackers.
        config: The flags of the run.
        resumed: Whether the run resumes from a checkpoint.

    Raises:
        ConfigError: If a tracker cannot start, such as wandb without a login. The folder of a new
            run is then deleted.
    """
    folder = Path(config.output_dir) / "trackers"
    run_name = config.run_name or folder.parent.resolve().name
    tracker_options = {
        "wandb": {"name": run_name, "dir": str(folder)},
        "mlflow": {"run_name": run_name},
        "trackio": {"name": run_name, "resume": "allow" if resumed else "never"},
    }
    # Trackers accept numbers, booleans and strings.
    flags: dict[str, Any] | None = {
        name: value if isinstance(value, int | float | str) else str(value)
        for name, value in config.to_dict().items()
    }
    if resumed and "MLFLOW_RUN_ID" in os.environ:
        # MLflow continues that run, and raises an error if its parameters change.
        flags = None
    # Each tracker raises exceptions of its own library.
    try:
        if accelerator.log_with:
            folder.mkdir(exist_ok=True)
        accelerator.init_trackers(config.project, config=flags, init_kwargs=tracker_options)
    except Exception as error:
        if not resumed:
            # Otherwise the next run would find the output folder not empty, and stop.
            delete(folder)
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"report_to {config.report_to} cannot start: {reason} Log in to it, set it up, or "
            "omit report_to."
        ) from error
