"""Hooks on parameters (`Tensor.register_hook`) get the gradient of a window, as they do in a
full-batch run, not those of its micro-batches: a hook that clips or normalises is not linear.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def hooks_suspended(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let backwards within the block call no hooks of these parameters."""
    # torch calls what is in this dictionary, which is why it is emptied rather than replaced.
    suspended = [
        (parameter._backward_hooks, dict(parameter._backward_hooks))
        for parameter in parameters
        if parameter._backward_hooks
    ]
    for hooks, _ in suspended:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in suspended:
            hooks.update(kept)


@torch.no_grad()
def after_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return what the hooks of a parameter make of its gradient."""
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
