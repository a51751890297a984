"""A run to a checkpoint and back."""

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_ga.errors import CheckpointError
from hf_ga.exact.precision import load_scaler_state, scaler_state
from hf_ga.exact.reduce import is_sharded
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
from hf_ga.recovery.write_errors import writing
from hf_ga.run.adapters import part_to_keep
from hf_ga.run.changes import apply_changed_settings, changed_names, check_changes, describe, own_groups, scheduled_steps
from hf_ga.run.outputs import best_sha256
from hf_ga.run.run import Progress, Run


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
    changes = check_changes(folder, state["identity"], run.identity, with_changes)
    groups = own_groups(run.optimizer)
    _load(run, folder, changes)
    run.windows.load_state_dict(state["windows"], allow_changes=bool(changes))
    progress = Progress(**state["progress"])
    changed = changed_names(state["identity"], run.identity)
    if "mixed_precision" not in changed:
        load_scaler_state(run.accelerator, state.get("scaler"))
    if changes:
        apply_changed_settings(run, progress, changed, groups)
        print_on_main(run.accelerator, describe(run, progress, changes))
    else:
        run.scheduler.load_state_dict(state["scheduler"])
    progress.changes += changes
    run.max_steps += progress.step - scheduled_steps(run, progress)  # 0 in a run that was never changed
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
