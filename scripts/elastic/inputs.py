"""The samples and sizes of a run with elastic machines, the same for every kind of training."""

import json
from pathlib import Path
from typing import Any

NUM_SAMPLES = 60
WINDOW_SIZE = 24  # of 1, 2 or 3 processes with micro-batches of 4; the last one of an epoch has 12
WINDOWS_PER_EPOCH = 3
MICRO_BATCH_SIZE = 4
SAVE_STEPS = 3


def number_rows(path: Path) -> None:
    """Put the number of each row before its text in a jsonl file, so that no two rows are equal and
    each can be found again in what was trained on.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    numbered = [{**row, "text": f"{number} {row['text']}"} for number, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in numbered))


def settings(folder: Path, output: Path, epochs: int, same_bits: int | None) -> dict[str, Any]:
    """Return the arguments of `hf_ga.FinetuneConfig`.

    Args:
        folder: The folder of the inputs.
        output: The run's output folder.
        epochs: The number of epochs.
        same_bits: The flag of this name.
    """
    return {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"),
        "output_dir": str(output),
        "num_train_epochs": epochs,
        "eval_steps": 10_000,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "warmup_steps": 2,
        "max_length": 32,
        "per_device_train_batch_size": MICRO_BATCH_SIZE,
        "global_batch_size": WINDOW_SIZE,
        "learning_rate": 1e-3,
        "same_bits": same_bits,
        "resume_from_checkpoint": "auto",
    }
