"""What `save_state` keeps beside Accelerate's own files, so that a run can resume in any layout."""

import copy
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate.scheduler import AcceleratedScheduler

from hf_ga.errors import CheckpointError

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
        """What a folder contains. None if it was saved without hf_ga.

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
