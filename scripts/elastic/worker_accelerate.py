"""The loop of the documentation as one worker: `python worker_accelerate.py output ledger epochs
pace door`. `door` is "accelerate" for `hf_ga.Accelerator`, and "stock" for Accelerate's own.
"""

import sys
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hf_ga
from elastic.inputs import (
    MICRO_BATCH_SIZE,
    NUM_SAMPLES,
    SAVE_STEPS,
    WINDOW_SIZE,
    WINDOWS_PER_EPOCH,
)
from elastic.ledger import LedgerWriter


def main() -> None:
    """Train, and write the ledger and the last weights."""
    output, ledger, epochs, pace, door = sys.argv[1:]
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = make_accelerator(door)
    loader = make_loader()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    writer = LedgerWriter(Path(ledger), accelerator.process_index, accelerator.num_processes)
    if door == "stock":
        epoch, step, skipped = resume_by_hand(accelerator, Path(output), loader)
    else:
        start = accelerator.resume(output)
        epoch, step, skipped = start.epoch, start.step, 0
    while epoch < int(epochs):
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        skipped = 0
        ids: list[int] = []
        losses: list[torch.Tensor] = []
        for inputs, labels, numbers in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ids += accelerator.gather_for_metrics(numbers).tolist()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            time.sleep(float(pace))
            if door == "stock":
                value = accelerator.reduce(torch.stack(losses).mean(), "mean")
            else:
                value = accelerator.window_loss
            # A window that was computed again has shown its samples again.
            own = [*dict.fromkeys(ids)] if accelerator.is_main_process else []
            writer.write(step, own, float(value))
            ids, losses = [], []
            step += 1
            if step % SAVE_STEPS == 0:
                accelerator.save_state(f"{output}/step_{step}")
        epoch += 1
    if accelerator.is_main_process:
        Path(output).mkdir(parents=True, exist_ok=True)
        save_file(accelerator.unwrap_model(model).state_dict(), Path(output) / "model.safetensors")
    accelerator.end_training()


def make_accelerator(door: str) -> Any:
    """Make the accelerator: one window for any number of processes with hf_ga, and the nearest
    number of accumulation steps with Accelerate's own.
    """
    if door != "stock":
        return hf_ga.Accelerator(cpu=True, global_batch_size=WINDOW_SIZE)
    accelerator = accelerate.Accelerator(cpu=True)
    num_processes = accelerator.num_processes
    accelerator.gradient_accumulation_steps = WINDOW_SIZE // (MICRO_BATCH_SIZE * num_processes)
    return accelerator


def make_loader() -> DataLoader:
    """Make the loader of random samples: features, a label, and the sample's number."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 8, generator=generator)
    labels = torch.randint(8, (NUM_SAMPLES,), generator=generator)
    dataset = TensorDataset(features, labels, torch.arange(NUM_SAMPLES))
    return DataLoader(dataset, batch_size=MICRO_BATCH_SIZE, shuffle=True)


def make_model() -> nn.Module:
    """Make a small model with dropout."""
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))


def resume_by_hand(
    accelerator: accelerate.Accelerator, folder: Path, loader: DataLoader
) -> tuple[int, int, int]:
    """Resume as Accelerate's examples do: by the step in the name of the newest folder.

    Returns:
        The epoch, the number of steps done, and the number of batches to skip.
    """
    folders = sorted(folder.glob("step_*"), key=lambda path: int(path.name[5:]))
    while folders:
        try:
            accelerator.load_state(str(folders[-1]))
        except Exception as error:
            print(f"{folders.pop()} cannot be loaded: {error}", flush=True)
            continue
        step = int(folders[-1].name[5:])
        epoch, in_epoch = divmod(step, WINDOWS_PER_EPOCH)
        return epoch, step, in_epoch * accelerator.gradient_accumulation_steps
    return 0, 0, 0


if __name__ == "__main__":
    main()
