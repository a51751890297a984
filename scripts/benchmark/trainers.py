"""The arms of transformers' Trainer and hf_ga's ExactTrainer: their own training loops, timed by a callback."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import is_flash_attn_2_available

from benchmark.lap import Lap
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.models import load_tokenizer


class _Clock(TrainerCallback):
    def __init__(self, lap: Lap) -> None:
        self.lap = lap

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.lap.step_done()


def train(
    lap: Lap,
    strategy: str = "random",
    trainer_class: type[Trainer] = Trainer,
    arguments_class: Callable[..., TrainingArguments] = TrainingArguments,
    **more: Any,
) -> None:
    """Train with one of Trainer's sampling strategies, or with another trainer, given its arguments' class and more arguments."""
    setting = lap.setting
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_class(
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
        arguments._n_gpu = 1  # with several GPUs Trainer would wrap the model in DataParallel
        trainer = trainer_class(
            model=lap.model,
            args=arguments,
            train_dataset=setting.samples,
            data_collator=lap.collate,
            callbacks=[_Clock(lap)],
            **more,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def padding_free(lap: Lap) -> None:
    """Trainer with the samples of a micro-batch in one row. Without FlashAttention a mask keeps them apart."""
    lap.collate.collate = DataCollatorWithFlattening()
    if is_flash_attn_2_available():
        lap.model.set_attn_implementation("flash_attention_2")
    train(lap)


def train_with_trl(lap: Lap) -> None:
    """TRL's trainer of language models, without its default activation checkpointing.

    Raises:
        ImportError: TRL is not installed.
    """
    from trl import SFTConfig, SFTTrainer

    own = {"gradient_checkpointing": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    train(lap, "random", SFTTrainer, partial(SFTConfig, **own), processing_class=load_tokenizer(FinetuneConfig()))


def plain_loop(lap: Lap) -> None:
    """The loop of PyTorch's tutorials, with accumulation."""
    setting, optimizer, micro_batches = lap.setting, lap.optimizer(), 0
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=lap.collate, pin_memory=setting.device == "cuda"
    )
    while True:  # until the lap ends
        for batch in loader:
            batch = {name: values.to(setting.device, non_blocking=True) for name, values in batch.items()}
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.mixed_precision == "bf16"):
                loss = lap.model(**batch).loss / setting.accumulation_steps
            loss.backward()
            micro_batches += 1
            if micro_batches % setting.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(lap.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                lap.step_done()


PADDING_FREE, TRL, PLAIN = "Trainer, padding-free", "TRL's SFTTrainer", "plain loop"
PEERS: dict[str, Callable[[Lap], None]] = {PLAIN: plain_loop, PADDING_FREE: padding_free, TRL: train_with_trl}
