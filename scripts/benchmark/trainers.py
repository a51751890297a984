"""Arms of the benchmark that train with transformers' Trainer or ExactTrainer, whose own loops are
timed by a callback; and full rows, the limit of any loop.
"""

import math
import tempfile
from typing import Any

import torch
from common import NUM_CLASSES
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmark.measuring import BenchmarkRun
from benchmark.setting import SEED


class _StepTimer(TrainerCallback):
    """Trainer callback that tells a run of the benchmark when an optimizer step has ended."""

    def __init__(self, run: BenchmarkRun) -> None:
        self.run = run

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the end of an optimizer step, and wait until the next window may begin."""
        self.run.step_done()


def train_with_trainer(
    run: BenchmarkRun, strategy: str = "random", trainer_class: type[Trainer] = Trainer
) -> None:
    """Train with transformers' Trainer, or a subclass, until the benchmark is over.

    Args:
        run: The measured run of the benchmark.
        strategy: Trainer's `train_sampling_strategy`.
        trainer_class: Trainer or a subclass.
    """
    setting = run.setting
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
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
            seed=SEED,
            remove_unused_columns=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        # With several GPUs Trainer would wrap the model in DataParallel.
        arguments._n_gpu = 1
        trainer = trainer_class(
            model=run.model,
            args=arguments,
            train_dataset=setting.samples,
            data_collator=run.collate,
            callbacks=[_StepTimer(run)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def full_rows(run: BenchmarkRun, backend: str | None = None) -> None:
    """Train on full rows of one length until the benchmark is over, without hf_ga: what the machine
    does with as many tokens where nothing is padded, and no mask keeps samples apart.

    A window has as few micro-batches as its real tokens allow, on average over the epoch.

    Args:
        run: The measured run of the benchmark.
        backend: That of torch.compile, which compiles the model for this shape. None: it does not.
    """
    setting = run.setting
    run.has_samples = False
    if backend is not None:
        run.model.compile(dynamic=False, backend=backend)
    num_tokens = setting.real_tokens / setting.windows_per_epoch
    size = setting.micro_batch_size
    num_batches = math.ceil(num_tokens / (size * setting.max_length))
    length = math.ceil(num_tokens / num_batches / size)
    ids = torch.tensor([token for sample in setting.samples for token in sample["input_ids"]])
    num_rows = setting.windows_per_epoch * num_batches * size
    rows = ids[torch.arange(num_rows * length) % len(ids)].view(num_rows, length)
    optimizer = run.optimizer()
    is_bf16 = setting.mixed_precision == "bf16"
    while True:  # until `step_done` raises
        for number, batch in enumerate(rows.split(size), start=1):
            batch = batch.to(setting.device)
            labels = batch
            if setting.model == "bert":
                labels = torch.arange(size, device=setting.device) % NUM_CLASSES
            with torch.autocast(setting.device, torch.bfloat16, enabled=is_bf16):
                loss = run.model(input_ids=batch, labels=labels).loss
            (loss / num_batches).backward()
            if number % num_batches == 0:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                run.step_done()
