"""A run of two processes that is preempted once; launched by `test_slurm.py`.

It sums a number over the processes and notes its flags in `starts.jsonl`. On the first start it
sends SLURM's signal to its launcher and to the task, and waits to be ended.

accelerate launch ... preempted_worker.py --output_dir OUTPUT_FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator

SIGUSR2 = 12


def note_start(accelerator: Accelerator, folder: Path, total: float) -> None:
    """Append what this start was given to `starts.jsonl`."""
    found = {
        "sum": total,
        "kind": str(accelerator.distributed_type),
        "flags": sys.argv[1:],
        "pid": os.getpid(),
    }
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(found) + "\n")


def preempt() -> None:
    """Send SLURM's signal to every process of the job: launcher and task."""
    launcher = psutil.Process().parent()
    launcher.send_signal(SIGUSR2)
    launcher.parent().send_signal(SIGUSR2)


def main() -> None:
    """Run once until preempted, the second time to the end."""
    accelerator = Accelerator()
    number = torch.tensor([float(accelerator.process_index + 1)])
    dist.all_reduce(number)
    folder = Path(sys.argv[sys.argv.index("--output_dir") + 1])
    checkpoint = folder / "checkpoint-7"
    is_first_start = not checkpoint.exists()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.mkdir(parents=True, exist_ok=True)
        note_start(accelerator, folder, number.item())
        if is_first_start:
            preempt()
    if is_first_start:
        time.sleep(100)
    accelerator.end_training()  # else gloo's threads may abort a process that ends


if __name__ == "__main__":
    main()
