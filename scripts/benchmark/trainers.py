"""The arms that are transformers' Trainer or TRL's: their own training loop, watched by a callback."""

import tempfile
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmark.lap import Lap, Refused
from benchmark.meters import CountedCollate
from hf_ga.data import corpus


class _Meter(TrainerCallback):
    """Starts the meters where an epoch begins, before its first batch is asked for, and stops them behind its last step."""

    def __init__(self, lap: Lap) -> None:
        self.lap = lap

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.lap.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.lap.step_done()
        if state.global_step == state.max_steps:
            self.lap.end()


def default(lap: Lap) -> None:
    """Samples in random order."""
    _train(lap, Trainer, TrainingArguments, train_sampling_strategy="random")


def group_by_length(lap: Lap) -> None:
    """Samples of similar lengths side by side: another order of training."""
    _train(lap, Trainer, TrainingArguments, train_sampling_strategy="group_by_length")


def batch_rebalance(lap: Lap) -> None:
    """Each window sorted and cut into micro-batches of about equal cost."""
    _train(lap, Trainer, TrainingArguments, train_sampling_strategy="batch_rebalance")


def sft(lap: Lap) -> None:
    """TRL's trainer with its own padding collator."""
    _sft(lap, padding_free=False)


def sft_padding_free(lap: Lap) -> None:
    """TRL's trainer with a micro-batch in one row."""
    _sft(lap, padding_free=True)


def _sft(lap: Lap, padding_free: bool) -> None:
    if lap.setting.model != "gpt":
        raise Refused("SFTTrainer trains causal language models only")
    try:
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise Refused(f"TRL cannot be imported here: {error}") from error
    own = {"gradient_checkpointing": False, "padding_free": padding_free, "dataset_kwargs": {"skip_prepare_dataset": True}}
    _train(lap, SFTTrainer, SFTConfig, max_length=None, **own)


def _train(lap: Lap, trainer_class: type[Trainer], arguments_class: type[TrainingArguments], **more: Any) -> None:
    """A short run to warm up, then one epoch."""

    class Timed(trainer_class):
        """Its training step is what counts as forward and backward."""

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with lap.stopwatch.counted():
                return super().training_step(*args, **kwargs)

    is_sft = "dataset_kwargs" in more
    with tempfile.TemporaryDirectory() as folder:
        for samples in (lap.warmup_samples, lap.samples):
            settings = arguments_class(**_arguments(lap, folder), **more)
            settings._n_gpu = 1  # on a machine with several it would put the model into DataParallel
            given = {"processing_class": corpus.load_stdlib_tokenizer()} if is_sft else {"data_collator": lap.collate}
            trainer = Timed(
                model=lap.model,
                args=settings,
                train_dataset=Dataset.from_list(samples) if is_sft else samples,
                callbacks=[_Meter(lap)] if samples is lap.samples else [],
                **given,
            )
            if is_sft:  # it refuses another collator where there is no padding
                lap.collate = trainer.data_collator = CountedCollate(trainer.data_collator)
            trainer.remove_callback(PrinterCallback)
            trainer.train()


def _arguments(lap: Lap, folder: str) -> dict[str, Any]:
    setting = lap.setting
    return {
        "output_dir": folder,
        "per_device_train_batch_size": setting.micro_batch_size,
        "gradient_accumulation_steps": setting.accumulation_steps,
        "num_train_epochs": 1,
        "learning_rate": setting.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": setting.max_grad_norm,
        "optim": "adamw_torch_fused",
        "bf16": setting.mixed_precision == "bf16",
        "use_cpu": setting.device == "cpu",
        "seed": setting.seed,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
