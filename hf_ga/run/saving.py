"""Save a run to a checkpoint and resume it; with `--resume_with_changes` under other settings.

A changed run keeps weights, the optimizer's moments, the number of steps, and how many samples of the epoch were visited. Learning
rates, decay, schedule, order and the end of the run are those of the new settings.
"""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hf_ga.errors import CheckpointError
from hf_ga.exact.reduce import is_sharded
from hf_ga.exact.windows import WindowLoader
from hf_ga.parallel.processes import broadcast_from_main, print_on_main, raise_on_all_ranks
from hf_ga.parallel.shards import save_shards
from hf_ga.recovery.checkpoint import (
    SHARDS,
    begin_checkpoint,
    finish_checkpoint,
    load_checkpoint,
    partial_folder,
    read_state,
    save_checkpoint,
)
from hf_ga.recovery.files import flush
from hf_ga.recovery.scaler import load_scaler_state, scaler_state
from hf_ga.recovery.write_errors import writing
from hf_ga.run.adapters import part_to_keep
from hf_ga.run.outputs import best_sha256
from hf_ga.run.run import Progress, Run

# Moments belong to one optimizer, and to parameters by their numbers among those that are trained.
_NEVER_CHANGED = ("optim", "freeze")
# What validation is measured on, and by what: best values before and after such a change cannot be compared.
_MEASURED_BY = {
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


def save(run: Run, progress: Progress) -> None:
    """Write a checkpoint of the run as it stands, at a window boundary: the main process alone or, under FSDP, each its shards.

    Raises:
        CheckpointError: the disk is full, or the like; on all processes. The checkpoint before it is kept.
    """
    step = progress.step
    state = {
        "progress": asdict(progress),
        "windows": run.windows.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": scaler_state(run.accelerator),
        "identity": run.identity,
    }
    try:
        if is_sharded(run.accelerator):
            _save_in_shards(run, step, state)
        else:
            with raise_on_all_ranks(run.accelerator):
                if run.accelerator.is_main_process:
                    _flush_metrics(run)
                    save_checkpoint(run.output_dir, step, part_to_keep(run.model), run.optimizer, state, run.save_total_limit)
    except CheckpointError:
        if run.accelerator.is_main_process:
            shutil.rmtree(partial_folder(run.output_dir, step), ignore_errors=True)  # it may be all that fills the disk
        raise


def _save_in_shards(run: Run, step: int, state: dict[str, Any]) -> None:
    main, shards = run.accelerator.is_main_process, partial_folder(run.output_dir, step) / SHARDS
    with raise_on_all_ranks(run.accelerator):
        if main:
            _flush_metrics(run)
            begin_checkpoint(run.output_dir, step)
    with raise_on_all_ranks(run.accelerator), writing(shards, run.output_dir):
        save_shards(run.model, run.optimizer, shards)
    with raise_on_all_ranks(run.accelerator):
        if main:
            finish_checkpoint(run.output_dir, step, state, run.save_total_limit)


def _flush_metrics(run: Run) -> None:
    """A checkpoint relies on the lines that were written before it."""
    if (metrics := run.output_dir / "metrics.jsonl").exists():
        with writing(metrics, run.output_dir):
            flush(metrics)


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
    changes = _check_changes(folder, state["identity"], run.identity, with_changes)
    groups = _own_groups(run.optimizer)
    _load(run, folder, changes)
    run.windows.load_state_dict(state["windows"], allow_changes=bool(changes))
    progress = Progress(**state["progress"])
    changed = _changed_names(state["identity"], run.identity)
    if "mixed_precision" not in changed:
        load_scaler_state(run.accelerator, state.get("scaler"))
    if changes:
        _apply_changed_settings(run, progress, changed, groups)
        print_on_main(run.accelerator, _describe(run, progress, changes))
    else:
        run.scheduler.load_state_dict(state["scheduler"])
    progress.changes += changes
    run.max_steps += progress.step - _scheduled_steps(run, progress)  # 0 in a run that was never changed
    return progress


def forget_other_best(run: Run, progress: Progress) -> None:
    """Where `best/` is not the model that the checkpoint calls the best (it is of a future that was given up, or did not come
    along), the next evaluation chooses anew. A run that goes on as it was chooses the same one.
    """
    found = broadcast_from_main(run.accelerator, best_sha256(run.output_dir) if run.accelerator.is_main_process else None)
    if progress.best_metric is None or found == progress.best_sha256:
        return
    progress.best_metric = None
    print_on_main(run.accelerator, "best/ does not hold this checkpoint's best model: the next evaluation chooses a new one")


def _load(run: Run, folder: Path, changes: list[str]) -> None:
    sharded = is_sharded(run.accelerator)
    model = run.model if sharded else part_to_keep(run.model)
    try:
        load_checkpoint(folder, model, run.optimizer, sharded=sharded, verified=True)
    except CheckpointError as error:
        if not changes:
            raise
        reason = " ".join(str(error.__cause__ or error).split())[:400]
        raise CheckpointError(
            f"{folder} cannot go on with what changed ({', '.join(changes)}), not even with --resume_with_changes: its weights or "
            f"optimizer's state do not fit. {reason} Undo the change, or start a new run."
        ) from error


def _changed_names(saved: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Names of what a run has in another way than its checkpoint."""
    return [name for name, value in identity.items() if saved.get(name) != value]


def _check_changes(folder: Path, saved: dict[str, Any], identity: dict[str, Any], allowed: bool) -> list[str]:
    """What changed, with old and new values, one text each.

    Raises:
        CheckpointError: something did, and that is not allowed, or cannot be.
    """
    listed = {name: f"{name} {saved.get(name)!r} -> {identity[name]!r}" for name in _changed_names(saved, identity)}
    if listed and not allowed:
        raise CheckpointError(
            f"{folder} is of another run; changed: {', '.join(listed.values())}. Use the same settings, start anew, or go on as "
            "another run with --resume_with_changes."
        )
    if never := [listed[name] for name in _NEVER_CHANGED if name in listed]:
        raise CheckpointError(
            f"{folder} cannot go on with {', '.join(never)}, not even with --resume_with_changes: the optimizer's state fits only "
            "the same optimizer and the same trained parameters. Restore these settings, or start a new run with the saved model "
            "as model_name_or_path."
        )
    return list(listed.values())


def _own_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Rates, decay and all else that the configuration gives the optimizer: its groups without their parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _apply_changed_settings(run: Run, progress: Progress, changed: list[str], groups: list[dict[str, Any]]) -> None:
    """Give a run whose weights, moments and position were loaded its own settings.

    Args:
        changed: names. groups: what `_own_groups` returned before the optimizer's state was loaded.
    """
    if isinstance(run.windows, WindowLoader):  # of a stream, the windows before this pass are not known
        num_windows = len(run.windows)
        progress.num_windows = run.windows.epoch * num_windows + min(run.windows.num_consumed, num_windows)
    if _MEASURED_BY & set(changed):
        progress.best_metric, progress.evaluations_since_best = None, 0
    for group, own in zip(run.optimizer.param_groups, groups, strict=True):
        group.update(own)
    position = _scheduled_steps(run, progress)
    scheduler: LambdaLR = run.scheduler
    rates = [base * factor(position) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": position, "_step_count": position + 1, "_last_lr": rates})
    for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _scheduled_steps(run: Run, progress: Progress) -> int:
    """Where a run stands in its schedule. Of `max_steps` it is the steps done; of epochs, the steps that the windows so far would
    have been as they are now, so that the schedule ends with the last epoch.
    """
    return max(0, progress.num_windows - progress.num_skipped) if run.max_steps == run.max_windows else progress.step


def _describe(run: Run, progress: Progress, changes: list[str]) -> str:
    """A line on what changed, and where the run goes on."""
    windows = run.windows
    samples = windows.num_consumed * windows.layout.window_size
    if isinstance(windows, WindowLoader):
        samples = min(samples, windows.num_samples)
    return (
        f"goes on as another run after step {progress.step}, in epoch {windows.epoch} behind {samples} of its samples "
        f"(window {windows.num_consumed}); changed: {', '.join(changes)}"
    )
