"""Two processes train on one stream, then find that their streams differ; run by `test_streaming.py`.

python tests/data/streaming_worker.py OUTPUT_DIR/job.json
"""

import json
import sys
from functools import partial
from pathlib import Path

import helpers as h
import torch
from accelerate import Accelerator
from forked import together
from torch.utils.data import IterableDataset

import hf_ga
from hf_ga.data.stream_loader import StreamLoader

OPTIONS = {"global_batch_size": 10, "per_device_batch_size": 2, "seed": 3, "shuffle_buffer_size": 12}


class Listed(IterableDataset):
    """A stream of given samples."""

    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def trained(accelerator: Accelerator, loader: StreamLoader, model: torch.nn.Module) -> list[float]:
    """Two passes; returns the losses, then all weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = [hf_ga.train_step(accelerator, model, optimizer, window) for _ in range(2) for window in loader]
    return [step.loss for step in steps] + torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def train(accelerator: Accelerator, num_workers: int) -> list[float]:
    """On 33 samples: the last window has 3."""
    loader = StreamLoader(Listed(h.token_samples(33)), h.pad_right, accelerator=accelerator, num_workers=num_workers, **OPTIONS)
    return trained(accelerator, loader, h.gpt2(0.1))


def message(accelerator: Accelerator, samples: list) -> str:
    """What a loader says whose processes read different streams."""
    try:
        for window in StreamLoader(Listed(samples), h.pad_right, accelerator=accelerator, **{**OPTIONS, "shuffle_buffer_size": 0}):
            assert window.num_samples
    except hf_ga.DataError as error:
        return str(error)
    return "nothing"


def run(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    rank, samples = accelerator.process_index, h.token_samples(33)
    found = {
        "num_processes": accelerator.num_processes,
        "trained": train(accelerator, num_workers=1),
        "same": message(accelerator, samples),
        "other order": message(accelerator, samples[::-1] if rank else samples),
        "shorter by a window": message(accelerator, samples[:30] if rank else samples),
        "shorter by a sample": message(accelerator, samples[:32] if rank else samples),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    sys.exit(together(partial(run, Path(sys.argv[1]).parent), "ddp", 2) != {0})
