"""Save a run to a checkpoint and resume it, optionally with other settings
(`--resume_with_changes`).

A changed run keeps weights, the optimizer's moments, the number of steps, and the number of samples
visited in the epoch. Learning rate, decay, schedule, order and end of the run follow the new
settings.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError
from hf_ga.finetuning.run.run import Progress, Run
from hf_ga.parallel.processes import broadcast_from_main, print_on_main, raise_on_all_ranks
from hf_ga.recovery.checkpoint import load_checkpoint, read_state
from hf_ga.recovery.files import flush, writing
from hf_ga.recovery.saving import CheckpointSaver
from hf_ga.recovery.versions import machine, versions

# Settings that the optimizer's state depends on: its moments fit one optimizer only, and belong to
# trained parameters by their index.
_NEVER_CHANGED = ("optim", "freeze")
# Settings that affect the metric of the best model, by the names of the identity (`data`: hash of
# the training rows).
_AFFECTS_METRIC = {
    "data",
    "tokenizer",
    "chat_template",
    "validation",
    "validation_file",
    "validation_split_percentage",
    "max_eval_samples",
    "mlm_probability",
    "metric_for_best_model",
}


def save(run: Run, progress: Progress, saver: CheckpointSaver) -> None:
    """Save a checkpoint of a fine-tuning run, between two windows: model, optimizer, schedule,
    progress, and the settings that must be equal on a resume. All processes must call it.

    Raises:
        CheckpointError: If a write fails, for example because the disk is full; on all processes,
            now or when `saver` waits. The previous checkpoint is kept.
    """
    scaler = run.accelerator.scaler
    state = {
        "progress": asdict(progress),
        "windows": run.windows.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "identity": run.identity,
        "machine": machine() | versions(),
    }
    with raise_on_all_ranks(run.accelerator):
        metrics = run.output_dir / "metrics.jsonl"
        if run.accelerator.is_main_process and metrics.exists():
            with writing(metrics, run.output_dir):
                flush(metrics)  # a checkpoint refers to the lines written before it
    saver.save(run.model, run.optimizer, state, step=progress.step)


def resume(run: Run, folder: Path) -> Progress:
    """Restore a fine-tuning run from a checkpoint (flag `resume_from_checkpoint`). All processes
    must call it.

    With `resume_with_changes`, settings or data that differ from the checkpoint's are printed and
    recorded in `Progress.changes`. If the metric of the best model depends on one of them, the best
    metric so far is forgotten.

    Args:
        run: The run, as it was built from its configuration; updated.
        folder: The checkpoint, verified by `find_checkpoint`.

    Returns:
        How far the run came.

    Raises:
        CheckpointError: If the checkpoint does not fit this model, or has other settings.
    """
    state = read_state(folder)
    changed = ", ".join(_differences(state.get("machine", {}), machine() | versions()).values())
    if changed:
        print_on_main(run.accelerator, f"resumed on another machine, so bits may differ: {changed}")
    missing = {"identity", "windows", "scheduler", "progress"} - state.keys()
    if missing:
        raise CheckpointError(
            f"{folder / 'state.json'} is not a checkpoint of a run: it lacks "
            f"{', '.join(sorted(missing))}."
        )
    changes = _changes(folder, state["identity"], run.identity, run.config.resume_with_changes)
    # Loading the checkpoint overwrites the settings that the optimizer has from the configuration.
    configured_groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in run.optimizer.param_groups
    ]
    load_checkpoint(folder, run.model, run.optimizer, trained_only=run.config.has_adapters)
    run.windows.load_state_dict(state["windows"], allow_changes=bool(changes))
    progress = Progress(**state["progress"])
    if state.get("scaler") and "mixed_precision" not in changes:
        run.accelerator.scaler.load_state_dict(state["scaler"])
    if changes:
        _apply_changed_settings(run, progress, changes, configured_groups)
    else:
        run.scheduler.load_state_dict(state["scheduler"])
    if _AFFECTS_METRIC & changes.keys():
        progress.best_metric = None
        progress.evaluations_since_best = 0
    run.max_steps += progress.step - _scheduled_steps(run, progress)  # adds 0 in an unchanged run
    return progress


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, str]:
    """Return name -> `name old -> new` of the values that differ from those of a checkpoint."""
    return {
        name: f"{name} {saved.get(name)!r} -> {value!r}"
        for name, value in current.items()
        if saved.get(name) != value
    }


def forget_other_best(run: Run, progress: Progress, checkpoint: Path) -> None:
    """Reset the best metric of a run that is resumed if `best/` is missing, or was saved after the
    checkpoint, in steps that are made again. All processes must call it.

    Args:
        run: The run.
        progress: How far it came; updated.
        checkpoint: The checkpoint that it resumes from.
    """
    best = run.output_dir / "best"
    is_valid = best.exists() and best.stat().st_mtime <= checkpoint.stat().st_mtime
    if not broadcast_from_main(run.accelerator, is_valid):
        progress.best_metric = None


def _changes(
    folder: Path, saved: dict[str, Any], identity: dict[str, Any], are_allowed: bool
) -> dict[str, str]:
    """Find the settings of a run that is resumed that differ from its checkpoint's."""
    changes = _differences(saved, identity)
    if changes and not are_allowed:
        raise CheckpointError(
            f"{folder} has other settings: {', '.join(changes.values())}. Use the same settings, "
            "start a new run, or resume with --resume_with_changes."
        )
    impossible = [changes[name] for name in _NEVER_CHANGED if name in changes]
    if impossible:
        raise CheckpointError(
            f"{folder} cannot be resumed with {', '.join(impossible)}, even with "
            "--resume_with_changes: the optimizer's state fits only the same optimizer and "
            "parameters. Start a new run with the saved model as model_name_or_path."
        )
    return changes


def _apply_changed_settings(
    run: Run, progress: Progress, changes: dict[str, str], configured_groups: list[dict[str, Any]]
) -> None:
    """Apply changed settings (flag `resume_with_changes`) to a run whose weights, moments and
    position were loaded from a checkpoint, and print them.
    """
    if run.data.stream is None:  # a stream's earlier windows are unknown
        windows_per_epoch = len(run.windows)
        in_this_epoch = min(run.windows.num_consumed, windows_per_epoch)
        progress.num_windows = run.windows.epoch * windows_per_epoch + in_this_epoch
    for group, configured in zip(run.optimizer.param_groups, configured_groups, strict=True):
        group.update(configured)
    position = _scheduled_steps(run, progress)
    schedule = run.scheduler.state_dict()
    schedule["last_epoch"] = position - 1
    schedule["_step_count"] = position + 1
    run.scheduler.load_state_dict(schedule)
    run.scheduler.step()  # sets the learning rates of this position
    progress.changes += changes.values()
    print_on_main(
        run.accelerator,
        f"resumed with changes after step {progress.step}, window {run.windows.num_consumed} of "
        f"epoch {run.windows.epoch}: {', '.join(changes.values())}",
    )


def _scheduled_steps(run: Run, progress: Progress) -> int:
    """Return the position of a fine-tuning run in its learning rate schedule, in steps."""
    is_in_epochs = run.max_steps == run.max_windows
    if is_in_epochs:
        return max(0, progress.num_windows - progress.num_skipped)
    return progress.step
