"""`Accelerator.resume`: the last complete checkpoint of a loop, and where the loop goes on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ga.accelerator.loader import WindowedDataLoader
from hf_ga.accelerator.state import SavedState
from hf_ga.errors import CheckpointError
from hf_ga.parallel.processes import broadcast_from_main, print_on_main, raise_on_all_ranks

# What libraries raise for a checkpoint whose tensors or objects are not those of this run.
_DOES_NOT_FIT = (RuntimeError, ValueError, LookupError, OSError)


@dataclass(frozen=True)
class Resumed:
    """Where a loop goes on after `Accelerator.resume`.

    Attributes:
        folder: The checkpoint that was loaded; None if the loop starts from the beginning.
        epoch: The epoch (0-based) with which the loop goes on.
        step: The number of optimizer steps that are done.
        step_in_epoch: The number of them in this epoch.
    """

    folder: Path | None = None
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0


def resume(accelerator: Any, folder: Path) -> Resumed:
    """Load the last complete checkpoint in a folder; see `hf_ga.Accelerator.resume`."""
    found = _find_last(folder) if accelerator.is_main_process else None
    found = broadcast_from_main(accelerator, found)
    if found is None:
        return Resumed()
    checkpoint, saved = found
    with raise_on_all_ranks(accelerator):
        if not checkpoint.is_dir():
            raise CheckpointError(
                f"process {accelerator.process_index} does not see {checkpoint}, which the main "
                "process found: use a folder that all machines share."
            )
    with raise_on_all_ranks(accelerator):
        try:
            accelerator.load_state(str(checkpoint))
        except _DOES_NOT_FIT as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{checkpoint} does not fit this run: {reason} Use the folder of this run, or a "
                "new one."
            ) from error
        resumed = _position(accelerator, checkpoint, saved)
    if saved.num_processes != accelerator.num_processes:
        print_on_main(
            accelerator,
            f"{saved.num_processes} -> {accelerator.num_processes} processes: same updates, "
            f"resumed at step {resumed.step}",
        )
    return resumed


def _find_last(folder: Path) -> tuple[Path, SavedState] | None:
    """Find the complete checkpoint with the most steps among the subfolders of a folder."""
    if not folder.is_dir():
        return None
    complete = []
    for checkpoint in folder.iterdir():
        saved = SavedState.read(checkpoint)
        if saved is not None:
            complete.append((saved.num_windows, checkpoint.stat().st_mtime, checkpoint, saved))
    if not complete:
        return None
    _, _, last, saved = max(complete, key=lambda entry: entry[:2])
    return last, saved


def _position(accelerator: Any, checkpoint: Path, saved: SavedState) -> Resumed:
    """Return where the loop goes on, by the first loader that has yielded windows. CheckpointError
    if its samples or windows are not the saved ones.
    """
    pairs = zip(accelerator._dataloaders, saved.loaders, strict=False)
    for loader, position in pairs:
        if position is None or not isinstance(loader, WindowedDataLoader):
            continue
        changed = loader.changed_settings(position)
        if changed:
            raise CheckpointError(
                f"{checkpoint} is of another run: {changed}. Use the same data and "
                "global_batch_size, or another folder."
            )
        epoch = position["epoch"]
        step_in_epoch = position["num_consumed"]
        windows = loader.windows
        if hasattr(windows, "__len__") and step_in_epoch >= len(windows):
            epoch += 1
            step_in_epoch = 0
        return Resumed(checkpoint, epoch, saved.num_windows, step_in_epoch)
    return Resumed(checkpoint, 0, saved.num_windows, 0)
