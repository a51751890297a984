"""Measure what checkpoints cost while a GPT-2 of 124 million parameters trains:
`python scripts/checkpoint_cost.py`.

Steps are timed in turns: some minutes without a checkpoint, then as long with one a minute. The
training waits while the tensors are copied; the files are written while it goes on, which may slow
it down where the CPU is short.
"""

import argparse
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ga.recovery.checkpoint import BackgroundSaves


def main() -> int:
    """Train, with and without checkpoints, and print the cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=int, default=2, help="of each turn (default: 2)")
    parser.add_argument("--turns", type=int, default=2, help="of each kind (default: 2)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default: 12)")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/checkpoint_cost"))
    flags = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    model = GPT2LMHeadModel(GPT2Config(n_layer=flags.layers)).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randint(50_000, (1, 64), device=accelerator.device)
    for _ in range(3):
        step(model, optimizer, batch)
    plain: list[float] = []
    saved: list[float] = []
    waits: list[float] = []
    with BackgroundSaves(accelerator, flags.output_dir, keep=1) as saves:
        saves.save(model, optimizer, {}, step=0)  # allocates the copies
        saves.wait()
        begin = time.monotonic()
        saves.save(model, optimizer, {}, step=1)
        saves.wait()
        print(f"a checkpoint for which the run waits: {time.monotonic() - begin:.2f} s")
        for _ in range(flags.turns):
            plain += seconds_of_steps(model, optimizer, batch, flags.minutes)
            for _ in range(flags.minutes):
                begin = time.monotonic()
                saves.save(model, optimizer, {}, step=2 + len(waits))
                waits.append(time.monotonic() - begin)
                saved += seconds_of_steps(model, optimizer, batch, 1)
    num_bytes = sum(path.stat().st_size for path in flags.output_dir.rglob("*") if path.is_file())
    print(f"{num_bytes / 1e6:,.0f} MB in a checkpoint")
    wait = statistics.mean(waits)
    print(f"the run waits {wait:.3f} s for each: {100 * wait / 60:.2f} % at one a minute")
    slowdown = statistics.mean(saved) / statistics.mean(plain) - 1
    print(
        f"a step: {statistics.mean(plain):.3f} s without, {statistics.mean(saved):.3f} s with one "
        f"checkpoint a minute ({100 * slowdown:+.2f} %), in {len(plain)} and {len(saved)} steps"
    )
    shutil.rmtree(flags.output_dir)
    return 0


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """Make one optimizer step."""
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if batch.device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, minutes: int
) -> list[float]:
    """Make steps for some minutes, and return the seconds of each."""
    seconds = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        begin = time.monotonic()
        step(model, optimizer, batch)
        seconds.append(time.monotonic() - begin)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
