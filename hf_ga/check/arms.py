"""Ready-made steps for `check_equivalence`: transformers' Trainer and a raw Accelerate loop.

Both run the library's own code on the micro-batches of the window; this file reimplements none of it. They run bf16 natively;
under fp16 they compute in float32.

Example:
    check_equivalence(model, samples, collate_fn, steps={"Trainer": trainer_arm(), "accelerate": accelerate_arm()})
"""

import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_ga.check.subjects import Step, device_of
from hf_ga.exact.forward import head_loss

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


def trainer_arm(trainer_class: type[Trainer] = Trainer, **arguments: Any) -> Step:
    """A step that runs `transformers.Trainer`'s own training loop on the window and takes the gradients before its optimizer step.

    Args:
        trainer_class: Trainer, or a subclass that leaves micro-batches unchanged (a dataset item is a whole micro-batch here,
            which excludes trainers that plan their own windows, such as `ExactTrainer`).
        arguments: for `TrainingArguments`, such as `label_smoothing_factor=0.1`; precision and accumulation come from the check,
            and clipping is off unless `max_grad_norm` is given.
    """

    def step(model: nn.Module, micro_batches: MicroBatches, accumulation_steps: int, precision: str) -> float:
        gradients = {}
        still = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.0)
        still.register_step_pre_hook(lambda *_: gradients.update({p: p.grad for p in model.parameters()}))
        own = {
            "gradient_accumulation_steps": accumulation_steps,
            "bf16": precision == "bf16",
            "use_cpu": device_of(model).type == "cpu",
        }
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(folder, **(TRAINING_ARGUMENTS | own | arguments))
            settings._n_gpu = 1  # with several GPUs Trainer would wrap the model in DataParallel
            trainer = trainer_class(
                model=model,
                args=settings,
                train_dataset=micro_batches,
                data_collator=lambda items: dict(items[0]),
                optimizers=(still, None),
            )
            trainer.remove_callback(PrinterCallback)
            loss = trainer.train().training_loss
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        return loss

    return step


def accelerate_arm() -> Step:
    """A step that runs the loop of Accelerate's documentation: `with accelerator.accumulate(model): accelerator.backward(loss)`."""

    def step(model: nn.Module, micro_batches: MicroBatches, accumulation_steps: int, precision: str) -> None:
        accelerator = Accelerator(
            cpu=device_of(model).type == "cpu",
            mixed_precision="bf16" if precision == "bf16" else "no",
            gradient_accumulation_steps=accumulation_steps,
        )
        prepared, loader = accelerator.prepare(model, DataLoader(micro_batches, batch_size=None))
        for batch in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(head_loss(prepared(**batch)))

    return step


ARMS = {"trainer": trainer_arm, "accelerate": accelerate_arm}
