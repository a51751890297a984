"""What `ExactTrainer` refuses by name before any work: settings of Trainer under which the split of a window would change it."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.training_args import OptimizerNames

from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.precision import check_precision

# Methods that the mixin must own: one that is overridden elsewhere would bring its own order or batches.
OWNED = ("get_train_dataloader", "_get_train_sampler")


def check_trainer(trainer: Any, mixin: type) -> None:
    """Refuse what cannot be made exact; all reasons in one message.

    Args:
        trainer: a `transformers.Trainer`. mixin: the class whose methods may override Trainer's.

    Raises:
        ConfigError: an argument or an overridden method. DataError: a dataset without length or random access.
    """
    if problems := [*_of_arguments(trainer.args), *_of_trainer(trainer, mixin)]:
        raise ConfigError("ExactTrainer cannot make this run exact: " + "; ".join(problems) + ".")
    _check_one_process(trainer.accelerator)
    check_precision(trainer.accelerator)
    dataset = trainer.train_dataset
    if dataset is not None and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")):
        raise DataError(
            f"the order of the samples needs a dataset with a length and random access, but train_dataset is a "
            f"{type(dataset).__name__}: load it without streaming."
        )


def _check_one_process(accelerator: Accelerator) -> None:
    if accelerator.num_processes > 1 or accelerator.distributed_type != DistributedType.NO:
        raise ConfigError(
            f"ExactTrainer is exact on one process, but Accelerate runs {accelerator.num_processes} process(es) under "
            f"{accelerator.distributed_type.value}. Launch one process and take the same global batch by gradient accumulation, or "
            "train with hf_ga.train_step or scripts/finetune.py, which are exact on many."
        )


def _of_arguments(args: Any) -> Iterator[str]:
    strategy = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if strategy not in ("random", "sequential"):
        yield (
            f"train_sampling_strategy is {strategy!r}, whose windows depend on the per-device batch size: use 'random' or "
            "'sequential'"
        )
    if args.auto_find_batch_size:
        yield "auto_find_batch_size changes the window in the middle of a run: set per_device_train_batch_size yourself"
    if args.torch_compile:
        yield "torch_compile hides where the model draws its dropout: leave it out"
    if args.neftune_noise_alpha is not None:
        yield "the noise of neftune_noise_alpha is not tied to samples: leave it out"
    if args.use_liger_kernel:
        yield "use_liger_kernel replaces the loss by one that computes gradients in the forward, which was not proven: leave it out"
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        yield f"optim={str(args.optim.value)!r} updates inside each backward, before the window is complete: use another optimizer"
    if args.accelerator_config.dispatch_batches:
        yield "accelerator_config's dispatch_batches joins batches of other processes: leave it out"
    if not args.dataloader_in_order:
        yield "dataloader_in_order=False lets the workers change the order: leave it out"
    if args.ignore_data_skip:
        yield "ignore_data_skip trains samples of the resumed epoch twice: leave it out, skipping loads no data here"


def _of_trainer(trainer: Any, mixin: type) -> Iterator[str]:
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
