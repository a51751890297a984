"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full batch."""

from hf_ga.batch_arithmetic import BatchPlan, plan_batch
from hf_ga.batch_norm import replace_batch_norm
from hf_ga.config import FinetuneConfig
from hf_ga.equivalence.check import check_equivalence
from hf_ga.equivalence.report import EquivalenceReport
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
from hf_ga.exact_trainer import ExactTrainer, ExactTrainerMixin
from hf_ga.finetuning import finetune
from hf_ga.step import StepResult, backward_window, train_step
from hf_ga.streaming import StreamLoader
from hf_ga.targets import TargetRule, prove_targets
from hf_ga.windows import MicroBatch, Window, WindowLoader

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
