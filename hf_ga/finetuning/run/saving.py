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
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.finetuning.run.adapters import is_lora
from hf_ga.finetuning.run.run import Progress, Run
from hf_ga.parallel.processes import broadcast_from_main, print_on_main, raise_on_all_ranks
from hf_ga.recovery.checkpoint import load_checkpoint, read_state, save_checkpoint
from hf_ga.recovery.files import flush, writing
from hf_ga.recovery.versions import machine, versions

# Moments fit one optimizer only, and trained parameters by their index.
_NEVER_CHANGED = ("optim", "freeze")
# Settings that affect the validation metric (`data`: hash of the training rows).
_MEASURED_BY = {
    "data",
    "tokenizer",
    "chat_template",
    "validation",
    "validation_file",
    "validation_split_percentage",
    "max_eval_samples",
    "mlm_probability",
}
_MEASURED_BY |= {"metric_for_best_model"}


def save(run: Run, progress: Progress) -> None:
    """Write a checkpoint of the run, at a window boundary.

    Raises:
        CheckpointError: a failed write, such as a full disk; on all processes. The previous
            checkpoint is kept.
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
    save_checkpoint(
        run.accelerator,
        run.output_dir,
        run.model,
        run.optimizer,
        state,
        step=progress.step,
        keep=run.config.save_total_limit,
        trained_only=is_lora(run.model),  # frozen weights are in the base model
    )


def resume(run: Run, folder: Path) -> Progress:
    """Restore a run from a checkpoint. With `resume_with_changes`, other settings or data are
    printed and recorded in `Progress.changes`.

    Args:
        folder: verified by `find_checkpoint`.

    Raises:
        CheckpointError: the checkpoint does not fit this model, or has other settings.
    """
    state = read_state(folder)
    here, saved = machine() | versions(), state.get("machine", {})
    if changed := [
        f"{name} {value} -> {here.get(name)}"
        for name, value in saved.items()
        if here.get(name) != value
    ]:
        print_on_main(
            run.accelerator, f"resumed on another machine, so bits may differ: {', '.join(changed)}"
        )
    if missing := {"identity", "windows", "scheduler", "progress"} - state.keys():
        raise CheckpointError(
            f"{folder / 'state.json'} is not a checkpoint of a run: it lacks "
            f"{', '.join(sorted(missing))}."
        )
    identity = _comparable(run, state["identity"])
    changes = _changes(folder, state["identity"], identity, run.config.resume_with_changes)
    # The optimizer's settings from the configuration.
    own_groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in run.optimizer.param_groups
    ]
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
    run.max_steps += progress.step - _scheduled_steps(run, progress)  # adds 0 in an unchanged run
    return progress


def forget_other_best(run: Run, progress: Progress, checkpoint: Path) -> None:
    """Reset the best metric if `best/` is missing or from later steps than the checkpoint."""
    best = run.output_dir / "best"
    if not broadcast_from_main(
        run.accelerator, best.exists() and best.stat().st_mtime <= checkpoint.stat().st_mtime
    ):
        progress.best_metric = None


def _comparable(run: Run, saved: dict[str, Any]) -> dict[str, Any]:
    """The run's identity as a checkpoint has it. Earlier versions saved a hash of the tokens of all
    training samples instead of hashes of their rows, tokenizer and template.
    """
    if "tokenizer" in saved:
        absent = {"validation"} - saved.keys()  # in checkpoints of earlier versions
        return {name: value for name, value in run.identity.items() if name not in absent}
    others = {k: v for k, v in run.identity.items() if k not in run.data.identity}
    return others | {"data": run.data.content_hash}


def _changes(
    folder: Path, saved: dict[str, Any], identity: dict[str, Any], allowed: bool
) -> dict[str, str]:
    """{name: `name old -> new`} of settings that differ from the checkpoint's.

    Raises:
        CheckpointError: some changes are not allowed or not possible.
    """
    changes = {
        k: f"{k} {saved.get(k)!r} -> {value!r}"
        for k, value in identity.items()
        if saved.get(k) != value
    }
    if changes and not allowed:
        raise CheckpointError(
            f"{folder} has other settings: {', '.join(changes.values())}. Use the same settings, "
            "start a new run, or resume "
            "with --resume_with_changes."
        )
    if never := [changes[name] for name in _NEVER_CHANGED if name in changes]:
        raise CheckpointError(
            f"{folder} cannot be resumed with {', '.join(never)}, even with "
            "--resume_with_changes: the optimizer's state fits only "
            "the same optimizer and parameters. Start a new run with the saved model as "
            "model_name_or_path."
        )
    return changes


def _apply_changed_settings(
    run: Run, progress: Progress, changes: dict[str, str], own_groups: list[dict[str, Any]]
) -> None:
    """Apply the new settings to a run after loading weights, moments and position.

    Args:
        own_groups: the optimizer's groups before its state was loaded, without parameters.
    """
    if isinstance(run.windows, WindowLoader):  # a stream's earlier windows are unknown
        num_windows = len(run.windows)
        progress.num_windows = run.windows.epoch * num_windows + min(
            run.windows.num_consumed, num_windows
        )
    for group, own in zip(run.optimizer.param_groups, own_groups, strict=True):
        group.update(own)
    position = _scheduled_steps(run, progress)
    run.scheduler.load_state_dict(
        run.scheduler.state_dict() | {"last_epoch": position - 1, "_step_count": position + 1}
    )
    run.scheduler.step()  # sets the learning rates of this position
    progress.changes += changes.values()
    print_on_main(
        run.accelerator,
        f"resumed with changes after step {progress.step}, window {run.windows.num_consumed} of "
        f"epoch {run.windows.epoch}: " + ", ".join(changes.values()),
    )


def _scheduled_steps(run: Run, progress: Progress) -> int:
    """A run's position in its schedule: with `max_steps`, the steps done; with epochs, the number
    of windows so far at the current window size, so that the schedule ends with the last epoch.
    """
    return (
        max(0, progress.num_windows - progress.num_skipped)
        if run.max_steps == run.max_windows
        else progress.step
    )
