"""What `save_state` keeps beside Accelerate's own files, so that a run can resume in any layout."""

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

FILE = "hf_ga_state.json"


@dataclass(frozen=True)
class SavedState:
    """The content of `hf_ga_state.json`.

    Attributes:
        num_processes: Of the run that saved. A prepared scheduler steps so often per update.
        loaders: The position of each prepared loader that handed out windows; None for others.
        passes_own_loss: The loop passes the model's own loss. A resumed run then uses packing from
            its first window on, as the run that was not stopped.
    """

    num_processes: int
    loaders: list[dict[str, Any] | None]
    passes_own_loss: bool = False

    def write(self, folder: Path) -> None:
        """Write the file; for the main process."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(folder: Path) -> "SavedState | None":
        """Read the file of a folder.

        Returns:
            None if the folder was saved without hf_ga.

        Raises:
            CheckpointError: If the file is damaged.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            return SavedState(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}): load an earlier checkpoint."
            ) from error


class ScheduleStart:
    """A prepared scheduler as it was before training, to step it again on other processes.

    Accelerate steps a prepared scheduler once per process and update, and the scripts build their
    schedules for that. So after a resume on another number of processes, the schedule is where it
    would be after as many updates there.

    Args:
        prepared: The prepared scheduler, before its first step.
    """

    def __init__(self, prepared: AcceleratedScheduler) -> None:
        self.prepared = prepared
        scheduler = prepared.scheduler
        self.state = copy.deepcopy(scheduler.state_dict())
        self.rates = [group["lr"] for group in scheduler.optimizer.param_groups]

    def convert(self, saved_processes: int, num_processes: int) -> None:
        """Put the scheduler where it is after as many updates on another number of processes.

        Args:
            saved_processes: Of the run that saved.
            num_processes: Of this run.
        """
        prepared = self.prepared
        if prepared.split_batches or not prepared.step_with_optimizer:
            return  # it steps once per update, on any number of processes
        num_updates = prepared.scheduler.last_epoch // saved_processes
        self.step_again(num_updates * num_processes)

    def step_again(self, num_steps: int) -> None:
        """Put the scheduler where it is after `num_steps` steps."""
        scheduler = self.prepared.scheduler
        scheduler.load_state_dict(copy.deepcopy(self.state))
        for group, rate in zip(scheduler.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer's steps were made before
            for _ in range(num_steps):
                scheduler.step()


def check_can_save(accelerator: accelerate.Accelerator, *, is_complete: bool) -> None:
    """Check that a state that is saved now can be resumed from.

    Args:
        accelerator: The accelerator.
        is_complete: Whether all micro-batches of the window had their backward.

    Raises:
        ConfigError: If gradients would be lost, or FSDP1 would crash.
    """
    if not is_complete:
        raise ConfigError(
            "save_state within a window would lose the gradients of its first micro-batches: "
            "save after optimizer.step(), when accelerator.sync_gradients is true."
        )
    is_fsdp1 = is_sharded(accelerator) and not accelerator.is_fsdp2
    if is_fsdp1 and accelerator.device.type == "cpu":
        raise ConfigError(
            "save_state: FSDP1 on CPU processes frees the weights that torch gathers for the "
            "checkpoint, and the process would crash. On a CPU use FSDP2 or DDP."
        )


def positions_of(loaders: Iterable[Any]) -> list[dict[str, Any] | None]:
    """Return the position of each prepared loader; None for those that handed out no windows."""
    return [
        loader.state() if isinstance(loader, WindowedDataLoader) and loader.has_begun else None
        for loader in loaders
    ]


def restore_positions(loaders: list[Any], positions: list[dict[str, Any] | None]) -> None:
    """Let loaders continue where those of a saved run were, in the same order."""
    for loader, position in zip(loaders, positions, strict=False):
        if position is not None and isinstance(loader, WindowedDataLoader):
            loader.restore(position)


def folder_to_load(input_dir: str | None, project_dir: str | None) -> Path:
    """Return the folder from which `load_state` loads.

    Args:
        input_dir: What the script passed. None: Accelerate loads its newest checkpoint.
        project_dir: Where Accelerate makes its checkpoints.
    """
    if input_dir is not None:
        return Path(input_dir).expanduser()
    checkpoints = Path(project_dir, "checkpoints")
    return max(checkpoints.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
