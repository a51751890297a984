"""The parts of a run, and its progress."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import EvalPrediction, PretrainedConfig

from hf_ga.exact.rule import Rule
from hf_ga.exact.stream_loader import StreamLoader
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.finetuning.data.data import PreparedData, Unlabelled
from hf_ga.finetuning.run.config import FinetuneConfig


@dataclass
class Progress:
    """The progress of a run, saved in checkpoints.

    Attributes:
        step: Number of optimizer steps done.
        num_windows: Number of windows consumed.
        num_skipped: Number of windows that made no step.
        skipped_in_a_row: Number of windows without a step since the last one with a step.
        best_metric: Best value of the metric that chooses the best model. None: not evaluated yet.
        best_check: How the folder `best/` was loaded and compared; None on other processes.
        evaluations_since_best: Number of evaluations without improvement.
        metrics_size: Size of metrics.jsonl in bytes.
        changes: Changes by --resume_with_changes, each `name old -> new`.
    """

    step: int = 0
    num_windows: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    best_metric: float | None = None
    best_check: dict[str, float] | None = None
    evaluations_since_best: int = 0
    metrics_size: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Setup:
    """What training, evaluation and prediction share.

    Attributes:
        config: The configuration.
        accelerator: The accelerator of the run.
        data: The prepared data.
        model_config: The model's configuration with the labels of the data.
        class_weights: Label -> weight, in the order of the labels; empty without `class_weights`.
        unlabelled: The rows to predict at the end. None: there are none.
        on_step: The user's function, see `finetune`.
        on_evaluate: The user's function, see `finetune`.
        compute_metrics: The user's function, see `finetune`.
        preprocess_logits_for_metrics: The user's function, see `finetune`.
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
        """The folder of all the run's outputs."""
        return Path(self.config.output_dir)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the named model, in which models are saved; float32 by default."""
        return self.model_config.dtype or torch.float32


@dataclass(kw_only=True)
class Run(Setup):
    """The inputs of `loop.fit` and of saving. Steps are optimizer steps.

    Attributes:
        model: The prepared model.
        optimizer: The prepared optimizer.
        scheduler: The schedule of the learning rate.
        windows: The loader of the training windows.
        rule: What was proven about the training loss.
        evaluate: A function (split, by default validation) -> `eval_loss` and the other metrics
            (`test_loss`, ...).
        max_windows: Training ends after this number of windows.
        max_steps: Training ends after this number of steps.
        eval_steps: Number of steps between evaluations.
        save_steps: Number of steps between checkpoints.
        identity: Settings that must be equal on resume.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    windows: WindowLoader | StreamLoader
    rule: Rule
    evaluate: Callable[..., dict[str, float]]
    max_windows: int
    max_steps: int
    eval_steps: int
    save_steps: int
    identity: dict[str, Any]
