"""A ledger of a run: which samples each process has computed in which window.

Every process appends lines to a file of its own. A window that was lost with a killed process is
computed again by a later start of the run; only its last computation is part of the trained model.
"""

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

SUFFIX = ".ledger"


class LedgerWriter:
    """Appends the lines of one process to its file of the ledger.

    Args:
        folder: The folder of the ledger; created if it is missing.
        rank: The rank of this process.
        num_processes: The number of processes of this start of the run.
        pace: Seconds to wait after each line, so that events meet the run.
    """

    def __init__(self, folder: Path, rank: int, num_processes: int, pace: float = 0.0) -> None:
        """Agree with the other processes on a name of this start: all of them must call it."""
        (start,) = broadcast_object_list([time.time()]) if num_processes > 1 else (time.time(),)
        folder.mkdir(parents=True, exist_ok=True)
        self.start = start
        self.rank = rank
        self.num_processes = num_processes
        self.pace = pace
        self.path = folder / f"{start:.3f}-{rank}{SUFFIX}"

    def write(self, window: int, samples: list[Any], loss: float) -> None:
        """Append the line of a window whose update is made, then wait.

        Args:
            window: The number of the window in the run, from 0.
            samples: What identifies the samples that this process has computed in it.
            loss: The window's mean loss.
        """
        line = {
            "start": self.start,
            "rank": self.rank,
            "num_processes": self.num_processes,
            "window": window,
            "samples": samples,
            "loss": loss,
            "time": time.time(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self.pace)


@dataclass(frozen=True)
class Ledger:
    """The lines of all processes of a run.

    Attributes:
        lines: One dict for each line, in no order.
    """

    lines: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path) -> "Ledger":
        """Read the ledger in a folder. A line that a killed process has not completed is left
        out.
        """
        texts = [path.read_text() for path in folder.glob(f"*{SUFFIX}")]
        complete = [text[: text.rfind("\n") + 1] for text in texts]
        return Ledger([json.loads(line) for text in complete for line in text.splitlines()])

    @property
    def num_windows(self) -> int:
        """The number of windows up to the last one that was computed."""
        return 1 + max((line["window"] for line in self.lines), default=-1)

    def losses(self) -> list[float]:
        """The loss of each window, from its last computation, in the order of the windows."""
        kept = self._kept()
        return [kept[window][0]["loss"] for window in sorted(kept)]

    def num_processes(self) -> list[int]:
        """The number of processes of each window's last computation."""
        kept = self._kept()
        return [kept[window][0]["num_processes"] for window in sorted(kept)]

    def times(self) -> list[tuple[float, int, float]]:
        """(time, window, start) of the main process's lines, in the order of time."""
        of_main = [line for line in self.lines if line["rank"] == 0]
        return sorted((line["time"], line["window"], line["start"]) for line in of_main)

    def miscounts(self, num_windows: int, windows_per_epoch: int, num_samples: int) -> list[str]:
        """Check that each sample is in exactly one window of each epoch, and that all processes of
        a window have written their line.

        Args:
            num_windows: The number of windows of the run.
            windows_per_epoch: The number of windows in an epoch.
            num_samples: The number of samples of an epoch.

        Returns:
            One text for each mistake; an empty list if the count is right.
        """
        kept = self._kept()
        found = []
        missing = set(range(num_windows)) ^ set(kept)
        if missing:
            found.append(f"windows {sorted(missing)} are missing, or too many")
        for window, lines in sorted(kept.items()):
            ranks = sorted(line["rank"] for line in lines)
            if ranks != list(range(lines[0]["num_processes"])):
                found.append(f"window {window} has lines of the ranks {ranks} only")
        for first in range(0, num_windows - windows_per_epoch + 1, windows_per_epoch):
            counts: Counter[str] = Counter()
            for window in range(first, first + windows_per_epoch):
                for line in kept.get(window, []):
                    counts.update(json.dumps(sample) for sample in line["samples"])
            epoch = first // windows_per_epoch
            if len(counts) != num_samples or set(counts.values()) != {1}:
                several = [sample for sample, count in counts.items() if count > 1]
                found.append(
                    f"epoch {epoch} has {len(counts)} of {num_samples} samples, "
                    f"{len(several)} of them more than once"
                )
        return found

    def _kept(self) -> dict[int, list[dict[str, Any]]]:
        """For each window, the lines of its last computation, the main process's first."""
        last_start: dict[int, float] = {}
        for line in self.lines:
            window = line["window"]
            last_start[window] = max(line["start"], last_start.get(window, 0.0))
        kept: dict[int, list[dict[str, Any]]] = {}
        for line in sorted(self.lines, key=lambda line: line["rank"]):
            if line["start"] == last_start[line["window"]]:
                kept.setdefault(line["window"], []).append(line)
        return kept
