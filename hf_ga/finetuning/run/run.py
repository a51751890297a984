"""Dataclasses that the parts of a fine-tuning run share: its inputs and its progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import EvalPrediction, PretrainedConfig

from hf_ga.engine.look.trial import LossFacts
from hf_ga.finetuning.data.data import PreparedData, Unlabelled
from hf_ga.finetuning.run.flags.config import FinetuneConfig
from hf_ga.loading.streams.stream_loader import StreamLoader
from hf_ga.loading.window_loader import WindowLoader


@dataclass
class Progress:
    """Progress of a fine-tuning run, saved in its checkpoints.

    Attributes:
        step: Number of optimizer steps done.
        num_windows: Number of windows consumed.
        num_skipped: Number of windows without an optimizer step: their loss or gradient was not
            finite, or their samples had no targets.
        skipped_in_a_row: Number of windows skipped since the last optimizer step.
        train_loss: Loss of the last window that made a step.
        last_metrics: Metrics of the last evaluation, named `eval_...`.
        best_metric: Best value so far of `metric_for_best_model`. None: not evaluated yet.
        best_check: Results of loading the saved folder `best/` again and comparing the model.
        evaluations_since_best: Number of evaluations since the best one, for early stopping.
        metrics_size: Size of metrics.jsonl in bytes.
        changes: Settings changed on resume with --resume_with_changes, each as `name old -> new`.
    """

    step: int = 0
    num_windows: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    train_loss: float | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)
    best_metric: float | None = None
    best_check: dict[str, float] | None = None
    evaluations_since_best: int = 0
    metrics_size: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Setup:
    """The inputs that training, evaluation and prediction of a fine-tuning run share.

    Attributes:
        config: The configuration of the run.
        accelerator: The accelerator of the run.
        data: The prepared data.
        model_config: The model's transformers configuration, with the labels of the data.
        class_weights: Label -> its weight in the loss, in the order of the labels. Empty if classes
            are not weighted.
        unlabelled: The rows of `predict_file`, to predict after training. None: there are none.
        on_step: The user's callback after each training window, see `finetune`.
        on_evaluate: The user's callback after each evaluation, see `finetune`.
        compute_metrics: The user's function from predictions to metrics, see `finetune`.
        preprocess_logits_for_metrics: The user's function on logits before `compute_metrics`, see
            `finetune`.
    """

    config: FinetuneConfig
    accelerator: Accelerator
    data: PreparedData
    model_config: PretrainedConfig
    class_weights: dict[str, float] = field(default_factory=dict)
    unlabelled: Unlabelled | None = None
    on_step: Callable[[dict[str, Any], nn.Module], None] | None = None
    on_evaluate: Callable[[dict[str, float], nn.Module], None] | None = None
    compute_metrics: Callable[[EvalPrediction], dict[str, float]] | None = None
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None

    @property
    def output_dir(self) -> Path:
        """Return the folder of all outputs of the fine-tuning run, the flag `output_dir`."""
        return Path(self.config.output_dir)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the fine-tuning run saves models: that of the pretrained model,
        float32 by default.
        """
        return self.model_config.dtype or torch.float32


@dataclass(kw_only=True)
class Run(Setup):
    """The inputs of the training loop (`loop.fit`) and of saving: a `Setup` with model, optimizer
    and data loader. Steps are optimizer steps.

    Attributes:
        model: The prepared model.
        optimizer: The prepared optimizer.
        scheduler: The schedule of the learning rate.
        windows: The loader of the training windows.
        loss_facts: What was found out about the loss before training: what it averages over, which
            draws belong to samples, which speed-ups are used.
        max_windows: Number of windows after which training ends.
        max_steps: Number of steps after which training ends.
        eval_steps: Number of steps between evaluations.
        save_steps: Number of steps between checkpoints.
        identity: Settings and data that a checkpoint must agree with to be resumed.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    windows: WindowLoader | StreamLoader
    loss_facts: LossFacts
    max_windows: int
    max_steps: int
    eval_steps: int
    save_steps: int
    identity: dict[str, Any]
