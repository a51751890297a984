"""Which checkpoints a folder has, and which one a run resumes from. The file `latest`, written
last, names the newest.
"""

from pathlib import Path

from accelerate import Accelerator

from hf_ga.errors import CheckpointError
from hf_ga.parallel.processes import broadcast_from_main, raise_on_all_ranks
from hf_ga.recovery.files import discard, restore, write_text
from hf_ga.recovery.manifest import PREFIX, verify

LATEST = "latest"


def list_checkpoints(output_dir: Path) -> list[Path]:
    """List the complete checkpoints, oldest step first."""
    folders = [
        folder
        for folder in output_dir.glob(f"{PREFIX}*")
        if folder.name.removeprefix(PREFIX).isdigit()
    ]
    return sorted(folders, key=step_of)


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint's name."""
    return int(folder.name.removeprefix(PREFIX))


def set_latest(folder: Path) -> None:
    """Write a checkpoint's name into `latest`, in the same folder."""
    write_text(folder.parent / LATEST, f"{folder.name}\n")


def keep_newest(output_dir: Path, step: int, keep: int) -> None:
    """Delete checkpoints up to `step`, except the newest `keep`."""
    folders = [folder for folder in list_checkpoints(output_dir) if step_of(folder) <= step]
    for old in folders[:-keep]:
        discard(old)


def newest(output_dir: Path) -> Path | None:
    """Return the checkpoint that `auto` tries first, or None if there is no checkpoint."""
    folders = _by_preference(output_dir)
    return folders[0] if folders else None


def find_checkpoint(accelerator: Accelerator, output_dir: Path, name: str) -> Path | None:
    """Find a checkpoint whose files all match their SHA-256. The main process searches and
    broadcasts the result, so all processes must call it.

    Args:
        accelerator: The accelerator of the run.
        output_dir: The folder of the run's checkpoints, in which `auto` searches.
        name: A checkpoint's folder, or `auto`: the one that `latest` names or, if it is damaged,
            the newest complete one. The main process prints a line for each skipped checkpoint.

    Returns:
        The checkpoint's folder. None if `auto` finds no checkpoint: the run starts from step 0,
        which is printed too.

    Raises:
        CheckpointError: If the folder is damaged or not a checkpoint, or if `output_dir` has
            damaged ones only; on all processes.
    """
    found = None
    with raise_on_all_ranks(accelerator):
        if accelerator.is_main_process and name == "auto":
            found = _find_newest(output_dir)
        elif accelerator.is_main_process:
            found = Path(name)
            verify(found)
    return broadcast_from_main(accelerator, found)


def _find_newest(output_dir: Path) -> Path | None:
    """Find the newest undamaged checkpoint, and print which damaged ones are skipped."""
    restore(output_dir)
    damages: dict[str, str] = {}
    for folder in _by_preference(output_dir):
        try:
            verify(folder)
        except CheckpointError as error:
            damages[folder.name] = str(error)
            continue
        for passed, damage in damages.items():
            print(f"skipped {passed}, resuming from {folder.name}: {damage}")
        return folder
    if damages:
        listed = " ".join(damages.values())
        raise CheckpointError(f"{output_dir} has no undamaged checkpoint to resume from: {listed}")
    print(
        f"resume_from_checkpoint auto: {output_dir} has no checkpoint yet, so the run starts from "
        "step 0"
    )
    return None


def _by_preference(output_dir: Path) -> list[Path]:
    """List the checkpoint that `latest` names, then the others from newest to oldest."""
    latest = output_dir / LATEST
    named = None
    if latest.is_file():
        named = latest.read_text(encoding="utf-8", errors="replace").strip()

    def preference(folder: Path) -> tuple[bool, int]:
        return folder.name == named, step_of(folder)

    return sorted(list_checkpoints(output_dir), key=preference, reverse=True)
