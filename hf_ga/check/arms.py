"""Ready-made arms (training steps under test) for `check_equivalence`: transformers' Trainer, a raw
Accelerate loop, and `hf_ga.backward`.

The first two run the library's own code on the micro-batches of the window, on several processes
too, under DDP or FSDP; this file reimplements none of it. They run bf16 natively; under fp16 they
compute in float32.

Example:
    steps = {"Trainer": trainer_arm(), "accelerate": accelerate_arm()}
    check_equivalence(model, samples, collate_fn, steps=steps)
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_ga.batch.call import backward
from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.steps import StepFunction, device_of
from hf_ga.errors import ConfigError
from hf_ga.model.forward import head_loss
from hf_ga.parallel.backend import keep_process_group_alive
from hf_ga.parallel.prepare import enable_fsdp_on_cpu

MicroBatches = list[dict[str, Any]]
TRAINING_ARGUMENTS = {
    "per_device_train_batch_size": 1,  # a dataset item is a whole micro-batch
    "train_sampling_strategy": "sequential",
    "num_train_epochs": 1,
    "max_grad_norm": 0.0,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
}


def trainer_arm(trainer_class: type[Trainer] = Trainer, **arguments: Any) -> StepFunction:
    """Make a step function for `check_equivalence` that runs `transformers.Trainer`'s own training
    loop on the window and takes the gradients before its optimizer step.

    Args:
        trainer_class: Trainer, or a subclass that leaves micro-batches unchanged (a dataset item is
            a whole micro-batch here, which excludes trainers that plan their own windows, such as
            `ExactTrainer`).
        arguments: Passed to `TrainingArguments`, such as `label_smoothing_factor=0.1`; precision
            and accumulation come from the check, and clipping is off unless `max_grad_norm` is
            given.

    Returns:
        The step function, which returns Trainer's training loss and the gradients.
    """

    def step(
        model: nn.Module, micro_batches: MicroBatches, accumulation_steps: int, precision: str
    ) -> tuple[float, Gradients]:
        """Train one window at learning rate 0; return Trainer's loss and the gradients."""
        on_cpu = device_of(model).type == "cpu"
        check_arguments = {
            "gradient_accumulation_steps": accumulation_steps,
            "bf16": precision == "bf16",
            "use_cpu": on_cpu,
            "ddp_backend": "gloo" if on_cpu and dist.is_initialized() else None,
        }
        with tempfile.TemporaryDirectory() as folder:
            training_arguments = TrainingArguments(
                folder, **(TRAINING_ARGUMENTS | check_arguments | arguments)
            )
            # With several GPUs Trainer would wrap the model in DataParallel.
            training_arguments._n_gpu = 1
            if on_cpu:
                # Trainer's accelerator shares its state with this one, so FSDP on CPUs is enabled
                # for both.
                enable_fsdp_on_cpu(
                    Accelerator(cpu=True, mixed_precision=training_arguments.mixed_precision)
                )
            trainer = trainer_class(
                model=model,
                args=training_arguments,
                train_dataset=micro_batches,
                data_collator=lambda items: dict(items[0]),
                optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.0}),
            )
            trainer.remove_callback(PrinterCallback)
            gradients: Gradients = {}

            def take(*args: Any) -> None:
                """Take the gradients before the optimizer's step."""
                gradients.update(_take_from_prepared(trainer.model_wrapped))

            with register_optimizer_step_pre_hook(take):
                loss = trainer.train().training_loss
        return loss, gradients

    return step


def accelerate_arm(**arguments: Any) -> StepFunction:
    """Make a step function for `check_equivalence` that runs the loop of Accelerate's
    documentation: `with accelerator.accumulate(model): accelerator.backward(loss)`.

    Args:
        arguments: Passed to `Accelerator`, such as `kwargs_handlers`; precision and accumulation
            come from the check.

    Returns:
        The step function, which returns no loss, and the gradients.
    """

    def step(
        model: nn.Module, micro_batches: MicroBatches, accumulation_steps: int, precision: str
    ) -> tuple[None, Gradients]:
        """Run Accelerate's loop over one window, without an optimizer step."""
        accelerator = Accelerator(
            cpu=device_of(model).type == "cpu",
            mixed_precision="bf16" if precision == "bf16" else "no",
            gradient_accumulation_steps=accumulation_steps,
            **arguments,
        )
        enable_fsdp_on_cpu(accelerator)
        optimizer = torch.optim.SGD(model.parameters())  # FSDP2 needs one
        loader = DataLoader(micro_batches, batch_size=1, collate_fn=lambda items: items[0])
        prepared, _, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(head_loss(prepared(**batch)))
        return None, _take_from_prepared(prepared)

    return step


def backward_arm(micro_batch_size: int, **arguments: Any) -> StepFunction:
    """Make a step function for `check_equivalence` that calls `hf_ga.backward` once for the window,
    which must be one collated batch.

    Args:
        micro_batch_size: Samples in one forward.
        arguments: Passed to `hf_ga.backward`, such as `loss_fn`.

    Returns:
        The step function, which returns the window's mean loss and leaves the gradient in `.grad`.

    Raises:
        ConfigError: In the check, if a layout has more than one micro-batch, or under fp16, which
            needs the accelerator of a loop.

    Example:
        steps = {"hf_ga.backward": backward_arm(4)}
        check_equivalence(model, samples, collate_fn, {"one batch": [len(samples)]}, steps)
    """

    def step(model: nn.Module, micro_batches: MicroBatches, precision: str) -> Tensor:
        """Call `hf_ga.backward` on the only batch of the window, and return the loss."""
        if len(micro_batches) > 1 or precision == "fp16":
            raise ConfigError(
                "hf_ga.backward takes one batch, in fp32 or bf16: check it with "
                'layouts={"one batch": [number of samples]}.'
            )
        device = device_of(model).type
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            return backward(
                model, micro_batches[0], micro_batch_size=micro_batch_size, seed=0, **arguments
            )

    return step


def _take_from_prepared(prepared: nn.Module) -> Gradients:
    """Take the gradients of a model that Accelerate or Trainer prepared."""
    # DDP's wrapper may hang when it is destroyed, unless its process group lives until then.
    if isinstance(prepared, nn.parallel.DistributedDataParallel):
        keep_process_group_alive(prepared)
    return take_gradients(prepared)


ARMS = {"trainer": trainer_arm, "accelerate": accelerate_arm}
