"""Measure what a checkpoint that is written in the background costs a training on this machine.

python scripts/checkpoint_cost.py --threads 1 --checkpoints 12

A GPT-2 with 124 million parameters trains with AdamW. Stretches of equally many steps follow each
other: one after a checkpoint was begun, long enough for it to be written, and one without any. What
a checkpoint costs is the wait for the copy, plus the difference between the two stretches. The
control compares stretches without a checkpoint in the same way.
"""

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from common import Shape, build_model, seconds_of

from hf_ga.recovery.saving import CheckpointSaver

SHAPE = Shape("gpt")  # GPT-2-small: 124 million parameters
MINUTE = 60.0  # seconds between checkpoints, of which the cost is a share
WARM_UP_STEPS = 4
SLOWER = 2.0  # a stretch is so many times as long as a checkpoint takes without training


def make_step(accelerator: Accelerator, num_tokens: int) -> tuple[Callable[[], None], tuple]:
    """Return a function that makes an update, and (model, optimizer)."""
    torch.manual_seed(0)
    model = build_model(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.randint(50_000, (1, num_tokens))

    def step() -> None:
        """Make one update."""
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()

    return step, (model, optimizer)


def stretch(step: Callable[[], None], num_steps: int) -> float:
    """Make so many updates, and return their seconds."""
    return sum(seconds_of(step) for _ in range(num_steps))


def num_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def describe(name: str, seconds: Sequence[float]) -> str:
    """Return a line with the median, the quartiles and the mean of some seconds."""
    low, median, high = statistics.quantiles(seconds, n=4)
    mean = statistics.mean(seconds)
    error = statistics.stdev(seconds) / len(seconds) ** 0.5
    return (
        f"{name:24}{median:7.2f} s ({low:.2f} to {high:.2f}), mean {mean:.2f} +- {error:.2f} s; "
        f"median {median / MINUTE:.2%} of a minute, mean {mean / MINUTE:.2%}"
    )


def measure(num_checkpoints: int, num_tokens: int, folder: Path) -> None:
    """Print what checkpoints cost."""
    accelerator = Accelerator(cpu=True)
    step, (model, optimizer) = make_step(accelerator, num_tokens)
    stretch(step, WARM_UP_STEPS)
    waits: list[float] = []
    costs: list[float] = []
    controls: list[float] = []
    with CheckpointSaver(accelerator, folder, keep=1) as saver:

        def save_and_wait(number: int) -> None:
            """Write a checkpoint."""
            saver.save(model, optimizer, {}, step=number)
            saver.wait()

        save_and_wait(0)  # whose copy takes new memory
        seconds = seconds_of(partial(save_and_wait, 1))
        seconds_of_step = statistics.median(seconds_of(step) for _ in range(5))
        num_steps = math.ceil(SLOWER * seconds / seconds_of_step)
        print(f"written alone in        {seconds:.2f} s; {num_steps} steps a stretch", flush=True)
        for number in range(2, num_checkpoints + 2):
            before = stretch(step, num_steps)
            waits.append(seconds_of(partial(saver.save, model, optimizer, {}, step=number)))
            during = stretch(step, num_steps)
            saver.wait()
            after = stretch(step, num_steps)
            costs.append(waits[-1] + during - (before + after) / 2)
            controls.append(after - before)
            print(f"checkpoint {number - 1}: {costs[-1]:.2f} s, control {controls[-1]:.2f} s")
    print(f"bytes                   {num_bytes(folder):,}")
    print(f"threads, cores          {torch.get_num_threads()}, {os.cpu_count()}")
    print(describe("wait for the copy", waits))
    print(describe("cost of a checkpoint", costs))
    print(describe("control", controls))


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="of a step")
    parser.add_argument("--folder", type=Path, help="a disk to write to; default: a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measure(arguments.checkpoints, arguments.tokens, Path(folder))


if __name__ == "__main__":
    main()
