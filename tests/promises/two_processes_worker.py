"""Trains a GPT-2 with dropout for some steps; run by `test_same_on_any_number_of_processes.py` on
one process and on two.

accelerate launch ... two_processes_worker.py OUTPUT.json
"""

import json
import sys
from pathlib import Path

import helpers as h
import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env

import hf_ga
from hf_ga.parallel.prepare import enable_fsdp_on_cpu
from hf_ga.parallel.processes import end_training

WINDOW = 12
STEPS = 10
MAX_NORM = 0.5


def train(accelerator: Accelerator) -> dict[str, list[float]]:
    """Loss and norm of the gradient at each step: windows of 12, 12 and 5 samples of unequal
    lengths.
    """
    enable_fsdp_on_cpu(accelerator)
    model = h.gpt2(dropout=0.1)
    model, optimizer = hf_ga.prepare(
        accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    sizes = {"per_device_batch_size": 4, "global_batch_size": WINDOW}
    windows = hf_ga.WindowLoader(h.token_samples(29), h.pad_right, accelerator=accelerator, **sizes)
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    while len(found["losses"]) < STEPS:
        for window in windows:
            result = hf_ga.train_step(accelerator, model, optimizer, window, max_grad_norm=MAX_NORM)
            found["losses"].append(result.loss)
            found["norms"].append(result.grad_norm)
    return found


def usual_loss(accelerator: Accelerator) -> float:
    """The first window's loss as most loops compute it: every process's own mean, averaged over
    processes.
    """
    model = h.gpt2()
    sizes = {"per_device_batch_size": WINDOW, "global_batch_size": WINDOW}
    windows = hf_ga.WindowLoader(h.token_samples(29), h.pad_right, accelerator=accelerator, **sizes)
    means = [h.mean_loss(model, m.batch) for m in next(iter(windows)).micro_batches]
    return float(accelerator.reduce(torch.stack(means).mean().detach(), "mean"))


def found_with(accelerator: Accelerator) -> dict:
    """What the training finds, the usual loss, and on how many processes."""
    return train(accelerator) | {
        "processes": accelerator.num_processes,
        "kind": accelerator.distributed_type.value,
        "usual loss": usual_loss(accelerator),
    }


if __name__ == "__main__":
    accelerator = Accelerator(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    found = found_with(accelerator)
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
    end_training(accelerator)
