"""Arms of the benchmark that train with transformers' Trainer, TRL's SFTTrainer or ExactTrainer,
whose own loops are timed by a callback; and plain PyTorch loops.
"""

import math
import tempfile
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import is_flash_attn_2_available

from benchmark.measuring import BenchmarkRun
from hf_ga.finetuning.data.formats.corpus import load_stdlib_tokenizer


class _StepTimer(TrainerCallback):
    """Trainer callback that tells a run of the benchmark when an optimizer step has ended."""

    def __init__(self, run: BenchmarkRun) -> None:
        self.run = run

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of an optimizer step, and wait until the next window may begin."""
        self.run.step_done()


def train_with_trainer(
    run: BenchmarkRun,
    strategy: str = "random",
    trainer_class: Any = Trainer,
    arguments_class: Any = TrainingArguments,
    **trainer_arguments: Any,
) -> None:
    """Train with transformers' Trainer, or a subclass, until the benchmark is over.

    Args:
        run: The measured run of the benchmark.
        strategy: Trainer's `train_sampling_strategy`.
        trainer_class: Trainer or a subclass.
        arguments_class: TrainingArguments or a subclass.
        trainer_arguments: More arguments for the trainer.
    """
    setting = run.setting
    with tempfile.TemporaryDirectory() as folder:
        training_arguments = arguments_class(
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
        training_arguments._n_gpu = 1
        trainer_arguments.setdefault("train_dataset", setting.samples)
        trainer = trainer_class(
            model=run.model,
            args=training_arguments,
            data_collator=run.collate,
            callbacks=[_StepTimer(run)],
            **trainer_arguments,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def train_padding_free(run: BenchmarkRun) -> None:
    """Train with Trainer and transformers' padding-free batches: the samples of a micro-batch are
    concatenated into one row. FlashAttention keeps them apart if it is installed, otherwise an
    attention mask does.
    """
    run.collator = DataCollatorWithFlattening()
    implementation = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    run.model.set_attn_implementation(implementation)
    train_with_trainer(run)


def train_with_trl(run: BenchmarkRun) -> None:
    """Train with TRL's SFTTrainer on the tokenized samples of the benchmark, without its default of
    gradient checkpointing.
    """
    # Imported lazily, because both packages are optional.
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    arguments_class = partial(
        SFTConfig,
        gradient_checkpointing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    train_with_trainer(
        run,
        trainer_class=SFTTrainer,
        arguments_class=arguments_class,
        train_dataset=Dataset.from_list(run.setting.samples),
        processing_class=load_stdlib_tokenizer(),
    )


def plain_loop(run: BenchmarkRun) -> None:
    """Train with a plain PyTorch loop until the benchmark is over: shuffled batches, each mean loss
    divided by the accumulation steps, torch's own dropout.
    """
    setting = run.setting
    loader = DataLoader(
        setting.samples, setting.micro_batch_size, shuffle=True, collate_fn=run.collate
    )
    _train_on(run, loader, setting.accumulation_steps)


def full_rows(run: BenchmarkRun, backend: str | None = None) -> None:
    """Train on full rows of one length until the benchmark is over, without hf_ga: what the machine
    does with as many tokens where nothing is padded, and no mask keeps samples apart.

    A window has as few micro-batches as its real tokens allow, on average over the epoch.

    Args:
        run: The measured run of the benchmark.
        backend: That of torch.compile, which compiles the model for this shape. None: it does not.
    """
    setting = run.setting
    if backend is not None:
        run.model.compile(dynamic=False, backend=backend)
    num_tokens = setting.real_tokens / setting.windows_per_epoch
    size = setting.micro_batch_size
    num_batches = math.ceil(num_tokens / (size * setting.max_length))
    shape = (
        setting.windows_per_epoch * num_batches,
        size,
        math.ceil(num_tokens / num_batches / size),
    )
    ids = torch.tensor([token for sample in setting.samples for token in sample["input_ids"]])
    rows = ids[torch.arange(math.prod(shape)) % len(ids)].view(shape)
    batches = []
    for of_batch in rows:
        labels = of_batch if setting.model == "gpt" else torch.arange(size) % setting.num_labels
        batches.append({"input_ids": of_batch, "labels": labels})
    run.has_samples = False
    _train_on(run, batches, num_batches)


def _train_on(
    run: BenchmarkRun, batches: Iterable[dict[str, Tensor]], accumulation_steps: int
) -> None:
    """Train in a plain PyTorch loop on the batches of an epoch, until the benchmark is over."""
    setting = run.setting
    optimizer = run.optimizer()
    is_bf16 = setting.mixed_precision == "bf16"
    while True:  # until `step_done` raises
        for num_batches, batch in enumerate(batches, start=1):
            on_device = {name: values.to(setting.device) for name, values in batch.items()}
            with torch.autocast(setting.device, torch.bfloat16, enabled=is_bf16):
                loss = run.model(**on_device).loss
            (loss / accumulation_steps).backward()
            if num_batches % accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.step_done()


PLAIN = "plain loop"
PADDING_FREE = "Trainer, padding-free"
TRL = "TRL"
# Name of the arm -> training loop.
PEERS = {PLAIN: plain_loop, PADDING_FREE: train_padding_free}
FULL_ROWS = "limit: full rows"
COMPILED_FULL_ROWS = "limit: full rows, compiled"
# What no run without padding can exceed by much.
LIMITS = {FULL_ROWS: full_rows, COMPILED_FULL_ROWS: partial(full_rows, backend="inductor")}
if find_spec("trl") and find_spec("datasets"):
    PEERS[TRL] = train_with_trl
