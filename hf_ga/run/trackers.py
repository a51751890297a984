"""Experiment trackers, through Accelerate."""

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hf_ga.errors import ConfigError
from hf_ga.run.config import FinetuneConfig


def tracker_names(report_to: str) -> list[str]:
    """What the flag `report_to` names, for Accelerate's `log_with`.

    Raises:
        ConfigError: a tracker that is unknown or not installed: Accelerate leaves out the latter silently.

    >>> tracker_names("none")
    []
    """
    installed = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    names = [name.strip() for name in report_to.split(",") if name.strip() not in ("", "none")]
    if missing := [name for name in names if name not in ("all", *installed)]:
        raise ConfigError(
            f"report_to {missing[0]} is no tracker of Accelerate that is installed: install its package, or use none, all, or "
            f"some of {', '.join(installed) or 'no others'}."
        )
    return installed if "all" in names else names


def start_trackers(accelerator: Accelerator, config: FinetuneConfig) -> None:
    """Open the trackers with the flags of the run. Their files lie in `output_dir/trackers`."""
    plain = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in config.to_dict().items()}
    accelerator.init_trackers("hf_ga", config=plain)
