"""One process of a run that kill_test.py kills: its inputs, its flags, and its progress reports."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("start", "training", "evaluating", "saving", "rotating", "finishing")
DESCRIPTOR = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.truncate": None, "open": None}  # argument index
TEXT = "the window of samples is one step and every split gives same update while dropout stays keyed by position"


@dataclass
class Watch:
    """One process of a run.

    Attributes:
        shared: its phase and its number of file operations, in shared memory. die_at: kill the process right before this file
            operation (from 1); 0: never.
    """

    shared: Any
    die_at: int = 0


def write_inputs(folder: Path) -> None:
    """Write rows and a small model with its tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from hf_ga.data.corpus import train_tokenizer

    random, words = np.random.default_rng(0), TEXT.split()
    for name, count in {"train": 60, "validation": 13}.items():
        texts = [" ".join(random.choice(words, random.integers(1, 13))) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer([TEXT] * 3, 300)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, **ends)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def settings(folder: Path, output: Path) -> dict[str, Any]:
    """Flags of a run; the model has dropout 0.1."""
    files = {"dataset_name": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    paths = {"model_name_or_path": folder / "model", "output_dir": output, **files}
    often = {"max_steps": 12, "eval_steps": 3, "save_steps": 2, "save_total_limit": 2, "warmup_steps": 2}
    sizes = {"max_length": 24, "per_device_train_batch_size": 4, "global_batch_size": 16}
    return {**paths, **often, **sizes, "learning_rate": 1e-3, "resume_from_checkpoint": "auto"}


def train(folder: Path, output: Path, rank: dict[str, Any], watch: Watch) -> None:
    """Run one process; prints to a log file next to the folder."""
    os.environ.update({name: str(value) for name, value in rank.items()})
    with output.with_name(f"{output.name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    from hf_ga import FinetuneConfig
    from hf_ga.run import finetune, loop

    torch.set_num_threads(1)
    phases = [(finetune, "fit", "training"), (loop, "_evaluate", "evaluating"), (loop, "save", "saving")]
    for module, name, phase in [*phases, (finetune, "_finish", "finishing")]:
        setattr(module, name, recording(getattr(module, name), watch, PHASES.index(phase)))
    sys.addaudithook(lambda event, values: count_operation(event, values, str(output), watch))
    finetune.finetune(FinetuneConfig(**settings(folder, output)))


def recording(function: Callable[..., Any], watch: Watch, phase: int) -> Callable[..., Any]:
    """Wrap a function to record the phase while it runs."""

    def recorded(*arguments: Any, **named: Any) -> Any:
        before, watch.shared[0] = watch.shared[0], phase
        try:
            return function(*arguments, **named)
        finally:
            watch.shared[0] = before

    return recorded


def count_operation(event: str, values: tuple[Any, ...], output: str, watch: Watch) -> None:
    """An audit hook: counts operations that change the folder, and kills the process right before operation `die_at`."""
    if event not in DESCRIPTOR or isinstance(values[0], int):
        return
    if event == "open" and not (values[2] or 0) & (os.O_WRONLY | os.O_RDWR):
        return
    path, descriptor = os.fsdecode(values[0]), DESCRIPTOR[event]
    if descriptor is not None and values[descriptor] >= 0:  # relative to an open folder, as in `shutil.rmtree`
        path = os.path.join(os.readlink(f"/proc/self/fd/{values[descriptor]}"), path)
    if not path.startswith(output + os.sep):
        return
    if event == "os.rename" and os.path.basename(path).startswith("checkpoint-"):
        watch.shared[0] = PHASES.index("rotating")  # until saving ends
    watch.shared[1] += 1
    if watch.shared[1] == watch.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
