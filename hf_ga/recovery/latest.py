"""The checkpoints in the output folder of a run, and which one of them a run resumes from. The file
`latest` names the newest checkpoint; it is written after the checkpoint is complete.
"""

from pathlib import Path

from accelerate import Accelerator

from hf_ga.errors import CheckpointError
from hf_ga.parallel.processes import call_on_main
from hf_ga.recovery.files import discard, restore, write_text
from hf_ga.recovery.manifest import PREFIX, verify

LATEST = "latest"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoints in a run's output folder whose saving was completed, sorted by step,
    oldest first.
    """
    folders = [
        folder
        for folder in output_dir.glob(f"{PREFIX}*")
        if folder.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the optimizer step that is part of the name of a checkpoint's folder.

    >>> step_of(Path("outputs/run/checkpoint-50"))
    50
    """
    return int(folder.name.removeprefix(PREFIX))


def set_latest(checkpoint: Path) -> None:
    """Make a checkpoint the one that `--resume_from_checkpoint auto` resumes from: write its name
    into the file `latest` beside it, in the run's output folder.

    Args:
        checkpoint: The folder of the checkpoint, such as `outputs/run/checkpoint-50`.
    """
    output_dir = checkpoint.parent
    write_text(output_dir / LATEST, f"{checkpoint.name}\n")


def keep_newest(output_dir: Path, step: int, keep: int) -> None:
    """Delete old checkpoints of a run: all but the newest `keep` among those up to `step`.

    Args:
        output_dir: The run's output folder.
        step: Checkpoints of later steps are neither counted nor deleted.
        keep: The number of checkpoints to keep, at least 1.
    """
    checkpoints = [path for path in list_checkpoints(output_dir) if step_of(path) <= step]
    for checkpoint in checkpoints[:-keep]:
        discard(checkpoint)


def newest(output_dir: Path) -> Path | None:
    """Return the checkpoint that `--resume_from_checkpoint auto` tries first, or None if the output
    folder has no checkpoint. Its files are not verified.
    """
    return next(iter(_in_order_of_preference(output_dir)), None)


def find_checkpoint(accelerator: Accelerator, output_dir: Path, name: str) -> Path | None:
    """Find the checkpoint to resume from, and verify that all its files match their SHA-256. The
    main process searches and broadcasts the result, so all processes must call it.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints, in which `auto` searches.
        name: A checkpoint's folder, or `auto`: the one that the file `latest` names or, if it is
            damaged, the newest undamaged one. The main process prints a line for each checkpoint
            that it skips.

    Returns:
        The checkpoint's folder. None if `auto` finds no checkpoint: the run starts from step 0,
        which is printed too.

    Raises:
        CheckpointError: If the folder is damaged or not a checkpoint, or if `output_dir` has only
            damaged checkpoints; on all processes.
    """
    if name == "auto":
        return call_on_main(accelerator, _find_newest_undamaged, output_dir)
    call_on_main(accelerator, verify, Path(name))
    return Path(name)


def _find_newest_undamaged(output_dir: Path) -> Path | None:
    """Return the first checkpoint, in the order of preference, whose files are undamaged. Print a
    line for each damaged one that is skipped. First, restore the names of folders that a crash left
    renamed.

    Returns:
        The checkpoint; None, after printing that the run starts from step 0, if there is none.

    Raises:
        CheckpointError: If all checkpoints are damaged.
    """
    restore(output_dir)
    damage_by_name: dict[str, str] = {}
    for checkpoint in _in_order_of_preference(output_dir):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            damage_by_name[checkpoint.name] = str(error)
            continue
        for skipped, damage in damage_by_name.items():
            print(f"skipped {skipped}, resuming from {checkpoint.name}: {damage}")
        return checkpoint
    if damage_by_name:
        listed = " ".join(damage_by_name.values())
        raise CheckpointError(f"{output_dir} has no undamaged checkpoint to resume from: {listed}")
    print(
        f"resume_from_checkpoint auto: {output_dir} has no checkpoint yet, so the run starts from "
        "step 0"
    )
    return None


def _in_order_of_preference(output_dir: Path) -> list[Path]:
    """List the checkpoints of a run in the order in which to try to resume from them: the one that
    the file `latest` names, then the others from newest to oldest.
    """
    latest_file = output_dir / LATEST
    latest_name = None
    if latest_file.is_file():
        latest_name = latest_file.read_text(encoding="utf-8", errors="replace").strip()

    # The one that the file `latest` names is the largest; of the others, later steps are larger.
    return sorted(
        list_checkpoints(output_dir),
        key=lambda checkpoint: (checkpoint.name == latest_name, step_of(checkpoint)),
        reverse=True,
    )
