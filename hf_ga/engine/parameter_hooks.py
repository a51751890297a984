"""Hooks on parameters (`register_hook`, `register_post_accumulate_grad_hook`) get the gradient of a
window, as they do in a full-batch run, not those of its micro-batches: a hook that clips or
normalises is not linear.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks of any kind."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextmanager
def hooks_suspended(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let backwards within the block call no hooks of these parameters."""
    # torch calls what is in these dictionaries, which is why they are emptied rather than replaced.
    suspended = [
        (hooks, dict(hooks))
        for parameter in parameters
        for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        if hooks
    ]
    for hooks, _ in suspended:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in suspended:
            hooks.update(kept)


@torch.no_grad()
def after_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
    """Return what the hooks of a parameter make of its gradient, some of them in its `.grad`."""
    for hook in list((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    if not hooks:
        return gradient
    parameter.grad = gradient
    for hook in hooks:
        hook(parameter)
    return parameter.grad
