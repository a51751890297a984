"""What a run is made of, and how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_ga.data.data import PreparedData
from hf_ga.data.stream_loader import StreamLoader
from hf_ga.exact.forward import LossFunction
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.proof.targets import ProvenLoss
from hf_ga.run.config import FinetuneConfig


@dataclass
class Progress:
    """How far a run is; a checkpoint keeps it.

    Attributes:
        step: optimizer steps done. num_windows: windows consumed. num_skipped: windows that made no step.
        best_metric: best value of the metric that chooses the best model.
        evaluations_since_best: how many came after it.
        metrics_size: bytes of metrics.jsonl. changes: of --resume_with_changes, each `name old -> new`.
    """

    step: int = 0
    num_windows: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    best_metric: float | None = None
    evaluations_since_best: int = 0
    metrics_size: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """What `loop.fit` trains with, and what a run saves. Steps are optimizer steps.

    Attributes:
        config: with it go `data` and `dtype`, the type in which models are saved.
        proven: of the loss that is trained. loss_fn: None: the head's own loss.
        evaluate: (split, by default validation) -> metrics with `loss`.
        max_windows, max_steps: where to stop, whichever comes first.
        eval_steps, save_steps: steps between evaluations and between checkpoints.
        identity: what must be equal for a resumed run to be the same.
    """

    config: FinetuneConfig
    accelerator: Accelerator
    data: PreparedData
    dtype: torch.dtype
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    windows: WindowLoader | StreamLoader
    proven: ProvenLoss
    loss_fn: LossFunction | None
    evaluate: Callable[..., dict[str, float]]
    max_windows: int
    max_steps: int
    eval_steps: int
    save_steps: int
    identity: dict[str, Any]

    @property
    def output_dir(self) -> Path:
        """Folder of everything that the run writes."""
        return Path(self.config.output_dir)
