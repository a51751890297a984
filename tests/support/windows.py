"""One window of a test's samples, and its gradient as hf_ga computes it."""

from collections.abc import Callable
from typing import Any

import helpers as h
from accelerate import Accelerator
from steps import backward_window
from torch import nn

import hf_ga


def one_window(
    samples: list, size: int | Callable, collate: Callable = h.pad_right, **options: Any
) -> hf_ga.Window:
    """The first window, of all samples unless `global_batch_size` is given. size: of its
    micro-batches, or a planner.
    """
    planner = h.by_number(size) if isinstance(size, int) else size
    options = {"global_batch_size": len(samples), "planner": planner, **options}
    return next(iter(hf_ga.WindowLoader(samples, collate, accelerator=Accelerator(), **options)))


def window_gradient(
    model: nn.Module, window: hf_ga.Window, **options: Any
) -> tuple[h.Gradients, hf_ga.StepResult]:
    """Of this window alone. options: of `backward_window`."""
    model.zero_grad()
    result = backward_window(Accelerator(gradient_accumulation_steps=4), model, window, **options)
    return h.gradients(model), result
