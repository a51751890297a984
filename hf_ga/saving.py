"""A run to a checkpoint and back."""

from dataclasses import asdict
from pathlib import Path

from hf_ga.adapters import part_to_keep
from hf_ga.checkpoint import (
    SHARDS,
    begin_checkpoint,
    finish_checkpoint,
    load_checkpoint,
    partial_folder,
    save_checkpoint,
)
from hf_ga.errors import CheckpointError
from hf_ga.precision import load_scaler_state, scaler_state
from hf_ga.reduce import is_sharded
from hf_ga.run import Progress, Run
from hf_ga.shards import save_shards


def save(run: Run, progress: Progress) -> None:
    """Write a checkpoint of the run as it stands, at a window boundary: the main process alone or, under FSDP, each its shards."""
    main, step = run.accelerator.is_main_process, progress.step
    state = {
        "progress": asdict(progress),
        "windows": run.windows.state_dict(),
        "scheduler": run.scheduler.state_dict(),
        "scaler": scaler_state(run.accelerator),
        "identity": run.identity,
    }
    if is_sharded(run.accelerator):
        if main:
            begin_checkpoint(run.output_dir, step)
        run.accelerator.wait_for_everyone()
        save_shards(run.model, run.optimizer, partial_folder(run.output_dir, step) / SHARDS)
        run.accelerator.wait_for_everyone()
        if main:
            finish_checkpoint(partial_folder(run.output_dir, step), step, state, run.save_total_limit)
    elif main:
        save_checkpoint(run.output_dir, step, part_to_keep(run.model), run.optimizer, state, keep=run.save_total_limit)
    run.accelerator.wait_for_everyone()


def resume(run: Run, folder: Path) -> Progress:
    """Put a run where a checkpoint left it.

    Raises:
        CheckpointError: the checkpoint is damaged or of a run with other settings.
    """
    sharded = is_sharded(run.accelerator)
    state = load_checkpoint(folder, run.model if sharded else part_to_keep(run.model), run.optimizer, sharded=sharded)
    if missing := {"identity", "windows", "scheduler", "progress"} - state.keys():
        raise CheckpointError(f"{folder / 'state.json'} is not of a run: it lacks {', '.join(sorted(missing))}.")
    saved = state["identity"]
    if changed := [f"{k} {saved.get(k)!r} -> {v!r}" for k, v in run.identity.items() if saved.get(k) != v]:
        raise CheckpointError(f"{folder} is of another run; changed: {', '.join(changed)}. Use the same settings, or start anew.")
    run.windows.load_state_dict(state["windows"])
    run.scheduler.load_state_dict(state["scheduler"])
    load_scaler_state(run.accelerator, state.get("scaler"))
    return Progress(**state["progress"])
