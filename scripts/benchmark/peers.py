"""Arms that are measured on a GPU only: Trainer without padding, TRL, and the loop of PyTorch's tutorials."""

from collections.abc import Callable
from functools import partial

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening
from transformers.utils import is_flash_attn_2_available

from benchmark.lap import Lap
from benchmark.trainers import train
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.models import load_tokenizer


def padding_free(lap: Lap) -> None:
    """The samples of a micro-batch in one row; without FlashAttention a mask keeps them apart."""
    lap.collate.collate = DataCollatorWithFlattening()
    if is_flash_attn_2_available():
        lap.model.set_attn_implementation("flash_attention_2")
    train(lap)


def with_trl(lap: Lap) -> None:
    """SFTTrainer, without its default of checkpointing activations."""
    from trl import SFTConfig, SFTTrainer  # optional

    own = {"gradient_checkpointing": False, "max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    given = {"train_dataset": Dataset.from_list(lap.setting.samples), "processing_class": load_tokenizer(FinetuneConfig())}
    train(lap, trainer_class=SFTTrainer, arguments_class=partial(SFTConfig, **own), **given)


def plain_loop(lap: Lap) -> None:
    """Mean losses over accumulation steps, random order, native dropout."""
    setting, optimizer = lap.setting, lap.optimizer()
    loader = DataLoader(setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=lap.collate)
    while True:  # until the lap ends
        for number, batch in enumerate(loader, start=1):
            with torch.autocast(setting.device, torch.bfloat16, enabled=setting.mixed_precision == "bf16"):
                loss = lap.model(**{name: values.to(setting.device) for name, values in batch.items()}).loss
            (loss / setting.accumulation_steps).backward()
            if number % setting.accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(lap.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                lap.step_done()


OF_ALL: dict[str, Callable[[Lap], None]] = {"plain loop": plain_loop}
PEERS = {"bert": OF_ALL, "gpt": OF_ALL | {"Trainer, padding-free": padding_free, "TRL": with_trl}}
