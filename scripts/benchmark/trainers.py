"""The arms of transformers' Trainer and hf_ga's ExactTrainer: their own training loops, timed by a callback."""

import tempfile
from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmark.lap import Lap


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
    **given: Any,
) -> None:
    """Train with one of Trainer's sampling strategies, or with another trainer. given: what it takes besides."""
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
        given = {"train_dataset": setting.samples} | given
        trainer = trainer_class(model=lap.model, args=arguments, data_collator=lap.collate, callbacks=[_Clock(lap)], **given)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
