"""The flags of `scripts/finetune.py` as a dataclass, checked before any data is read."""

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

from hf_ga.embedding.pooling import POOLINGS
from hf_ga.errors import ConfigError
from hf_ga.exact.layout import Layout
from hf_ga.finetuning.data.options import DataOptions, as_list, option
from hf_ga.finetuning.data.tasks import TASKS
from hf_ga.finetuning.run.config_checks import check_fields, check_one_of, check_output_dir
from hf_ga.finetuning.run.optimizers import ADAM, OPTIMIZERS, SCHEDULES
from hf_ga.recovery.nonfinite import ON_NONFINITE

DEFAULT_ACCUMULATION_STEPS = 4
BALANCED = "balanced"  # class_weights
# HfArgumentParser reads the type before None as that of the flag.
ClassWeights = list[str] | None | list[float] | str
STREAMED_TASKS = ("causal-lm", "text-classification")
CROSS_ENTROPY_TASKS = (  # with one mean over classes
    "causal-lm",
    "masked-lm",
    "text-classification",
    "token-classification",
    "seq2seq",
)
TEMPERATURE = 0.05
EMBEDDING_FLAGS = (
    "pooling",
    "temperature",
    "learn_temperature",
    "symmetric_loss",
    "matryoshka_dims",
)
_OF_TASKS: dict[str, tuple[str, ...]] = {  # flags for some tasks only
    "block_size": ("causal-lm", "masked-lm"),
    "show_samples": ("causal-lm",),
    "label_smoothing_factor": CROSS_ENTROPY_TASKS,
    "weight_column": CROSS_ENTROPY_TASKS,
    "class_weights": ("text-classification", "token-classification"),
    "text_pair_column": (
        "text-classification",
        "regression",
        "multi-label",
        "question-answering",
        "multiple-choice",
        "embedding",
    ),
    "choices_column": ("multiple-choice",),
    "target_column": ("seq2seq",),
    "source_prefix": ("seq2seq",),
    "max_target_length": ("seq2seq",),
    "doc_stride": ("question-answering",),
    "predict_file": tuple(  # use pipeline() and SentenceTransformer() for the others
        task for task in TASKS if task not in ("causal-lm", "masked-lm", "embedding")
    ),
    **dict.fromkeys(EMBEDDING_FLAGS, ("embedding",)),
    **dict.fromkeys(
        ("lora_r", "adapter_name_or_path"), tuple(task for task in TASKS if task != "embedding")
    ),
    "predict_with_generate": ("seq2seq",),
}


@dataclass
class FinetuneConfig(DataOptions):
    """All flags of a run. Device and number of processes come from `accelerate launch` and its
    config.

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
        "Add rows to the embeddings for tokens of the tokenizer that the model lacks, drawn around "
        "the mean of the others as transformers does; with LoRA they are trained, too.",
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations in the backward: less memory, more time."
    )
    torch_compile: bool = option(
        False, "Compile the repeated layers of the model: two or three graphs a run."
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
    lora_dropout: float = option(0.0, "Dropout in the adapters.")
    lora_target_modules: list[str] | None = option(
        None, "Names of the linear layers with adapters. Default: all."
    )
    lora_modules_to_save: list[str] | None = option(
        None, "Names of modules to train in full, besides adapters and new heads."
    )
    use_dora: bool = option(False, "DoRA: adapters that train the weights' magnitudes separately.")
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
        "Default: as the model was saved by sentence-transformers, else mean.",
    )
    temperature: float | None = option(
        None,
        "embedding: temperature of the loss, by which cosines are divided; the initial one with "
        f"learn_temperature. Default: {TEMPERATURE}.",
    )
    learn_temperature: bool = option(False, "embedding: learn the temperature (pairs).")
    symmetric_loss: bool = option(
        False,
        "embedding: each positive must find its anchor, too: the mean of both losses (pairs).",
    )
    matryoshka_dims: list[int] | None = option(
        None,
        "embedding: sum the loss over these sizes, so that the first numbers of a vector can be "
        "used alone. Name the full size, too.",
    )
    # batch
    per_device_train_batch_size: int = option(
        8, "Samples of maximum length in one micro-batch; every value gives the same update."
    )
    max_tokens_per_micro_batch: int | None = option(
        None,
        "Maximum tokens in one micro-batch, padding included (samples x longest sample), so "
        "shorter samples make larger ones. "
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
        "The value: number of samples of "
        "maximum length in each forward, the largest that fits into memory, at most "
        "per_device_train_batch_size. A CPU process "
        "uses one thread.",
    )
    drop_last_window: bool = option(False, "Drop the short last window of each epoch.")
    dataloader_num_workers: int = option(0, "Processes that prefetch windows; 0: none.")
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
    num_train_epochs: float = option(2.0, "Passes over the training data.")
    max_steps: int | None = option(None, "Optimizer steps; overrides num_train_epochs.")
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
        "On a GPU in float32, round the factors of products to TF32 (10 bits): faster, less exact.",
    )
    seed: int = option(0, "Seed of order, dropout and initial weights.")
    allow_split_dependent_randomness: bool = option(
        False,
        "Allow random draws that depend on how the window is split: updates then depend on the "
        "split.",
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
    save_total_limit: int = option(2, "Checkpoints to keep.")
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
    hub_token: str | None = option(
        None,
        "Token for the upload; not saved. Default: that of `hf auth login`, or HF_TOKEN.",
        repr=False,
    )
    hub_private_repo: bool = option(False, "Make the repository private if it does not exist yet.")

    def __post_init__(self) -> None:
        """Convert class weights of the command line to numbers."""
        super().__post_init__()
        weights = self.class_weights
        if isinstance(weights, list):
            with suppress(TypeError, ValueError, OverflowError):  # `check` says what is no number
                weights = [float(weight) for weight in weights]
            is_word = len(weights) == 1 and isinstance(weights[0], str)
            self.class_weights = weights[0] if is_word else weights

    def layout(self, num_processes: int) -> Layout:
        """The layout of a window; see `Layout.from_sizes`. Default accumulation steps: the
        launcher's.

        Raises:
            ConfigError: sizes that fit no layout.
        """
        steps = self.gradient_accumulation_steps
        launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
        if (
            steps is None and launched.isdigit() and int(launched) > 1
        ):  # `accelerate launch` always sets it, by default to 1
            steps = int(launched)
        elif steps is None and self.global_batch_size is None:
            steps = DEFAULT_ACCUMULATION_STEPS
        return Layout.from_sizes(
            num_processes,
            self.per_device_train_batch_size,
            steps,
            global_batch_size=self.global_batch_size,
        )

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.lora_r is not None or self.adapter_name_or_path is not None

    @property
    def initial_temperature(self) -> float:
        """The temperature of the loss of embeddings; if it is learned, before the first step."""
        return TEMPERATURE if self.temperature is None else self.temperature

    @property
    def sequence_length(self) -> int:
        """Maximum tokens in a sample."""
        return self.block_size or self.max_length

    @property
    def lower_is_better(self) -> bool:
        """Whether lower values of `metric_for_best_model` are better. As in Trainer, those whose
        name ends in loss, too.
        """
        return str(self.metric_for_best_model).endswith(("loss", "perplexity", "mae"))

    def check(self, *, has_own_metrics: bool = False) -> None:
        """Check everything that can be checked without data.

        Args:
            has_own_metrics: `metric_for_best_model` may have any name.

        Raises:
            ConfigError: the first rule that is broken.
        """
        check_fields(self)
        check_one_of("task", self.task, TASKS)
        check_one_of("optim", self.optim, OPTIMIZERS)
        check_one_of("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        check_one_of("on_nonfinite", self.on_nonfinite, ON_NONFINITE)
        check_one_of("mixed_precision", self.mixed_precision or "no", ("no", "bf16", "fp16"))
        check_one_of("pooling", self.pooling or "mean", POOLINGS)
        check_one_of("truncation_side", self.truncation_side or "right", ("right", "left"))
        self.layout(num_processes=1)
        self._check_task(has_own_metrics)
        self._check_combinations()
        if self.streaming:
            self._check_streaming()
        self.check_output_dir()

    def check_output_dir(self) -> None:
        """Check that the folder can be written and contains no run to lose; a part of `check`."""
        check_output_dir(
            self.output_dir, resume_from=self.resume_from_checkpoint, only_adds=self.eval_only
        )

    def _check_task(self, has_own_metrics: bool) -> None:
        for name, tasks in _OF_TASKS.items():
            if getattr(self, name) and self.task not in tasks:
                raise ConfigError(
                    f"{name} applies to the task {' or '.join(tasks)}, not {self.task}: omit it."
                )
        self.metric_for_best_model = self.metric_for_best_model.removeprefix("eval_")
        metric, task = self.metric_for_best_model, TASKS[self.task]
        if has_own_metrics:
            return
        check_one_of(
            "metric_for_best_model",
            metric,
            ("loss", *(task.metrics or ("perplexity",)), *task.generated_metrics),
        )
        if metric in task.generated_metrics and not self.predict_with_generate:
            raise ConfigError(
                f"metric_for_best_model {metric} compares generated texts: set "
                "--predict_with_generate."
            )

    def _check_combinations(self) -> None:
        """Check flags that need or exclude each other."""
        if self.class_weights is not None:
            self._check_class_weights()
        small = [dim for dim in self.matryoshka_dims or () if dim < 1]
        if small:
            raise ConfigError(f"matryoshka_dims must be at least 1, got {small[0]}.")
        if self.weight_column is not None and self.block_size:
            raise ConfigError(
                "weight_column weighs rows, but block_size cuts their texts into blocks: omit one "
                "of them."
            )
        if self.truncation_side is not None and self.block_size:
            raise ConfigError(
                "truncation_side has no effect with block_size, which truncates no text: omit one "
                "of them."
            )
        if self.doc_stride is not None and self.doc_stride >= self.max_length:
            raise ConfigError(
                f"doc_stride {self.doc_stride} must be below max_length {self.max_length}: windows "
                "share fewer tokens than they have."
            )
        if self.optim not in ADAM and (self.adam_beta1, self.adam_beta2, self.adam_epsilon) != (
            0.9,
            0.999,
            1e-8,
        ):
            raise ConfigError(
                f"adam_beta1, adam_beta2 and adam_epsilon apply to {', '.join(ADAM)}, not "
                f"{self.optim}: omit them."
            )
        of_new = (
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "lora_modules_to_save",
            "use_dora",
        )
        if self.lora_r is None and (given := [name for name in of_new if getattr(self, name)]):
            raise ConfigError(f"{given[0]} needs lora_r, the rank of new adapters.")
        if self.lora_r is not None and self.adapter_name_or_path is not None:
            raise ConfigError(
                "lora_r creates new adapters, adapter_name_or_path loads existing ones: omit one "
                "of them."
            )
        if self.load_in_4bit and not self.has_adapters:
            raise ConfigError(
                "load_in_4bit freezes the weights: set lora_r or adapter_name_or_path."
            )
        for is_set, package, extra in (
            (self.has_adapters, "peft", "finetune"),
            (self.load_in_4bit, "bitsandbytes", "qlora"),
        ):
            if is_set and find_spec(package) is None:
                raise ConfigError(
                    f'adapters need the package {package}: pip install "hf_ga[{extra}]".'
                )
        if self.has_adapters and self.freeze:
            raise ConfigError(
                "freeze has no effect with adapters, which freeze all other weights: omit one of "
                "them."
            )
        if self.same_bits is not None and self.same_bits > self.per_device_train_batch_size:
            raise ConfigError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} is smaller than "
                "one chunk of same_bits "
                f"{self.same_bits}: set it to at least {self.same_bits}, or lower same_bits."
            )
        if self.resume_with_changes and self.resume_from_checkpoint is None:
            raise ConfigError(
                "resume_with_changes needs a checkpoint: set resume_from_checkpoint, or omit it."
            )
        if self.eval_only and self.resume_from_checkpoint is not None:
            raise ConfigError(
                "eval_only does not resume: set model_name_or_path to the model's folder."
            )
        if self.eval_only and self.model_name_or_path is None:
            raise ConfigError("eval_only needs a model: set model_name_or_path.")
        if self.resize_token_embeddings:
            self._check_resizing()
        if self.eval_only and self.push_to_hub:
            raise ConfigError(
                "eval_only trains no model to upload: omit push_to_hub, or upload with `hf upload`."
            )

    def _check_resizing(self) -> None:
        if self.model_name_or_path is None:
            raise ConfigError(
                "resize_token_embeddings is for a pretrained model: a new one has a row for every "
                "token; set model_name_or_path, or omit it."
            )
        if self.eval_only and self.adapter_name_or_path is None:
            raise ConfigError(
                "resize_token_embeddings would evaluate new rows that were never trained: omit "
                "it; the folder of a trained model has all rows."
            )

    def _check_class_weights(self) -> None:
        weights = self.class_weights
        if weights == BALANCED and self.eval_only:
            raise ConfigError(
                "class_weights balanced counts the labels of the training rows, which eval_only "
                "does not read: give the numbers of the training run (in its summary.json)."
            )
        if weights != BALANCED and not (
            isinstance(weights, list)
            and all(isinstance(weight, float) and 0 < weight < inf for weight in weights)
        ):
            raise ConfigError(
                f"class_weights must be {BALANCED}, or one finite number above 0 for each class, "
                f"got {weights!r:.80}."
            )

    def _check_streaming(self) -> None:
        num_workers = self.dataloader_num_workers
        unsupported = {
            f"the task {self.task} (it reads all training rows first)": self.task
            not in STREAMED_TASKS,
            "block_size": self.block_size,
            "class_weights balanced (it counts the labels of all training rows first; give "
            "numbers)": self.class_weights == BALANCED,
            "max_train_samples": self.max_train_samples,
            "eval_only": self.eval_only,
            "the embedded corpus stdlib": "stdlib" in as_list(self.dataset_name),
            f"dataloader_num_workers {num_workers} (one worker reads ahead)": num_workers > 1,
        }
        if found := [what for what, is_set in unsupported.items() if is_set]:
            raise ConfigError(
                f"streaming does not support {found[0]}: change it, or omit streaming."
            )
        if self.max_steps is None:
            raise ConfigError(
                "streaming needs max_steps: the number of rows of a stream is unknown."
            )

    def to_dict(self) -> dict[str, Any]:
        """The flags as plain values, for JSON and trackers: without `hub_token`."""
        return {name: value for name, value in asdict(self).items() if name != "hub_token"}
