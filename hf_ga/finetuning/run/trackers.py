"""Experiment trackers, through Accelerate."""

import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hf_ga.errors import ConfigError
from hf_ga.finetuning.run.config import FinetuneConfig
from hf_ga.recovery.files import delete


def tracker_names(report_to: str) -> list[str]:
    """List the trackers of the flag `report_to`, for Accelerate's `log_with`.

    Args:
        report_to: Names separated by commas, "all" or "none".

    Raises:
        ConfigError: If a tracker is unknown or not installed (which Accelerate ignores silently).

    >>> tracker_names("none")
    []
    """
    installed = [str(name) for name in get_available_trackers()]
    named = [name.strip() for name in report_to.split(",")]
    names = [name for name in named if name not in ("", "none")]
    missing = [name for name in names if name not in ("all", *installed)]
    if missing:
        known = ", ".join(installed) or "no others"
        raise ConfigError(
            f"report_to {missing[0]} is not an installed tracker of Accelerate: install its "
            f"package, or use none, all, or some of {known}."
        )
    if "all" in names:
        return installed
    return names


def start_trackers(accelerator: Accelerator, config: FinetuneConfig, *, resumed: bool) -> None:
    """Open the trackers with the flags of the run, on the main process. TensorBoard and wandb write
    to `output_dir/trackers`.

    Args:
        accelerator: The accelerator of the run.
        config: The flags of the run.
        resumed: Whether the run goes on from a checkpoint.

    Raises:
        ConfigError: If a tracker cannot start, such as wandb without a login.
    """
    folder = Path(config.output_dir) / "trackers"
    flags = config.to_dict()
    for flag, value in flags.items():
        if not isinstance(value, int | float | str | bool):
            flags[flag] = str(value)
    name = config.run_name or folder.parent.resolve().name
    options = {
        "wandb": {"name": name, "dir": str(folder)},
        "mlflow": {"run_name": name},
        "trackio": {"name": name, "resume": "allow" if resumed else "never"},
    }
    if config.hub_token:
        # wandb records the command line.
        sys.argv[:] = [argument.replace(config.hub_token, "***") for argument in sys.argv]
    # MLflow refuses other parameters of the same run.
    goes_on_in_mlflow = resumed and "MLFLOW_RUN_ID" in os.environ
    # Each library has errors of its own.
    try:
        if accelerator.log_with:
            folder.mkdir(exist_ok=True)
        accelerator.init_trackers(
            config.project, config=None if goes_on_in_mlflow else flags, init_kwargs=options
        )
    except Exception as error:
        if not resumed:
            # The next run may use the output folder.
            delete(folder)
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"report_to {config.report_to} cannot start: {reason} Log in to it, set it up, or "
            "omit report_to."
        ) from error
