"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full
batch.
"""

from hf_ga.check.check import check_equivalence
from hf_ga.check.report import EquivalenceReport
from hf_ga.data.stream_loader import StreamLoader
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
from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.rule import Rule
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window
from hf_ga.exact.window_loader import WindowLoader
from hf_ga.run.config import FinetuneConfig
from hf_ga.run.finetune import finetune
from hf_ga.run.plan_batch import BatchPlan, plan_batch
from hf_ga.trainer.exact_trainer import ExactTrainer, ExactTrainerMixin
from hf_ga.training import backward_window, prepare, prove_targets, train_step

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
    "Rule",
    "RunStopped",
    "StepResult",
    "StreamLoader",
    "UnkeyedRandomness",
    "Window",
    "WindowLoader",
    "backward_window",
    "check_equivalence",
    "finetune",
    "plan_batch",
    "prepare",
    "prove_targets",
    "train_step",
]
