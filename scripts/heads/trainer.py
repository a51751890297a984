"""The gradient that plain `transformers.Trainer` makes of given samples. Nothing of hf_ga is used here."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class _Keep(TrainerCallback):
    """Copies the gradients before the optimizer reads them (a callback is how Trainer lets one look)."""

    def __init__(self) -> None:
        self.gradient: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = [p for p in kwargs["model"].parameters() if p.requires_grad]
        self.gradient = [(torch.zeros_like(p) if p.grad is None else p.grad).detach().clone() for p in parameters]


def gradient_by_trainer(
    model: nn.Module, samples: list[Any], collate_fn: Callable, micro_batch_size: int, accumulation_steps: int
) -> list[Tensor]:
    """Run one optimizer step with learning rate 0 over the samples in their order; the gradient that it would have used."""
    kept = _Keep()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation_steps,
            train_sampling_strategy="sequential",
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=0.0,
            remove_unused_columns=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=samples,
            data_collator=collate_fn,
            optimizers=(optimizer, scheduler),
            callbacks=[kept],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.zero_grad(set_to_none=True)
    return kept.gradient
