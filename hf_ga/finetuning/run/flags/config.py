"""The flags of `scripts/finetune.py` as a dataclass, checked before any data is read."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from hf_ga.embedding.pooling import POOLINGS
from hf_ga.engine.checks.nonfinite import ON_NONFINITE
from hf_ga.errors import ConfigError
from hf_ga.finetuning.data.options import DataOptions, as_list, option
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.flags.config_checks import check_fields, check_one_of, check_output_dir
from hf_ga.finetuning.run.optimizers import ADAM, OPTIMIZERS, SCHEDULES
from hf_ga.order.layout import Layout

DEFAULT_ACCUMULATION_STEPS = 4
# The value of `class_weights` that computes the weights from the labels.
BALANCED = "balanced"
# The value of `torch_compile` that compiles if it saves more time than it takes.
AUTO = "auto"
# HfArgumentParser parses a flag by the type before None: here, a list of strings.
ClassWeights = list[str] | None | list[float] | str
# Temperature of the embedding loss, by which cosine similarities are divided.
DEFAULT_TEMPERATURE = 0.05
# Flags with a fixed set of values.
_CHOICES = {
    "task": TASKS,
    "optim": OPTIMIZERS,
    "lr_scheduler_type": SCHEDULES,
    "on_nonfinite": ON_NONFINITE,
    "mixed_precision": ("no", "bf16", "fp16"),
    "pooling": POOLINGS,
    "truncation_side": ("right", "left"),
    "torch_compile": (True, False, AUTO),
}
# Flags that apply to some tasks only: names of the tasks -> flags.
_FLAGS_OF_TASKS: dict[tuple[str, ...], str] = {
    ("causal-lm",): "show_samples",
    ("causal-lm", "masked-lm"): "block_size",
    ("causal-lm", "text-classification"): "streaming",
    ("text-classification", "token-classification"): "class_weights",
    # Tasks whose loss is one mean cross entropy over classes.
    (
        "causal-lm",
        "masked-lm",
        "text-classification",
        "token-classification",
        "seq2seq",
    ): "label_smoothing_factor weight_column",
    (
        "text-classification",
        "regression",
        "multi-label",
        "question-answering",
        "multiple-choice",
        "embedding",
    ): "text_pair_column",
    ("multiple-choice",): "choices_column",
    ("question-answering",): "doc_stride",
    ("seq2seq",): "target_column source_prefix max_target_length predict_with_generate",
    ("embedding",): "pooling temperature learn_temperature symmetric_loss matryoshka_dims",
    tuple(task for task in TASKS if task != "embedding"): "lora_r adapter_name_or_path",
    # Language models predict with pipeline(), embedding models with SentenceTransformer().
    tuple(
        task for task in TASKS if task not in ("causal-lm", "masked-lm", "embedding")
    ): "predict_file",
}
# Flags, of which one is needed -> the flags that need it.
_NEEDS: dict[tuple[str, ...], str] = {
    ("lora_r",): "lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_dora",
    ("lora_r", "adapter_name_or_path"): "load_in_4bit",
    ("model_name_or_path",): "resize_token_embeddings eval_only",
    ("resume_from_checkpoint",): "resume_with_changes",
    ("max_steps",): "streaming",
}
# Two flags that exclude each other, and the reason.
_EXCLUDED = (
    ("weight_column", "block_size", "blocks join the texts of several rows"),
    ("truncation_side", "block_size", "blocks truncate no text"),
    (
        "lora_r",
        "adapter_name_or_path",
        "the one creates new adapters, the other loads existing ones",
    ),
    ("freeze", "lora_r", "adapters freeze all other weights"),
    ("freeze", "adapter_name_or_path", "adapters freeze all other weights"),
    ("eval_only", "resume_from_checkpoint", "model_name_or_path names the model to evaluate"),
    ("eval_only", "push_to_hub", "no model is trained; upload one with `hf upload`"),
    ("streaming", "eval_only", "no training rows are read"),
    ("streaming", "block_size", "blocks need all training rows first"),
    ("streaming", "max_train_samples", "max_steps limits the training rows"),
)


@dataclass
class FinetuneConfig(DataOptions):
    """All flags of a fine-tuning run, with their defaults and help texts. The device and the number
    of processes are those of `accelerate launch` and its configuration.

    Example:
        config = FinetuneConfig(model_name_or_path="gpt2", dataset_name="data.jsonl")
        hf_ga.finetune(config)
    """

    # model
    model_name_or_path: str | None = option(
        None, "Hub id or local folder. Default: a small model built from scratch."
    )
    trust_remote_code: bool = option(False, "Allow code from the model's repository.")
    resize_token_embeddings: bool = option(
        False,
        "Resize the token embeddings if the tokenizer has more tokens than the model. As in "
        "transformers, new rows are drawn around the mean of the others; with LoRA they are "
        "trained, too.",
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward: less memory, more time."
    )
    torch_compile: bool | str = option(
        False,
        "Compile the model's repeated layers with torch.compile: two or three graphs. "
        f"`{AUTO}`: on a GPU, if the run is long enough.",
    )
    freeze: list[str] | None = option(
        None, "Name patterns of parameters to freeze, such as 'bert.embeddings.*'."
    )
    lora_r: int | None = option(
        None,
        "Rank of LoRA adapters (needs the extra `finetune`); other weights are frozen. Default: no "
        "LoRA.",
    )
    lora_alpha: float | None = option(
        None, "LoRA scales by lora_alpha / lora_r. Default: 2 x lora_r."
    )
    lora_dropout: float = option(0.0, "Dropout probability in the adapters.")
    lora_target_modules: list[str] | None = option(
        None, "Names of the linear layers with adapters. Default: all."
    )
    lora_modules_to_save: list[str] | None = option(
        None, "Names of modules whose weights are all trained, besides adapters and new heads."
    )
    use_dora: bool = option(
        False,
        "Use DoRA: adapters that learn the magnitude of the weights separately from the direction.",
    )
    adapter_name_or_path: str | None = option(
        None, "Hub id or local folder of an adapter to train further, with its own settings."
    )
    load_in_4bit: bool = option(
        False, "QLoRA: 4-bit (NF4) frozen weights under the adapters (needs the extra `qlora`)."
    )
    # loss
    label_smoothing_factor: float = option(
        0.0, "Label smoothing of the training loss (not of validation losses)."
    )
    class_weights: ClassWeights = option(
        None,
        "text-classification, token-classification: weights of the classes in the loss of training "
        "and evaluations: `balanced` (targets / (classes x targets of the class), as in "
        "scikit-learn), or one number above 0 for each class, in the order of the labels.",
    )
    # embedding
    pooling: str | None = option(
        None,
        f"embedding: how a text's tokens become one vector, one of: {', '.join(POOLINGS)}. "
        "Default: the one that sentence-transformers saved with the model, otherwise mean.",
    )
    temperature: float | None = option(
        None,
        "embedding: temperature of the loss, by which cosines are divided; with "
        f"learn_temperature, its initial value. Default: {DEFAULT_TEMPERATURE}.",
    )
    learn_temperature: bool = option(False, "embedding: learn the temperature (pairs).")
    symmetric_loss: bool = option(
        False,
        "embedding: average the loss of finding each anchor's positive and that of finding each "
        "positive's anchor (pairs).",
    )
    matryoshka_dims: list[int] | None = option(
        None,
        "embedding: sum the loss over vectors truncated to these sizes, so that truncated vectors "
        "can be used, too. Include the full size.",
    )
    # batch
    per_device_train_batch_size: int = option(
        8, "Samples of maximum length in one micro-batch; every value gives the same update."
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens in one micro-batch, padding included (samples x longest sample), so "
        "micro-batches of short samples have more samples. "
        "Default: per_device_train_batch_size x the longest sample.",
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Micro-batches per process and optimizer step. Default: from global_batch_size, else "
        f"{DEFAULT_ACCUMULATION_STEPS}.",
    )
    global_batch_size: int | None = option(
        None,
        "Samples in one optimizer step over all processes (the window). Default: processes x "
        "micro-batch x accumulation.",
    )
    same_bits: int | None = option(
        None,
        "Make the weights the same to the last bit on any number of processes (not under FSDP). "
        "The value is the number of samples of maximum length in each forward: set the largest "
        "one that fits into memory, at most per_device_train_batch_size. A CPU process uses one "
        "thread.",
    )
    drop_last_window: bool = option(False, "Drop the short last window of each epoch.")
    dataloader_num_workers: int = option(0, "Number of processes that prefetch windows; 0: none.")
    # optimization
    learning_rate: float | None = option(
        None,
        "Peak learning rate. Default: 5e-5 for a pretrained model, 1e-3 for one from scratch, "
        "2e-4 for LoRA.",
    )
    weight_decay: float = option(0.01, "Weight decay of matrices; none for norms and biases.")
    optim: str = option("adamw", f"One of: {', '.join(OPTIMIZERS)}.")
    adam_beta1: float = option(
        0.9, "Decay rate of the average gradient (adamw, adam, nadam, radam)."
    )
    adam_beta2: float = option(
        0.999, "Decay rate of the average squared gradient (the same optimizers)."
    )
    adam_epsilon: float = option(1e-8, "Term added to the denominator (the same optimizers).")
    lr_scheduler_type: str = option(
        "cosine", f"Schedule over optimizer steps, one of: {', '.join(SCHEDULES)}."
    )
    warmup_steps: float = option(
        20.0, "Optimizer steps of linear warmup; below 1: a fraction of all steps."
    )
    num_train_epochs: float = option(2.0, "Number of passes over the training data.")
    max_steps: int | None = option(None, "Number of optimizer steps; overrides num_train_epochs.")
    max_grad_norm: float = option(
        1.0, "Global L2 norm to clip the window's gradient to; 0: no clipping."
    )
    fsdp_reduce_each_micro_batch: bool = option(
        False, "FSDP: reduce gradients in every micro-batch: less memory, more communication."
    )
    on_nonfinite: str = option(
        "stop",
        f"Action on a non-finite loss or gradient, one of: {', '.join(ON_NONFINITE)} (the window).",
    )
    mixed_precision: str | None = option(
        None, "no, bf16 or fp16. Default: that of `accelerate launch`."
    )
    tf32: bool = option(
        False,
        "On a GPU in float32, round the inputs of matrix products to TF32 (10 bits): faster, less "
        "exact.",
    )
    seed: int = option(0, "Seed of order, dropout and initial weights.")
    allow_split_dependent_randomness: bool = option(
        False,
        "Allow random draws that depend on how the window is split into micro-batches: updates "
        "then depend on the split, too.",
    )
    full_determinism: bool = option(
        False, "Use deterministic kernels only (slower on a GPU, but bit for bit reproducible)."
    )
    # evaluation and output
    per_device_eval_batch_size: int = option(
        32, "Maximum samples in one evaluation batch; results do not depend on it."
    )
    eval_steps: int | None = option(
        None, "Optimizer steps between evaluations. Default: once per epoch."
    )
    predict_with_generate: bool = option(
        False, "seq2seq: generate texts in evaluations, for generation metrics."
    )
    max_new_tokens: int = option(64, "seq2seq: maximum tokens to generate per row.")
    num_beams: int = option(1, "seq2seq: number of beams for beam search; 1: greedy.")
    metric_for_best_model: str = option(
        "loss", "Validation metric for `best/` and early stopping: loss, or a metric of the task."
    )
    early_stopping_patience: int | None = option(
        None, "Stop after this many evaluations without improvement. Default: never."
    )
    save_steps: int | None = option(
        None, "Optimizer steps between checkpoints. Default: once per epoch."
    )
    save_total_limit: int = option(
        2, "Maximum number of checkpoints to keep; older ones are deleted."
    )
    report_to: str = option(
        "none", "Comma-separated trackers (tensorboard, wandb, ...), all (installed ones), or none."
    )
    run_name: str | None = option(
        None, "Name of the run in the trackers. Default: the last folder of output_dir."
    )
    project: str = option(
        "hf_ga", "Project of the run in the trackers (in MLflow: the experiment)."
    )
    output_dir: str = option("outputs/finetune", "Folder for metrics, checkpoints and the model.")
    resume_from_checkpoint: str | None = option(
        None, "`auto` (the newest in output_dir, if any) or the folder of a checkpoint."
    )
    resume_with_changes: bool = option(
        False, "Resume with settings or data that differ from the checkpoint's (a different run)."
    )
    # upload
    push_to_hub: bool = option(
        False, "Upload the trained model to the Hugging Face Hub after the run."
    )
    hub_model_id: str | None = option(
        None,
        "Repository for the upload: name or user/name. Default: the last folder of output_dir.",
    )
    hub_private_repo: bool = option(False, "Make the repository private if it does not exist yet.")

    def __post_init__(self) -> None:
        """Convert the flag `class_weights`, which the command line passes as a list of strings:
        numbers to floats, and the list of the single word `balanced` to this word.
        """
        super().__post_init__()
        weights = self.class_weights
        if not isinstance(weights, list):
            return
        # If one is not a number, all stay strings, and `check` raises an error that quotes them.
        with suppress(TypeError, ValueError, OverflowError):
            weights = [float(weight) for weight in weights]
        is_one_word = len(weights) == 1 and isinstance(weights[0], str)
        self.class_weights = weights[0] if is_one_word else weights

    def layout(self, num_processes: int) -> Layout:
        """Compute from a run's flags the layout of a training window, the global batch of one
        optimizer step: its size in samples, the micro-batch size and the accumulation steps.

        If `gradient_accumulation_steps` is not set, the value given to `accelerate launch` is used.
        If that is not set either, the steps follow from `global_batch_size`; without it, they are
        DEFAULT_ACCUMULATION_STEPS.

        Args:
            num_processes: Number of processes that share the window.

        Raises:
            ConfigError: If the sizes contradict each other, see `Layout.from_sizes`.
        """
        steps = self.gradient_accumulation_steps
        if steps is None:
            # `accelerate launch` always sets this variable, to 1 unless its flag is given.
            launcher_steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
            if launcher_steps.isdigit() and int(launcher_steps) > 1:
                steps = int(launcher_steps)
            elif self.global_batch_size is None:
                steps = DEFAULT_ACCUMULATION_STEPS
        return Layout.from_sizes(
            num_processes,
            self.per_device_train_batch_size,
            steps,
            global_batch_size=self.global_batch_size,
        )

    @property
    def has_adapters(self) -> bool:
        """Whether the run trains LoRA adapters, new or loaded ones, instead of all weights."""
        return self.lora_r is not None or self.adapter_name_or_path is not None

    @property
    def initial_temperature(self) -> float:
        """Return the flag `temperature` of the embedding loss, by default DEFAULT_TEMPERATURE. If
        the temperature is learned, this is its value before the first step.
        """
        return DEFAULT_TEMPERATURE if self.temperature is None else self.temperature

    @property
    def sequence_length(self) -> int:
        """Return the maximum number of tokens in a sample of a run: the flag `block_size` if texts
        are split into blocks, `max_length` otherwise.
        """
        return self.block_size or self.max_length

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of `metric_for_best_model` are better: for losses, perplexity and
        mean absolute error. As in Trainer, any name that ends in `loss` counts as a loss.
        """
        return str(self.metric_for_best_model).endswith(("loss", "perplexity", "mae"))

    def check(self, *, has_own_metrics: bool = False) -> None:
        """Check the values and combinations of all flags, before any data is read. The prefix
        `eval_` of `metric_for_best_model`, which Trainer allows, is removed in place.

        Args:
            has_own_metrics: Whether the user passes `compute_metrics`, so that
                `metric_for_best_model` may have any name.

        Raises:
            ConfigError: If a flag has an unsupported value, or flags exclude each other; the first
                such error.
        """
        check_fields(self)
        for flag, known in _CHOICES.items():
            if getattr(self, flag) is not None:
                check_one_of(flag, getattr(self, flag), known)
        # Raises ConfigError for sizes that fit no layout.
        self.layout(num_processes=1)
        for tasks, flags in _FLAGS_OF_TASKS.items():
            for flag in flags.split():
                if getattr(self, flag) and self.task not in tasks:
                    raise ConfigError(
                        f"{flag} applies to the task {' or '.join(tasks)}, not {self.task}: omit "
                        "it."
                    )
        self.metric_for_best_model = self.metric_for_best_model.removeprefix("eval_")
        if not has_own_metrics:
            task = TASKS[self.task]
            # TASKS lists no metric for language modeling, which is evaluated by perplexity.
            metrics_of_task = task.metrics or ("perplexity",)
            known_metrics = ("loss", *metrics_of_task, *task.generated_metrics)
            metric = self.metric_for_best_model
            check_one_of("metric_for_best_model", metric, known_metrics)
            if metric in task.generated_metrics and not self.predict_with_generate:
                raise ConfigError(
                    f"metric_for_best_model {metric} compares generated texts: set "
                    "--predict_with_generate."
                )
        for needed, flags in _NEEDS.items():
            is_met = any(getattr(self, name) for name in needed)
            for flag in flags.split():
                if getattr(self, flag) and not is_met:
                    raise ConfigError(
                        f"{flag} needs {' or '.join(needed)}: set it, or omit {flag}."
                    )
        for flag, other, reason in _EXCLUDED:
            if getattr(self, flag) and getattr(self, other):
                raise ConfigError(
                    f"{flag} and {other} exclude each other: {reason}. Omit one of them."
                )
        for first_mistake in self._mistakes_in_values():
            raise ConfigError(first_mistake)
        self.check_output_dir()

    def check_output_dir(self) -> None:
        """Check that `output_dir` can be written, and that it contains no other run, whose files
        would be overwritten.

        Raises:
            ConfigError: If it cannot be written, or contains another run.
        """
        check_output_dir(
            self.output_dir, resume_from=self.resume_from_checkpoint, only_adds=self.eval_only
        )

    def _mistakes_in_values(self) -> Iterator[str]:
        """Yield an error message for each flag whose value is impossible, or excludes another."""
        weights = self.class_weights
        are_weights = isinstance(weights, list) and all(
            isinstance(weight, float) for weight in weights
        )
        if weights not in (None, BALANCED) and not are_weights:
            yield (
                f"class_weights must be {BALANCED}, or one number above 0 for each class, got "
                f"{weights!r:.80}."
            )
        if self.doc_stride is not None and self.doc_stride >= self.max_length:
            yield (
                f"doc_stride {self.doc_stride} must be below max_length {self.max_length}: "
                "neighboring windows of max_length tokens must share fewer tokens."
            )
        adam_settings = (self.adam_beta1, self.adam_beta2, self.adam_epsilon)
        if self.optim not in ADAM and adam_settings != (0.9, 0.999, 1e-8):
            yield (
                f"adam_beta1, adam_beta2 and adam_epsilon apply to {', '.join(ADAM)}, not "
                f"{self.optim}: omit them."
            )
        if self.same_bits is not None and self.same_bits > self.per_device_train_batch_size:
            yield (
                f"per_device_train_batch_size {self.per_device_train_batch_size} is smaller than "
                f"one chunk of same_bits {self.same_bits}: set it to at least {self.same_bits}, or "
                "lower same_bits."
            )
        if self.has_adapters and find_spec("peft") is None:
            yield 'adapters need the package peft: pip install "hf_ga[finetune]".'
        if self.load_in_4bit and find_spec("bitsandbytes") is None:
            yield 'adapters need the package bitsandbytes: pip install "hf_ga[qlora]".'
        reads_no_rows_first = self.eval_only or self.streaming
        if self.class_weights == BALANCED and reads_no_rows_first:
            yield (
                "class_weights balanced counts the labels of all training rows first, which "
                "eval_only and streaming do not read: give the numbers (a training run has them in "
                "its summary.json)."
            )
        if self.eval_only and self.resize_token_embeddings and self.adapter_name_or_path is None:
            yield (
                "resize_token_embeddings would evaluate new rows that were never trained: omit it; "
                "the folder of a trained model has all rows."
            )
        is_sorted = "stdlib" in as_list(self.dataset_name)
        if self.streaming and self.task == "text-classification" and is_sorted:
            yield (
                "streaming does not support the embedded corpus stdlib for text-classification, "
                "as its first rows lack most labels: omit streaming, or name files or a dataset."
            )
        if self.streaming and self.dataloader_num_workers > 1:
            yield (
                f"streaming does not support dataloader_num_workers {self.dataloader_num_workers}: "
                "use 1 worker, or 0."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the flags of the run as plain values, for summary.json and experiment trackers."""
        return asdict(self)
