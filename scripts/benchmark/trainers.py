"""The arms of transformers' Trainer, TRL's and ExactTrainer: their own loops, timed by a callback;
and a plain loop.
"""

import tempfile
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_flash_attn_2_available

from benchmark.lap import Lap
from hf_ga.finetuning.data.corpus import load_stdlib_tokenizer


class _Clock(TrainerCallback):
    """The callback that tells the lap of each optimizer step."""

    def __init__(self, lap: Lap) -> None:
        self.lap = lap

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of a step."""
        self.lap.step_done()


def train(
    lap: Lap,
    strategy: str = "random",
    trainer_class: Any = Trainer,
    settings: Any = TrainingArguments,
    **more: Any,
) -> None:
    """Train with Trainer, or with another trainer.

    Args:
        lap: The arm's turn.
        strategy: One of Trainer's sampling strategies.
        trainer_class: The class of the trainer.
        settings: The class of its arguments.
        more: More arguments of the trainer.
    """
    setting = lap.setting
    with tempfile.TemporaryDirectory() as folder:
        arguments = settings(
            output_dir=folder,
            train_sampling_strategy=strategy,
            per_device_train_batch_size=setting.micro_batch_size,
            gradient_accumulation_steps=setting.accumulation_steps,
            num_train_epochs=1 + setting.epochs,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            bf16=setting.mixed_precision == "bf16",
            use_cpu=setting.device == "cpu",
            seed=setting.seed,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # With several GPUs Trainer would wrap the model in DataParallel.
        arguments._n_gpu = 1
        more = {"train_dataset": setting.samples} | more
        trainer = trainer_class(
            model=lap.model,
            args=arguments,
            data_collator=lap.collate,
            callbacks=[_Clock(lap)],
            **more,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def padding_free(lap: Lap) -> None:
    """Train with Trainer, and the samples of a micro-batch in one row. Without FlashAttention a
    mask keeps them apart.
    """
    lap.collator = DataCollatorWithFlattening()
    implementation = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    lap.model.set_attn_implementation(implementation)
    train(lap)


def with_trl(lap: Lap) -> None:
    """Train with TRL's SFTTrainer, without its default of checkpointing activations."""
    # Both are optional.
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    own = partial(
        SFTConfig,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    given = {
        "train_dataset": Dataset.from_list(lap.setting.samples),
        "processing_class": load_stdlib_tokenizer(),
    }
    train(lap, trainer_class=SFTTrainer, settings=own, **given)


def plain_loop(lap: Lap) -> None:
    """Train by a plain loop: mean losses over accumulation steps, random order, native dropout."""
    setting = lap.setting
    optimizer = lap.optimizer()
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=lap.collate
    )
    is_bf16 = setting.mixed_precision == "bf16"
    while True:  # until the lap ends
        for number, batch in enumerate(loader, start=1):
            on_device = {name: values.to(setting.device) for name, values in batch.items()}
            with torch.autocast(setting.device, torch.bfloat16, enabled=is_bf16):
                loss = lap.model(**on_device).loss
            (loss / setting.accumulation_steps).backward()
            if number % setting.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(lap.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                lap.step_done()


PLAIN = "plain loop"
PADDING_FREE = "Trainer, padding-free"
TRL = "TRL"
PEERS = {PLAIN: plain_loop, PADDING_FREE: padding_free}
if find_spec("trl") and find_spec("datasets"):
    PEERS[TRL] = with_trl
