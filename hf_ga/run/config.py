"""The dataclass behind the flags of `scripts/finetune.py`. Derived once, checked once, before any data is read."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hf_ga.data.options import DataOptions, option
from hf_ga.errors import ConfigError
from hf_ga.exact.layout import AUTO, SCALING_RULES, Layout
from hf_ga.recovery.nonfinite import ON_NONFINITE
from hf_ga.run.config_checks import check_config, check_output_dir
from hf_ga.run.metrics import is_lower_better
from hf_ga.run.optimizers import OPTIMIZERS, SCHEDULES

DEFAULT_ACCUMULATION_STEPS = 4


@dataclass
class FinetuneConfig(DataOptions):
    """All flags of a run. Mixed precision, device and number of processes come from `accelerate launch` and its config.

    Example:
        hf_ga.finetune(FinetuneConfig(model_name_or_path="gpt2", dataset_name="data.jsonl", output_dir="outputs/gpt2"))
    """

    # model
    model_name_or_path: str | None = option(None, "Hub id or local folder. Default: a small model built from scratch.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    gradient_checkpointing: bool = option(False, "Compute activations again in the backward: less memory, more time.")
    torch_compile: bool = option(False, "Compile the model's layers, once for all lengths. The model must not draw dropout.")
    padding_free: bool | None = option(
        None,
        "Compute no padding between the model's layers, where the proof finds that the same. Default: on a CPU, without FSDP and "
        "torch_compile (not tried on a GPU yet).",
    )
    freeze: list[str] | None = option(None, "Name patterns of parameters that stay as they are, such as 'bert.embeddings.*'.")
    lora_r: int | None = option(None, "Rank of LoRA adapters (needs the extra `peft`); all other weights stay. Default: no LoRA.")
    lora_alpha: float | None = option(None, "LoRA's scale is lora_alpha / lora_r. Default: 2 x lora_r.")
    lora_dropout: float = option(0.0, "Dropout in the adapters.")
    lora_target_modules: list[str] | None = option(None, "Names of the linear layers that get adapters. Default: all of them.")
    # loss
    label_smoothing: float = option(0.0, "Share of the target that is spread over all classes; validation losses are without it.")
    class_weights: str | None = option(None, "`balanced`, or a weight for each label in the order of their ids: 1,2.5,1.")
    # batch
    per_device_train_batch_size: int | str | None = option(  # of the three a parser of flags takes the text
        8, "Samples of the longest kind in one micro-batch, or `auto`: as many as fit into memory; any number is the same update."
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Most tokens in one micro-batch, padding included (samples x longest of them); the shorter the samples, the more fit. "
        "Two that a CPU computes at once share it. Default: per_device_train_batch_size x the longest sample.",
    )
    gradient_accumulation_steps: int | None = option(
        None, f"Micro-batches per process and optimizer step. Default: from global_batch_size, else {DEFAULT_ACCUMULATION_STEPS}."
    )
    global_batch_size: int | None = option(
        None, "Samples in one optimizer step over all processes (the window). Default: processes x micro-batch x accumulation."
    )
    drop_last_window: bool = option(False, "Leave the short last window of each epoch out.")
    dataloader_num_workers: int = option(0, "Processes that prefetch windows; 0: none.")
    # optimization
    learning_rate: float | None = option(
        None, "Peak rate. Default: 5e-5 for a pretrained model, 1e-3 for one from scratch, 2e-4 for LoRA."
    )
    scale_learning_rate: str | None = option(
        None, f"Rule for a rate that was found with base_batch_size samples a step, one of: {', '.join(SCALING_RULES)}."
    )
    base_batch_size: int | None = option(None, "Samples in one optimizer step that learning_rate was found with.")
    weight_decay: float = option(0.01, "Decay of matrices; norms and biases have none.")
    optim: str = option("adamw", f"One of: {', '.join(OPTIMIZERS)}.")
    lr_scheduler_type: str = option("cosine", f"Schedule over optimizer steps, one of: {', '.join(SCHEDULES)}.")
    warmup_steps: float = option(20.0, "Optimizer steps of linear warm-up; below 1: a share of all steps.")
    num_train_epochs: float = option(2.0, "Passes over the training data.")
    max_steps: int | None = option(None, "Optimizer steps; wins over num_train_epochs.")
    max_grad_norm: float = option(1.0, "Global L2 norm to clip the window's gradient to; 0: no clipping.")
    sync_each_micro_batch: bool = option(False, "FSDP: reduce gradients in every micro-batch: less memory, more traffic.")
    on_nonfinite: str = option("stop", f"Where a loss or gradient is not finite, one of: {', '.join(ON_NONFINITE)} (the window).")
    seed: int = option(0, "Of order, dropout and initial weights.")
    allow_unkeyed: bool = option(False, "Train although some random draws depend on how the window is split.")
    deterministic: bool = option(False, "Only deterministic kernels (on a GPU slower, and bit for bit repeatable).")
    # evaluation and output
    per_device_eval_batch_size: int = option(32, "Most samples in one evaluation batch; the result does not depend on it.")
    eval_steps: int | None = option(None, "Optimizer steps between evaluations. Default: once per epoch.")
    eval_on_start: bool = option(False, "Evaluate before the first step too.")
    predict_with_generate: bool = option(False, "seq2seq: generate in evaluations too, for metrics of the texts.")
    max_new_tokens: int = option(64, "causal-lm, seq2seq: most tokens to generate for a row.")
    num_beams: int = option(1, "causal-lm, seq2seq: beams of the search for the likeliest text; 1: the likeliest token each time.")
    metric_for_best_model: str = option(
        "loss", "Validation metric that chooses `best/` and stops early: loss, or one of the task's."
    )
    early_stopping_patience: int | None = option(None, "Stop after so many evaluations without a better metric. Default: never.")
    save_steps: int | None = option(None, "Optimizer steps between checkpoints. Default: once per epoch.")
    save_total_limit: int = option(2, "Checkpoints to keep.")
    report_to: str = option("none", "Trackers, with commas between: tensorboard, wandb, ...; `all` that are installed, or none.")
    output_dir: str = option("outputs/finetune", "Folder for metrics, checkpoints and the model.")
    overwrite_output_dir: bool = option(False, "Delete what an earlier run left in output_dir.")
    resume_from_checkpoint: str | None = option(
        None, "`auto` (the newest in output_dir; starts anew where there is none) or the folder of a checkpoint."
    )
    resume_with_changes: bool = option(False, "Resume although settings or data are others than the checkpoint's: another run.")

    def __post_init__(self) -> None:
        """Paths become strings, as they go into summary.json; the batch size, which may be a word, becomes a number."""
        for name, value in asdict(self).items():
            if isinstance(value, os.PathLike):
                setattr(self, name, os.fspath(value))
        if isinstance(size := self.per_device_train_batch_size, str):
            with suppress(ValueError):
                self.per_device_train_batch_size = int(size)

    def layout(self, num_processes: int) -> Layout:
        """The layout of a window; see `Layout.from_sizes`.

        Raises:
            ConfigError: sizes that fit no layout, or accumulation given here and to `accelerate launch` with different values.
        """
        steps = self.gradient_accumulation_steps
        launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
        if launched.isdigit() and int(launched) > 1:
            if steps not in (None, int(launched)):
                raise ConfigError(
                    f"gradient accumulation is given twice: gradient_accumulation_steps {steps} here, {launched} by the launcher "
                    "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS, which Accelerate prefers). Give it once."
                )
            steps = int(launched)
        if self.per_device_train_batch_size == AUTO:
            return Layout.whole_shares(num_processes, steps, self.global_batch_size)
        if steps is None and self.global_batch_size is None:
            steps = DEFAULT_ACCUMULATION_STEPS
        return Layout.from_sizes(num_processes, self.per_device_train_batch_size, steps, global_batch_size=self.global_batch_size)

    @property
    def sequence_length(self) -> int:
        """Most tokens in a sample."""
        return self.block_size or self.max_length

    @property
    def lower_is_better(self) -> bool:
        """Of `metric_for_best_model`."""
        return is_lower_better(self.metric_for_best_model)

    def check(self) -> None:
        """Check everything that can be checked without data.

        Raises:
            ConfigError: the first rule that is broken.
        """
        check_config(self)
        self.check_output_dir()

    def check_output_dir(self) -> None:
        """A part of `check`: that the folder can be written, and that no run in it would be lost."""
        check_output_dir(self)

    def to_dict(self) -> dict[str, Any]:
        """The flags as plain values, for JSON."""
        return asdict(self)
