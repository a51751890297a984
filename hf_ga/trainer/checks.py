"""What `ExactTrainer` refuses by name before any work: settings of Trainer under which the split of a window would change it."""

from collections.abc import Iterator
from typing import Any

from accelerate.utils import DistributedType
from transformers import Trainer
from transformers.training_args import OptimizerNames

from hf_ga.errors import ConfigError
from hf_ga.exact.precision import check_precision

# Methods that the mixin must own: one that is overridden elsewhere would bring its own order or batches.
OWNED = ("get_train_dataloader", "_get_train_sampler", "get_batch_samples")


def check_trainer(trainer: Any, mixin: type) -> None:
    """Refuse what cannot be made exact; all reasons in one message.

    Args:
        trainer: a `transformers.Trainer`. mixin: the class whose methods may override Trainer's.

    Raises:
        ConfigError: an argument, an overridden method, several processes, a precision that would not be the one asked for.
    """
    if problems := [*_of_arguments(trainer.args), *_of_trainer(trainer, mixin)]:
        raise ConfigError("ExactTrainer cannot make this run exact: " + "; ".join(problems) + ".")
    check_precision(trainer.accelerator)


def _of_arguments(args: Any) -> Iterator[str]:
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if strategy not in ("random", "sequential"):
        yield f"train_sampling_strategy {strategy!r} makes windows that depend on the per-device batch size: use 'random'"
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the window in the middle of a run: set per_device_train_batch_size yourself"
    if args.torch_compile:
        yield "torch_compile hides where the model draws its dropout: leave it out"
    if args.use_liger_kernel:
        yield "use_liger_kernel replaces the loss by one that computes gradients in the forward, which was not proven: leave it out"
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        yield f"optim={str(args.optim.value)!r} updates inside each backward, before the window is complete: use another optimizer"


def _of_trainer(trainer: Any, mixin: type) -> Iterator[str]:
    processes, kind = trainer.accelerator.num_processes, trainer.accelerator.distributed_type
    if processes > 1 or kind != DistributedType.NO:
        yield (
            f"it is exact on one process, but Accelerate runs {processes} under {kind.value}: take the same global batch by "
            "gradient accumulation, or hf_ga.train_step or scripts/finetune.py, which are exact on many"
        )
    if trainer.args.n_gpu > 1:
        yield f"one process would use {trainer.args.n_gpu} GPUs (nn.DataParallel): make one visible with CUDA_VISIBLE_DEVICES"
    if trainer.is_model_parallel:
        yield "the model lies on several devices (device_map): load it onto one"
    for name in OWNED:
        for owner in type(trainer).__mro__:
            if name in vars(owner) and owner not in (mixin, Trainer):
                yield f"{owner.__name__}.{name} brings an order of samples of its own: leave it out, or train with {owner.__name__}"
    if getattr(trainer, "padding_free", False):  # TRL
        yield "padding_free (or packing) joins samples into one row, so that no mask can be tied to its sample: leave it out"
