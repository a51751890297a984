"""The command as one worker: `python worker_command.py settings.json ledger_folder pace`.

The settings are those of `hf_ga.FinetuneConfig`. A sample is identified by its token ids, as they
were trained on. `pace` is the least number of seconds of a step, so that events meet a run.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

import hf_ga
from elastic.inputs import WINDOWS_PER_EPOCH
from elastic.ledger import LedgerWriter
from hf_ga.finetuning.run import loop
from hf_ga.loading.window import Window


def main() -> None:
    """Fine-tune, and write the ledger."""
    settings, folder, pace = sys.argv[1:]
    torch.set_num_threads(1)
    _keep_ledger(Path(folder), float(pace))
    hf_ga.finetune(hf_ga.FinetuneConfig(**json.loads(Path(settings).read_text())))


def _keep_ledger(folder: Path, pace: float) -> None:
    """Let the training loop write each window into the ledger."""
    train_step = loop.train_step
    writers: list[LedgerWriter] = []

    def step(
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        window: Window,
        **kwargs: Any,
    ) -> hf_ga.StepResult:
        """Train on a window, then write its line."""
        begin = time.monotonic()
        result = train_step(accelerator, model, optimizer, window, **kwargs)
        if not writers:
            writers.append(
                LedgerWriter(folder, accelerator.process_index, accelerator.num_processes)
            )
        samples = [row for micro_batch in window.micro_batches for row in _rows(micro_batch.batch)]
        number = window.epoch * WINDOWS_PER_EPOCH + window.index
        writers[0].write(number, samples, result.loss)
        time.sleep(max(0.0, begin + pace - time.monotonic()))
        return result

    loop.train_step = step


def _rows(batch: dict[str, Any]) -> list[list[int]]:
    """The token ids of each sample of a batch, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


if __name__ == "__main__":
    main()
