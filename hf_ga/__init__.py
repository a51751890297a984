"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full batch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `_HOMES` says, for those who read without running
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

# Module -> its public names. They are imported when they are asked for, as a command line has something to do before torch is there
# (`start.py`).
_HOMES = {
    "batch_arithmetic": ["BatchPlan", "plan_batch"],
    "batch_norm": ["replace_batch_norm"],
    "config": ["FinetuneConfig"],
    "equivalence.check": ["check_equivalence"],
    "equivalence.report": ["EquivalenceReport"],
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
    "exact_trainer": ["ExactTrainer", "ExactTrainerMixin"],
    "finetuning": ["finetune"],
    "step": ["StepResult", "backward_window", "train_step"],
    "streaming": ["StreamLoader"],
    "targets": ["TargetRule", "prove_targets"],
    "windows": ["MicroBatch", "Window", "WindowLoader"],
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
