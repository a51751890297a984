"""Whether every split of a window has the gradient of the full batch, for any model that returns
its loss.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import helpers as h
import torch
from torch import nn
from windows import one_window, window_gradient


def full_batch(
    model: nn.Module, batch: dict, dtype: torch.dtype, loss_fn: Callable | None = None
) -> h.Gradients:
    """One forward and backward of all samples, in plain PyTorch, on a copy of the model."""
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    batch = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }
    outputs = model(**batch)
    if loss_fn is not None:
        total, number = loss_fn(outputs, batch)
        loss = total / number
    elif isinstance(outputs, dict):
        loss = outputs["loss"]
    else:
        loss = getattr(outputs, "loss", outputs)
    loss.backward()
    return h.gradients(model)


def assert_every_split_is_exact(
    build: Callable[[], nn.Module],
    samples: list,
    collate: Callable = h.pad_right,
    sizes: Sequence[int] = (1, 5),
    loss_fn: Callable | None = None,
    **given: Any,
) -> None:
    """Promise 1, for micro-batches of these sizes."""
    model = build()
    full = [
        full_batch(model, collate(samples), dtype, loss_fn)
        for dtype in (torch.float32, torch.float64)
    ]
    for size in sizes:
        model = build()
        window = one_window(samples, size, collate)
        found, _ = window_gradient(model, window, loss_fn=loss_fn, **given)
        h.assert_promise_1(found, *full)
