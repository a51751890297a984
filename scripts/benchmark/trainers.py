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
    def __init__(self, lap: Lap) -> None:
        self.lap = lap

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.lap.step_done()


def train(
    lap: Lap,
    strategy: str = "random",
    trainer_class: Any = Trainer,
    settings: Any = TrainingArguments,
    **more: Any,
) -> None:
    """Train with one of Trainer's sampling strategies, or with another trainer, whose arguments are
    of the class `settings`.
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
        arguments._n_gpu = 1  # with several GPUs Trainer would wrap the model in DataParallel
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
    """The samples of a micro-batch in one row; without FlashAttention a mask keeps them apart."""
    lap.collator = DataCollatorWithFlattening()
    lap.model.set_attn_implementation(
        "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    )
    train(lap)


def with_trl(lap: Lap) -> None:
    """SFTTrainer, without its default of checkpointing activations."""
    from datasets import Dataset  # optional, as trl is
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
    """Mean losses over accumulation steps, random order, native dropout."""
    setting, optimizer = lap.setting, lap.optimizer()
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=lap.collate
    )
    while True:  # until the lap ends
        for number, batch in enumerate(loader, start=1):
            with torch.autocast(
                setting.device, torch.bfloat16, enabled=setting.mixed_precision == "bf16"
            ):
                loss = lap.model(
                    **{name: values.to(setting.device) for name, values in batch.items()}
                ).loss
            (loss / setting.accumulation_steps).backward()
            if number % setting.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(lap.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                lap.step_done()


PLAIN, PADDING_FREE, TRL = "plain loop", "Trainer, padding-free", "TRL"
PEERS = {PLAIN: plain_loop, PADDING_FREE: padding_free}
if find_spec("trl") and find_spec("datasets"):
    PEERS[TRL] = with_trl
