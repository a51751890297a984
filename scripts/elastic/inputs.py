"""The inputs of the kill tests, and the sizes of a run with elastic machines: the same for every
kind of training.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Shape, build_model

from hf_ga.finetuning.data.formats.corpus import train_tokenizer

NUM_SAMPLES = 60
WINDOW_SIZE = 24  # of 1, 2 or 3 processes with micro-batches of 4; the last one of an epoch has 12
WINDOWS_PER_EPOCH = 3
MICRO_BATCH_SIZE = 4
SAVE_STEPS = 3
TEXT = (
    "the window of samples is one step and every split gives same update while dropout stays "
    "keyed by position"
)


def write_inputs(folder: Path, is_numbered: bool = False) -> None:
    """Write the inputs of a training run into a folder: train.jsonl and validation.jsonl with
    random short texts, and a small GPT-2 with its tokenizer.

    Args:
        folder: The folder, which must exist.
        is_numbered: Whether each training text begins with its number, so that no two are equal and
            each can be found again in what was trained on.
    """
    random = np.random.default_rng(0)
    words = TEXT.split()
    for name, count in {"train": NUM_SAMPLES, "validation": 13}.items():
        lines = []
        for number in range(count):
            text = " ".join(random.choice(words, random.integers(1, 13)))
            if is_numbered and name == "train":
                text = f"{number} {text}"
            lines.append(json.dumps({"text": text}) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    tokenizer = train_tokenizer([TEXT] * 3, 300)
    torch.manual_seed(0)
    shape = Shape("gpt", layers=2, width=16, heads=2, words=len(tokenizer))
    build_model(shape, positions=64).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def settings(folder: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of `hf_ga.FinetuneConfig` for every run of the kill tests.

    Args:
        folder: The folder of the inputs (`write_inputs`).
        output: The run's output folder.
        changes: Arguments that replace those of `kill_test.py` without `--elastic`.
    """
    arguments = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "train.jsonl"),
        "validation_file": str(folder / "validation.jsonl"),
        "output_dir": str(output),
        "max_steps": 12,
        "eval_steps": 3,
        "save_steps": 2,
        "save_total_limit": 2,
        "warmup_steps": 2,
        "max_length": 24,
        "per_device_train_batch_size": MICRO_BATCH_SIZE,
        "global_batch_size": 16,
        "learning_rate": 1e-3,
        "resume_from_checkpoint": "auto",
    }
    return arguments | changes
