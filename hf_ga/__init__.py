"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full batch."""

from hf_ga.check.check import check_equivalence
from hf_ga.check.report import EquivalenceReport
from hf_ga.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HfGaError,
    LossNotAdditive,
    NonFinite,
    OutOfMemory,
    RunStopped,
    UnkeyedRandomness,
)
from hf_ga.exact.streaming import StreamLoader
from hf_ga.exact.windows import MicroBatch, Window, WindowLoader
from hf_ga.proof.targets import TargetRule, prove_targets
from hf_ga.run.batch_norm import replace_batch_norm
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.finetune import finetune
from hf_ga.run.plan_batch import BatchPlan, plan_batch
from hf_ga.trainer.exact_trainer import ExactTrainer, ExactTrainerMixin
from hf_ga.training import StepResult, backward_window, train_step

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EquivalenceReport",
    "ExactTrainer",
    "ExactTrainerMixin",
    "FinetuneConfig",
    "HfGaError",
    "LossNotAdditive",
    "MicroBatch",
    "NonFinite",
    "OutOfMemory",
    "RunStopped",
    "StepResult",
    "StreamLoader",
    "TargetRule",
    "UnkeyedRandomness",
    "Window",
    "WindowLoader",
    "backward_window",
    "check_equivalence",
    "finetune",
    "plan_batch",
    "prove_targets",
    "replace_batch_norm",
    "train_step",
]
