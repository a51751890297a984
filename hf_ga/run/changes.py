"""What changed since a checkpoint, and how a run goes on as another one where that is allowed.

Kept are weights, the optimizer's moments, the number of steps, and how many samples of the epoch were visited. All settings are the
new ones: rates, decay, schedule, order, where the run ends.
"""

from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hf_ga.errors import CheckpointError
from hf_ga.exact.windows import WindowLoader
from hf_ga.run.run import Progress, Run

# Moments belong to one optimizer, and to parameters by their numbers among those that are trained.
NEVER_CHANGED = ("optim", "freeze")
# What validation is measured on, and by what: best values before and after such a change cannot be compared.
MEASURED_BY = {
    "task",
    "dataset_name",
    "dataset_config_name",
    "data",
    "validation_file",
    "validation_split_percentage",
    "max_length",
    "block_size",
    "mlm_probability",
    "metric_for_best_model",
}


def changed_names(saved: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Names of what a run has in another way than its checkpoint."""
    return [name for name, value in identity.items() if saved.get(name) != value]


def check_changes(folder: Path, saved: dict[str, Any], identity: dict[str, Any], allowed: bool) -> list[str]:
    """What changed, with old and new values, one text each.

    Raises:
        CheckpointError: something did, and that is not allowed, or cannot be.
    """
    listed = {name: f"{name} {saved.get(name)!r} -> {identity[name]!r}" for name in changed_names(saved, identity)}
    if listed and not allowed:
        raise CheckpointError(
            f"{folder} is of another run; changed: {', '.join(listed.values())}. Use the same settings, start anew, or go on as "
            "another run with --resume_with_changes."
        )
    if never := [listed[name] for name in NEVER_CHANGED if name in listed]:
        raise CheckpointError(
            f"{folder} cannot go on with {', '.join(never)}, not even with --resume_with_changes: the optimizer's state fits only the "
            "same optimizer and the same trained parameters. Restore these settings, or start a new run with the saved model as "
            "model_name_or_path."
        )
    return list(listed.values())


def own_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Rates, decay and all else that the configuration gives the optimizer: its groups without their parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def apply_changed_settings(run: Run, progress: Progress, changed: list[str], groups: list[dict[str, Any]]) -> None:
    """Give a run whose weights, moments and position were loaded its own settings.

    Args:
        changed: names. groups: what `own_groups` returned before the optimizer's state was loaded.
    """
    if isinstance(run.windows, WindowLoader):  # of a stream, the windows before this pass are not known
        num_windows = len(run.windows)
        progress.num_windows = run.windows.epoch * num_windows + min(run.windows.num_consumed, num_windows)
    if MEASURED_BY & set(changed):
        progress.best_metric, progress.evaluations_since_best = None, 0
    for group, own in zip(run.optimizer.param_groups, groups, strict=True):
        group.update(own)
    position = scheduled_steps(run, progress)
    scheduler: LambdaLR = run.scheduler
    rates = [base * factor(position) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": position, "_step_count": position + 1, "_last_lr": rates})
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def scheduled_steps(run: Run, progress: Progress) -> int:
    """Where a run stands in its schedule. Of `max_steps` it is the steps done; of epochs, the steps that the windows so far would
    have been as they are now, so that the schedule ends with the last epoch.
    """
    return max(0, progress.num_windows - progress.num_skipped) if run.max_steps == run.max_windows else progress.step


def describe(run: Run, progress: Progress, changes: list[str]) -> str:
    """A line on what changed, and where the run goes on."""
    windows = run.windows
    samples = windows.num_consumed * windows.layout.window_size
    if isinstance(windows, WindowLoader):
        samples = min(samples, windows.num_samples)
    return (
        f"goes on as another run after step {progress.step}, in epoch {windows.epoch} behind {samples} of its samples "
        f"(window {windows.num_consumed}); changed: {', '.join(changes)}"
    )
