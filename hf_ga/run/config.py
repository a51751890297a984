"""The flags of `scripts/finetune.py` as a dataclass: derived once, checked once, before any data is read."""

import os
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from hf_ga.data.options import DataOptions, option
from hf_ga.data.tasks import TASKS
from hf_ga.errors import ConfigError
from hf_ga.exact.layout import Layout
from hf_ga.recovery.nonfinite import ON_NONFINITE
from hf_ga.run.config_checks import check_bounds, check_one_of, check_output_dir, check_types
from hf_ga.run.optimizers import OPTIMIZERS, SCHEDULES

DEFAULT_ACCUMULATION_STEPS = 4
STREAMED_TASKS = ("causal-lm", "text-classification")
_OF_TASKS: dict[str, tuple[str, ...]] = {  # flags that only some tasks know
    "block_size": ("causal-lm",),
    "label_smoothing_factor": ("causal-lm", "masked-lm", "text-classification", "token-classification", "seq2seq"),
    "text_pair_column": ("text-classification", "regression", "multi-label", "question-answering", "multiple-choice"),
    "choices_column": ("multiple-choice",),
    "target_column": ("seq2seq",),
    "predict_file": tuple(task for task in TASKS if task not in ("causal-lm", "masked-lm")),  # transformers.pipeline does
    "predict_with_generate": ("seq2seq",),
}


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
    freeze: list[str] | None = option(None, "Name patterns of parameters that stay as they are, such as 'bert.embeddings.*'.")
    lora_r: int | None = option(None, "Rank of LoRA adapters (needs the extra `peft`); all other weights stay. Default: no LoRA.")
    lora_alpha: float | None = option(None, "LoRA's scale is lora_alpha / lora_r. Default: 2 x lora_r.")
    lora_dropout: float = option(0.0, "Dropout in the adapters.")
    lora_target_modules: list[str] | None = option(None, "Names of the linear layers that get adapters. Default: all of them.")
    # loss
    label_smoothing_factor: float = option(0.0, "Share of each target that is spread over all classes; not in validation losses.")
    # batch
    per_device_train_batch_size: int = option(8, "Samples of the longest kind in one micro-batch; any number is the same update.")
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Most tokens in one micro-batch, padding included (samples x longest of them); the shorter the samples, the more fit. "
        "Default: per_device_train_batch_size x the longest sample.",
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
    weight_decay: float = option(0.01, "Decay of matrices; norms and biases have none.")
    optim: str = option("adamw", f"One of: {', '.join(OPTIMIZERS)}.")
    lr_scheduler_type: str = option("cosine", f"Schedule over optimizer steps, one of: {', '.join(SCHEDULES)}.")
    warmup_steps: float = option(20.0, "Optimizer steps of linear warm-up; below 1: a share of all steps.")
    num_train_epochs: float = option(2.0, "Passes over the training data.")
    max_steps: int | None = option(None, "Optimizer steps; wins over num_train_epochs.")
    max_grad_norm: float = option(1.0, "Global L2 norm to clip the window's gradient to; 0: no clipping.")
    fsdp_reduce_each_micro_batch: bool = option(
        False, "FSDP: reduce gradients in every micro-batch: less memory, more communication."
    )
    on_nonfinite: str = option("stop", f"At a loss or gradient that is not finite, one of: {', '.join(ON_NONFINITE)} (the window).")
    seed: int = option(0, "Seed of order, dropout and initial weights.")
    allow_split_dependent_randomness: bool = option(
        False, "Train although some random draws depend on how the window is split: not the same update for every split."
    )
    full_determinism: bool = option(False, "Use deterministic kernels only (slower on a GPU, and bit for bit repeatable).")
    # evaluation and output
    per_device_eval_batch_size: int = option(32, "Most samples in one evaluation batch; the result does not depend on it.")
    eval_steps: int | None = option(None, "Optimizer steps between evaluations. Default: once per epoch.")
    predict_with_generate: bool = option(False, "seq2seq: generate in evaluations too, for metrics of the texts.")
    max_new_tokens: int = option(64, "seq2seq: most tokens to generate for a row.")
    num_beams: int = option(1, "seq2seq: beams of the search for the likeliest text; 1: the likeliest token each time.")
    metric_for_best_model: str = option(
        "loss", "Validation metric that chooses `best/` and stops early: loss, or one of the task's."
    )
    early_stopping_patience: int | None = option(None, "Stop after so many evaluations without a better metric. Default: never.")
    save_steps: int | None = option(None, "Optimizer steps between checkpoints. Default: once per epoch.")
    save_total_limit: int = option(2, "Checkpoints to keep.")
    report_to: str = option("none", "Trackers, with commas between: tensorboard, wandb, ...; `all` that are installed, or none.")
    output_dir: str = option("outputs/finetune", "Folder for metrics, checkpoints and the model.")
    resume_from_checkpoint: str | None = option(
        None, "`auto` (the newest in output_dir; starts anew where there is none) or the folder of a checkpoint."
    )
    resume_with_changes: bool = option(False, "Resume although settings or data are others than the checkpoint's: another run.")

    def __post_init__(self) -> None:
        """Paths become strings, as they go into summary.json."""
        for name, value in list(vars(self).items()):
            if isinstance(value, os.PathLike):
                setattr(self, name, os.fspath(value))

    def layout(self, num_processes: int) -> Layout:
        """The layout of a window; see `Layout.from_sizes`. The launcher's accumulation steps count where none are given here.

        Raises:
            ConfigError: sizes that fit no layout.
        """
        steps = self.gradient_accumulation_steps
        launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
        if steps is None and launched.isdigit() and int(launched) > 1:  # `accelerate launch` always sets it, by default to 1
            steps = int(launched)
        elif steps is None and self.global_batch_size is None:
            steps = DEFAULT_ACCUMULATION_STEPS
        return Layout.from_sizes(num_processes, self.per_device_train_batch_size, steps, global_batch_size=self.global_batch_size)

    @property
    def sequence_length(self) -> int:
        """Most tokens in a sample."""
        return self.block_size or self.max_length

    @property
    def lower_is_better(self) -> bool:
        """Of `metric_for_best_model`."""
        return self.metric_for_best_model in ("loss", "perplexity", "mae")

    def check(self) -> None:
        """Check everything that can be checked without data.

        Raises:
            ConfigError: the first rule that is broken.
        """
        check_types(self)
        for name, known in {
            "task": TASKS,
            "optim": OPTIMIZERS,
            "lr_scheduler_type": SCHEDULES,
            "on_nonfinite": ON_NONFINITE,
        }.items():
            check_one_of(name, getattr(self, name), known)
        check_bounds(self)
        self.layout(num_processes=1)
        self._check_task()
        self._check_combinations()
        if self.streaming:
            self._check_streaming()
        self.check_output_dir()

    def check_output_dir(self) -> None:
        """A part of `check`: that the folder can be written, and that no run in it would be lost."""
        check_output_dir(self.output_dir, resume_from=self.resume_from_checkpoint, only_adds=self.eval_only)

    def _check_task(self) -> None:
        """Flags and metrics that only some tasks know."""
        for name, tasks in _OF_TASKS.items():
            if getattr(self, name) and self.task not in tasks:
                raise ConfigError(f"{name} is for the task {' or '.join(tasks)}, not {self.task}: leave it out.")
        self.metric_for_best_model = self.metric_for_best_model.removeprefix("eval_")
        metric, task = self.metric_for_best_model, TASKS[self.task]
        check_one_of("metric_for_best_model", metric, ("loss", *(task.metrics or ("perplexity",)), *task.generated_metrics))
        if metric in task.generated_metrics and not self.predict_with_generate:
            raise ConfigError(f"metric_for_best_model {metric} compares generated texts: give --predict_with_generate, too.")

    def _check_combinations(self) -> None:
        """Flags that need or exclude each other."""
        if self.lora_r is None and (self.lora_target_modules or self.lora_alpha or self.lora_dropout):
            raise ConfigError("lora_alpha, lora_dropout and lora_target_modules need lora_r, the rank of the adapters.")
        if self.lora_r is not None and find_spec("peft") is None:
            raise ConfigError("lora_r needs the package peft: pip install 'hf_ga[peft]'.")
        if self.lora_r is not None and self.freeze:
            raise ConfigError("freeze has no use with lora_r, which freezes all weights but the adapters: leave one of them out.")
        if self.resume_with_changes and self.resume_from_checkpoint is None:
            raise ConfigError("resume_with_changes needs a checkpoint: set resume_from_checkpoint, or leave it out.")
        if self.eval_only and self.resume_from_checkpoint is not None:
            raise ConfigError("eval_only does not resume: name the folder of the model with model_name_or_path.")
        if self.eval_only and self.model_name_or_path is None:
            raise ConfigError("eval_only needs a model: name it with model_name_or_path.")

    def _check_streaming(self) -> None:
        """What cannot be done with rows that are read once, in order."""
        refused = {
            f"the task {self.task} (it reads all training rows first)": self.task not in STREAMED_TASKS,
            "block_size": self.block_size,
            "eval_only": self.eval_only,
            "the embedded corpus stdlib": self.dataset_name == "stdlib",
            f"dataloader_num_workers {self.dataloader_num_workers} (one worker reads ahead)": self.dataloader_num_workers > 1,
        }
        if found := [what for what, is_asked in refused.items() if is_asked]:
            raise ConfigError(f"streaming does not go with {found[0]}: change it, or leave streaming out.")
        if self.max_steps is None:
            raise ConfigError("streaming needs max_steps: the number of rows of a stream is unknown.")

    def to_dict(self) -> dict[str, Any]:
        """The flags as plain values, for JSON."""
        return asdict(self)
