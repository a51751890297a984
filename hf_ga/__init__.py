"""Fine-tuning with HuggingFace Accelerate in which any split of a global batch is the full
batch.

Rooms, each described in its `__init__.py`, in the order in which data pass through them:

    order, loading         which samples make a window; the dataset's micro-batches
    model, draws, loss     one forward; random numbers and dropout by sample; the divisors of a loss
    rows, speed            packed tokens and their attention; other speed-ups
    engine, parallel       the window's gradient and update; processes
    recovery               checkpoints
    accelerator, trainer, batch, training.py, pipeline, run.py    the loops and scripts of users
    check, finetuning, embedding    the checker; the command; models of vectors

A public name is imported from its module on first use, so `import hf_ga` itself is fast. Errors
are in `hf_ga.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_ga import errors

# The public names once more, for type checkers, editors and mkdocs, which do not run `__getattr__`.
if TYPE_CHECKING:
    from hf_ga.accelerator.accelerator import Accelerator as Accelerator
    from hf_ga.batch.call import backward as backward
    from hf_ga.check.check import check_equivalence as check_equivalence
    from hf_ga.check.verdict.report import EquivalenceReport as EquivalenceReport
    from hf_ga.embedding.losses import CoSENT as CoSENT
    from hf_ga.embedding.losses import InfoNCE as InfoNCE
    from hf_ga.embedding.losses import Matryoshka as Matryoshka
    from hf_ga.embedding.model import EmbeddingModel as EmbeddingModel
    from hf_ga.engine.update import StepResult as StepResult
    from hf_ga.finetuning.run.finetune import finetune as finetune
    from hf_ga.finetuning.run.flags.config import FinetuneConfig as FinetuneConfig
    from hf_ga.loading.batches import MicroBatch as MicroBatch
    from hf_ga.loading.streams.stream_loader import StreamLoader as StreamLoader
    from hf_ga.loading.window import Window as Window
    from hf_ga.loading.window_loader import WindowLoader as WindowLoader
    from hf_ga.order.plan_batch import BatchPlan as BatchPlan
    from hf_ga.order.plan_batch import plan_batch as plan_batch
    from hf_ga.pipeline.pipeline import Pipeline as Pipeline
    from hf_ga.pipeline.pipeline import prepare_pipeline as prepare_pipeline
    from hf_ga.rows.compiling import compile_layers as compile_layers
    from hf_ga.trainer.exact_trainer import ExactTrainer as ExactTrainer
    from hf_ga.trainer.exact_trainer import ExactTrainerMixin as ExactTrainerMixin
    from hf_ga.training import backward_window as backward_window
    from hf_ga.training import prepare as prepare
    from hf_ga.training import train_step as train_step

# public name -> its module: a new name is one line here, and its import above.
_MODULES = {
    "Accelerator": "hf_ga.accelerator.accelerator",
    "BatchPlan": "hf_ga.order.plan_batch",
    "CoSENT": "hf_ga.embedding.losses",
    "EmbeddingModel": "hf_ga.embedding.model",
    "EquivalenceReport": "hf_ga.check.verdict.report",
    "ExactTrainer": "hf_ga.trainer.exact_trainer",
    "ExactTrainerMixin": "hf_ga.trainer.exact_trainer",
    "FinetuneConfig": "hf_ga.finetuning.run.flags.config",
    "InfoNCE": "hf_ga.embedding.losses",
    "Matryoshka": "hf_ga.embedding.losses",
    "MicroBatch": "hf_ga.loading.batches",
    "Pipeline": "hf_ga.pipeline.pipeline",
    "StepResult": "hf_ga.engine.update",
    "StreamLoader": "hf_ga.loading.streams.stream_loader",
    "Window": "hf_ga.loading.window",
    "WindowLoader": "hf_ga.loading.window_loader",
    "backward": "hf_ga.batch.call",
    "backward_window": "hf_ga.training",
    "check_equivalence": "hf_ga.check.check",
    "compile_layers": "hf_ga.rows.compiling",
    "finetune": "hf_ga.finetuning.run.finetune",
    "plan_batch": "hf_ga.order.plan_batch",
    "prepare": "hf_ga.training",
    "prepare_pipeline": "hf_ga.pipeline.pipeline",
    "train_step": "hf_ga.training",
}

__version__ = "0.1.0"
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name of `hf_ga` when it is first used (PEP 562), or an error of
    `hf_ga.errors`, and store it as an attribute of this package.

    Raises:
        AttributeError: If there is no public name `name`.
        MissingPackage: If the name belongs to the fine-tuning command, whose packages are not
            installed.
    """
    module = import_module(_MODULES[name]) if name in _MODULES else errors
    if not hasattr(module, name):
        raise AttributeError(f"module 'hf_ga' has no attribute {name!r}")
    value = getattr(module, name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    """List the attributes of this package, including public names that are not imported yet."""
    return sorted({*globals(), *_MODULES})
