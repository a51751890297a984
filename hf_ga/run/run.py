"""What a run is made of, and how far it is."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from hf_ga.data.stream_loader import StreamLoader
from hf_ga.exact.forward import LossFunction
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.proof.targets import ProvenLoss


@dataclass
class Progress:
    """How far a run is; a checkpoint keeps it.

    Attributes:
        step: optimizer steps done. num_windows: windows consumed. num_skipped: windows that made no step.
        best_metric: best value of the metric that chooses the best model. best_sha256: of that model's weights.
        evaluations_since_best: how many came after it.
        metrics_size: bytes of metrics.jsonl. changes: of --resume_with_changes, each `name old -> new`.
    """

    step: int = 0
    num_windows: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    best_metric: float | None = None
    best_sha256: str | None = None
    evaluations_since_best: int = 0
    metrics_size: int = 0
    changes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """All that `loop.fit` puts together. Steps are optimizer steps.

    Attributes:
        model_size: its class and numbers of parameters, in words.
        loss_fn: None: the head's own loss. evaluate: (split, by default validation) -> metrics with `loss`.
        save_best: called when the metric of the best model is the best so far; returns `best_sha256` on the main process.
        on_nonfinite: stop or skip, at a loss or gradient that is no finite number.
        patience: evaluations without a better metric after which the run stops; None: it does not.
        max_windows, max_steps: where to stop, whichever comes first. identity: what must be equal for a resumed run to be the same.
    """

    accelerator: Accelerator
    model: nn.Module
    model_size: str
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    windows: WindowLoader | StreamLoader
    rule: ProvenLoss
    loss_fn: LossFunction | None
    evaluate: Callable[..., dict[str, float]]
    save_best: Callable[[], str | None]
    metric_for_best_model: str
    lower_is_better: bool
    patience: int | None
    output_dir: Path
    max_windows: int
    max_steps: int
    eval_steps: int
    eval_on_start: bool
    save_steps: int
    save_total_limit: int
    max_grad_norm: float | None
    fsdp_reduce_each_micro_batch: bool
    allow_split_dependent_randomness: bool
    on_nonfinite: str
    identity: dict[str, Any]
