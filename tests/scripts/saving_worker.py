"""What `accelerate launch` of one process does: the launcher ends at once when it is told to, and
the run, which saves, a little later. Started by `test_slurm.py`.

python saving_worker.py FILE
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def save_and_exit(*_: Any) -> None:
    """Handle SIGTERM in the run: save, which takes a while, then end."""
    time.sleep(0.3)
    Path(sys.argv[1]).write_text("saved")
    os._exit(0)


def main() -> None:
    """Fork: the parent is the launcher, the child is the run."""
    if os.fork():
        signal.pause()
    signal.signal(signal.SIGTERM, save_and_exit)
    Path(sys.argv[1]).write_text("runs")
    time.sleep(60)


if __name__ == "__main__":
    main()
