"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full batch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `_HOMES` says, for those who read without running
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
    from hf_ga.run.finetuning import finetune
    from hf_ga.run.plan_batch import BatchPlan, plan_batch
    from hf_ga.trainer.exact_trainer import ExactTrainer, ExactTrainerMixin
    from hf_ga.training import StepResult, backward_window, train_step

__version__ = "0.1.0"

# Module -> its public names. They are imported when they are asked for, as a command line has something to do before torch is there
# (`start.py`).
_HOMES = {
    "run.plan_batch": ["BatchPlan", "plan_batch"],
    "run.batch_norm": ["replace_batch_norm"],
    "run.config": ["FinetuneConfig"],
    "check.check": ["check_equivalence"],
    "check.report": ["EquivalenceReport"],
    "errors": [
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HfGaError",
        "LossNotAdditive",
        "NonFinite",
        "OutOfMemory",
        "RunStopped",
        "UnkeyedRandomness",
    ],
    "trainer.exact_trainer": ["ExactTrainer", "ExactTrainerMixin"],
    "run.finetuning": ["finetune"],
    "training": ["StepResult", "backward_window", "train_step"],
    "exact.streaming": ["StreamLoader"],
    "proof.targets": ["TargetRule", "prove_targets"],
    "exact.windows": ["MicroBatch", "Window", "WindowLoader"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
