"""Steps of a small model on one process, and whether they left everything as it was."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

import hf_ga
from hf_ga.training import LossSettings, remember


def backward_window(
    accelerator: Accelerator, model: nn.Module, window: hf_ga.Window, **given: Any
) -> hf_ga.StepResult:
    """`hf_ga.backward_window` of a model that another accelerator may have prepared.

    given: what `hf_ga.prepare` takes: loss_fn, allow_split_dependent_randomness.
    """
    remember(accelerator, model, LossSettings(**given))
    return hf_ga.backward_window(accelerator, model, window)


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: hf_ga.Window,
    *,
    loss_fn: Any = None,
    allow_split_dependent_randomness: bool = False,
    **options: Any,
) -> hf_ga.StepResult:
    """`hf_ga.train_step` of a model that another accelerator may have prepared."""
    given = LossSettings(
        loss_fn=loss_fn,
        allow_split_dependent_randomness=allow_split_dependent_randomness,
    )
    remember(accelerator, model, given)
    return hf_ga.train_step(accelerator, model, optimizer, window, **options)


class Training:
    """A prepared model with optimizer and schedule, and what it consists of at any time."""

    def __init__(self, accelerator, model, fused=False):
        self.accelerator = accelerator
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
        self.model, self.optimizer = accelerator.prepare(model, optimizer)

    def step(self, window, **options):
        return train_step(
            self.accelerator,
            self.model,
            self.optimizer,
            window,
            scheduler=self.scheduler,
            **options,
        )

    def snapshot(self):
        states = self.optimizer.state_dict()["state"]
        tensors = [
            *self.model.state_dict().values(),
            *(states[i][name] for i in states for name in sorted(states[i])),
        ]
        return [t.detach().clone() for t in tensors], self.scheduler.state_dict()


def same(snapshot, other):
    """Bit for bit; a NaN is equal to a NaN."""
    (tensors, schedule), (others, other_schedule) = snapshot, other
    return (
        schedule == other_schedule
        and len(tensors) == len(others)
        and all(map(_equal, tensors, others))
    )


def _equal(tensor, other):
    return torch.equal(tensor.isnan(), other.isnan()) and torch.equal(
        tensor.nan_to_num(), other.nan_to_num()
    )
