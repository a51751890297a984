"""Save a run to a checkpoint and resume it; with `--resume_with_changes` under other settings.

A changed run keeps weights, the optimizer's moments, the number of steps, and how many samples of the epoch were visited. Learning
rates, decay, schedule, order and the end of the run are those of the new settings.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.parallel.prepare import full_state_dict
from hf_ga.parallel.processes import broadcast_from_main, print_on_main, raise_on_all_ranks
from hf_ga.recovery.checkpoint import load_checkpoint, read_state, save_checkpoint
from hf_ga.recovery.files import flush
from hf_ga.recovery.write_errors import writing
from hf_ga.run import outputs
from hf_ga.run.adapters import is_lora
from hf_ga.run.run import Progress, Run

# Moments belong to one optimizer, and to parameters by their numbers among those that are trained.
_NEVER_CHANGED = ("optim", "freeze")
# What validation is measured on (`data`: the training samples, with all that shapes samples), and by what.
_MEASURED_BY = {"data", "validation_file", "validation_split_percentage", "mlm_probability", "metric_for_best_model"}


def save(run: Run, progress: Progress) -> None:
    """Write a checkpoint of the run as it stands, at a window boundary.

    Raises:
        CheckpointError: the disk is full, or the like; on all processes. The checkpoint before it is kept.
    """
    scaler = run.accelerator.scaler
    state = {
        "progress": asdict(progress),
        "windows": run.windows.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "identity": run.identity,
    }
    with raise_on_all_ranks(run.accelerator):
        metrics = run.output_dir / "metrics.jsonl"
        if run.accelerator.is_main_process and metrics.exists():
            with writing(metrics, run.output_dir):
                flush(metrics)  # a checkpoint relies on the lines that were written before it
    save_checkpoint(
        run.accelerator,
        run.output_dir,
        run.model,
        run.optimizer,
        state,
        step=progress.step,
        keep=run.config.save_total_limit,
        trained_only=is_lora(run.model),  # the rest is in the base model
    )


def save_best(run: Run) -> None:
    """Write the model as it stands to `best/`.

    Raises:
        CheckpointError: the disk is full, or the like; on all processes. What was there before is kept.
    """
    weights = full_state_dict(run.accelerator, run.model) if is_sharded(run.accelerator) else None  # all give their shards
    with raise_on_all_ranks(run.accelerator):
        if run.accelerator.is_main_process:
            outputs.save_best(run.output_dir / "best", run.model, run.data, run.dtype, weights)


def resume(run: Run, folder: Path, *, with_changes: bool = False) -> Progress:
    """Put a run where a checkpoint left it.

    Args:
        folder: verified, as `find_checkpoint` does.
        with_changes: go on with other settings or data, as another run; what changed is printed, and kept in `Progress.changes`.

    Raises:
        CheckpointError: the checkpoint does not fit this model, or is of a run with other settings.
    """
    state = read_state(folder)
    if missing := {"identity", "windows", "scheduler", "progress"} - state.keys():
        raise CheckpointError(f"{folder / 'state.json'} is not of a run: it lacks {', '.join(sorted(missing))}.")
    changes = _changes(folder, state["identity"], run.identity, with_changes)
    # Rates, decay and all else that the configuration gives the optimizer.
    own_groups = [{name: value for name, value in group.items() if name != "params"} for group in run.optimizer.param_groups]
    load_checkpoint(folder, run.model, run.optimizer, trained_only=is_lora(run.model))
    run.windows.load_state_dict(state["windows"], allow_changes=bool(changes))
    progress = Progress(**state["progress"])
    if state.get("scaler") and "mixed_precision" not in changes:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    if changes:
        _apply_changed_settings(run, progress, changes, own_groups)
    else:
        run.scheduler.load_state_dict(state["scheduler"])
    if _MEASURED_BY & changes.keys():
        progress.best_metric, progress.evaluations_since_best = None, 0
    run.max_steps += progress.step - _scheduled_steps(run, progress)  # 0 in a run that was never changed
    return progress


def forget_other_best(run: Run, progress: Progress, checkpoint: Path) -> None:
    """Let the next evaluation choose the best model anew where `best/` is missing, or of later steps than the checkpoint."""
    best = run.output_dir / "best"
    if not broadcast_from_main(run.accelerator, best.exists() and best.stat().st_mtime <= checkpoint.stat().st_mtime):
        progress.best_metric = None


def _changes(folder: Path, saved: dict[str, Any], identity: dict[str, Any], allowed: bool) -> dict[str, str]:
    """{name: `name old -> new`} of what a run has in another way than its checkpoint.

    Raises:
        CheckpointError: there are changes that are not allowed, or cannot be.
    """
    changes = {k: f"{k} {saved.get(k)!r} -> {value!r}" for k, value in identity.items() if saved.get(k) != value}
    if changes and not allowed:
        raise CheckpointError(
            f"{folder} is of another run; changed: {', '.join(changes.values())}. Use the same settings, start anew, or go on as "
            "another run with --resume_with_changes."
        )
    if never := [changes[name] for name in _NEVER_CHANGED if name in changes]:
        raise CheckpointError(
            f"{folder} cannot go on with {', '.join(never)}, not even with --resume_with_changes: the optimizer's state fits only "
            "the same optimizer and parameters. Start a new run with the saved model as model_name_or_path."
        )
    return changes


def _apply_changed_settings(run: Run, progress: Progress, changes: dict[str, str], own_groups: list[dict[str, Any]]) -> None:
    """Give a run whose weights, moments and position were loaded its own settings.

    Args:
        own_groups: the optimizer's groups before its state was loaded, without parameters.
    """
    if isinstance(run.windows, WindowLoader):  # of a stream, the windows before this pass are not known
        num_windows = len(run.windows)
        progress.num_windows = run.windows.epoch * num_windows + min(run.windows.num_consumed, num_windows)
    for group, own in zip(run.optimizer.param_groups, own_groups, strict=True):
        group.update(own)
    position = _scheduled_steps(run, progress)
    run.scheduler.load_state_dict(run.scheduler.state_dict() | {"last_epoch": position - 1, "_step_count": position + 1})
    run.scheduler.step()  # sets the rates of this position
    progress.changes += changes.values()
    print_on_main(
        run.accelerator,
        f"resumed with changes after step {progress.step}, window {run.windows.num_consumed} of epoch {run.windows.epoch}: "
        + ", ".join(changes.values()),
    )


def _scheduled_steps(run: Run, progress: Progress) -> int:
    """Where a run stands in its schedule. Of `max_steps` it is the steps done; of epochs, the steps that the windows so far would
    have been as they are now, so that the schedule ends with the last epoch.
    """
    return max(0, progress.num_windows - progress.num_skipped) if run.max_steps == run.max_windows else progress.step
