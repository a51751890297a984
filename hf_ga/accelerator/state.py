"""Saves what a checkpoint of `save_state` needs besides Accelerate's own files, so that a run can
resume on any number of processes with any batch size.
"""

import copy
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
from accelerate.scheduler import AcceleratedScheduler

from hf_ga.accelerator.loader import WindowedDataLoader
from hf_ga.errors import CheckpointError, ConfigError
from hf_ga.parallel.fsdp import is_sharded
from hf_ga.recovery.files import flush_tree, write_json

STATE_FILE_NAME = "hf_ga_state.json"
EARLIER_FILE_NAME = "hf_ga_state.earlier.json"  # while a checkpoint is written over another one


@dataclass(frozen=True)
class SavedState:
    """The content of a checkpoint's `hf_ga_state.json`.

    Attributes:
        num_processes: The number of processes of the run that saved the checkpoint, which is how
            often Accelerate steps a prepared scheduler per update.
        loaders: The position of each prepared loader that yielded windows; None for the others.
        num_windows: The number of windows that the run began: the first ones are rehearsed.
        num_updates_by_hand: The number of optimizer steps of a loop that accumulates by hand.
    """

    num_processes: int
    loaders: list[dict[str, Any] | None]
    num_windows: int = 0
    num_updates_by_hand: int = 0

    def write(self, folder: Path) -> None:
        """Write this state to `hf_ga_state.json` in the folder of a checkpoint of
        `accelerator.save_state`, after everything else in it is on the disk: the file says that
        the checkpoint is complete.

        Only the main process may call it.
        """
        flush_tree(folder)
        write_json(folder / STATE_FILE_NAME, asdict(self))
        (folder / EARLIER_FILE_NAME).unlink(missing_ok=True)

    @staticmethod
    def read(folder: Path) -> "SavedState | None":
        """Read the state from `hf_ga_state.json` in a checkpoint's folder, for
        `accelerator.load_state`.

        Returns:
            The state, or None if the checkpoint was saved without hf_ga.

        Raises:
            CheckpointError: If the file is damaged.
        """
        path = folder / STATE_FILE_NAME
        if not path.exists():
            return None
        try:
            return SavedState(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): load an earlier checkpoint."
            ) from error


class InitialSchedulerState:
    """The state of a prepared learning rate scheduler before training, from which it can be stepped
    again after a resume on another number of processes.

    Accelerate steps a prepared scheduler once per process in each update, and scripts build their
    schedules for that. So after a resume on another number of processes, the scheduler must be
    where the same number of updates on this number of processes would have brought it.

    Args:
        prepared: The prepared scheduler, before its first step.
    """

    def __init__(self, prepared: AcceleratedScheduler) -> None:
        """Copy the state of a scheduler that `accelerator.prepare` returns, and its optimizer's
        learning rates.
        """
        self.prepared = prepared
        scheduler = prepared.scheduler
        self.state_dict = copy.deepcopy(scheduler.state_dict())
        self.learning_rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def convert(self, saved_num_processes: int, num_processes: int) -> None:
        """Convert a prepared learning rate scheduler that `accelerator.load_state` restored to
        another number of processes, at the same update.

        Does nothing for a scheduler that steps once per update on any number of processes.

        Args:
            saved_num_processes: The number of processes of the run that saved the checkpoint.
            num_processes: The number of processes of this run.
        """
        prepared = self.prepared
        if prepared.split_batches or not prepared.step_with_optimizer:
            return
        num_updates = prepared.scheduler.last_epoch // saved_num_processes
        self.step_from_start(num_updates * num_processes)

    def step_from_start(self, num_steps: int) -> None:
        """Reset the prepared learning rate scheduler and the optimizer's learning rates to their
        initial state, and step the scheduler `num_steps` times.
        """
        scheduler = self.prepared.scheduler
        scheduler.load_state_dict(copy.deepcopy(self.state_dict))
        param_groups = scheduler.optimizer.param_groups
        for group, learning_rate in zip(param_groups, self.learning_rates, strict=True):
            group["lr"] = learning_rate
        with warnings.catch_warnings():
            # torch warns of scheduler steps without optimizer steps, which were made before.
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                scheduler.step()


def check_can_save(accelerator: accelerate.Accelerator, *, has_updated: bool) -> None:
    """Check, in `save_state`, that a run can resume from a checkpoint that is saved now.

    Args:
        accelerator: The accelerator of the loop.
        has_updated: Whether the optimizer has stepped on all gradients of the current window.

    Raises:
        ConfigError: If gradients of the window would be lost, or if saving would crash the process
            (FSDP1 on a CPU).
    """
    if not has_updated:
        raise ConfigError(
            "save_state before the optimizer's step of a window would lose its gradients: save "
            "after optimizer.step(), when accelerator.sync_gradients is true."
        )
    is_fsdp1 = is_sharded(accelerator) and not accelerator.is_fsdp2
    if is_fsdp1 and accelerator.device.type == "cpu":
        raise ConfigError(
            "save_state: FSDP1 on CPU processes frees the weights that torch gathers for the "
            "checkpoint, and the process would crash. On a CPU use FSDP2 or DDP."
        )


def begin_to_write(folder: Path) -> None:
    """Let an earlier checkpoint in a folder be incomplete from now on: it is written again."""
    path = folder / STATE_FILE_NAME
    if path.exists():
        path.replace(folder / EARLIER_FILE_NAME)


def check_was_written(folder: Path) -> None:
    """Check, in `load_state`, that a checkpoint was not left in the middle of `begin_to_write`."""
    is_complete = (folder / STATE_FILE_NAME).exists()
    if not is_complete and (folder / EARLIER_FILE_NAME).exists():
        raise CheckpointError(
            f"{folder}: save_state was stopped while it wrote over an earlier checkpoint, so its "
            "files may be of two steps: load another one, and give each a folder of its own."
        )


def loader_positions(loaders: Iterable[Any]) -> list[dict[str, Any] | None]:
    """Return the position in its epoch of each prepared loader, for a checkpoint of
    `accelerator.save_state`.

    None for loaders that yielded no windows, such as those of an evaluation.
    """
    return [
        loader.position_state()
        if isinstance(loader, WindowedDataLoader) and loader.has_yielded_windows
        else None
        for loader in loaders
    ]


def restore_positions(loaders: list[Any], positions: list[dict[str, Any] | None]) -> None:
    """Let prepared loaders continue at the positions of a checkpoint, for `accelerator.load_state`.

    Args:
        loaders: The prepared loaders, in the order in which the saved run prepared them.
        positions: The saved positions; a loader whose position is None is not changed.
    """
    for loader, position in zip(loaders, positions, strict=False):
        if position is not None and isinstance(loader, WindowedDataLoader):
            loader.restore_position(position)


def check_has_loaders(loaders: list[Any], positions: list[dict[str, Any] | None]) -> None:
    """Check, in `load_state` of a run that trains, that each position of a checkpoint has a loader.

    Args:
        loaders: The prepared loaders.
        positions: The saved positions, as in `restore_positions`.

    Raises:
        CheckpointError: If one has none: the run would begin its data again.
    """
    if any(position is not None for position in positions[len(loaders) :]):
        raise CheckpointError(
            f"the checkpoint has positions in {len(positions)} prepared loaders, but this run had "
            f"prepared {len(loaders)}, and would see other samples: prepare each loader before "
            "load_state, and once, not again for each epoch."
        )


def folder_to_load(input_dir: str | None, project_dir: str | None) -> Path:
    """Return the folder of the checkpoint that `accelerator.load_state` loads.

    Args:
        input_dir: The folder that the script passed to `load_state`, or None for the newest
            checkpoint in `project_dir`, as Accelerate does.
        project_dir: The accelerator's project folder; its checkpoints are named
            `checkpoints/checkpoint_0`, `checkpoint_1`, ...
    """
    if input_dir is not None:
        return Path(input_dir).expanduser()
    checkpoints = Path(project_dir, "checkpoints")
    return max(checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
