"""Experiment trackers, through Accelerate."""

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hf_ga.errors import ConfigError
from hf_ga.run.config import FinetuneConfig


def tracker_names(report_to: str) -> list[str]:
    """The trackers of the flag `report_to`, for Accelerate's `log_with`.

    Raises:
        ConfigError: a tracker is unknown or not installed (which Accelerate ignores silently).

    >>> tracker_names("none")
    []
    """
    installed = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    if missing := [name for name in names if name not in ("all", *installed)]:
        raise ConfigError(
            f"report_to {missing[0]} is not an installed tracker of Accelerate: install its package, or use none, all, or "
            f"some of {', '.join(installed) or 'no others'}."
        )
    return installed if "all" in names else names


def start_trackers(accelerator: Accelerator, config: FinetuneConfig) -> None:
    """Open the trackers with the flags of the run. Their files are in `output_dir/trackers`."""
    plain = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in config.to_dict().items()}
    accelerator.init_trackers("hf_ga", config=plain)
