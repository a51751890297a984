"""Gradients by parameter name: taken from a model, norms, relative errors, clipping."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_ga.exact.forward import unwrapped
from hf_ga.parallel.fsdp import own_name

Gradients = dict[str, Tensor]


def norms(gradients: Gradients) -> dict[str, float]:
    """L2 norm of each gradient."""
    return {
        name: float(torch.linalg.vector_norm(value, dtype=torch.float64))
        for name, value in gradients.items()
    }


def total(parts: dict[str, float]) -> float:
    """L2 norm over all parameters, from the norm of each."""
    return float(torch.tensor(list(parts.values()), dtype=torch.float64).norm())


def ratio(value: float, of: float) -> float:
    """value / of; 0 / 0 is 0."""
    return value / of if of else (0.0 if value == 0 else float("inf"))


def relative_errors(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """L2 norm of each difference, relative to the norm of the whole reference; their `total` is the
    relative error.

    Differences are taken in the reference's type, one tensor at a time.
    """
    whole = total(norms(reference))
    return {
        name: ratio(float((gradients[name].to(right.dtype) - right).norm()), whole)
        for name, right in reference.items()
    }


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Clip all gradients to the given global L2 norm, in place; None: no clipping."""
    if max_grad_norm:
        factor = min(1.0, max_grad_norm / (total(norms(gradients)) + 1e-6))
        torch._foreach_mul_(list(gradients.values()), factor)


def take_gradients(model: nn.Module) -> Gradients:
    """Remove `.grad` from the trainable parameters and return it by the names in the unwrapped
    model; zeros where there is none.

    Args:
        model: prepared or not; under FSDP all processes must call this, as they gather the
            gradients from their shards.
    """
    taken = {}
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    with (
        model.summon_full_params(model, with_grads=True, writeback=False)
        if is_fsdp1
        else nullcontext()
    ):
        for name, parameter in unwrapped(model).named_parameters():
            if parameter.requires_grad:
                gradient = (
                    torch.zeros_like(parameter)
                    if parameter.grad is None
                    else parameter.grad.detach()
                )
                gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                taken[own_name(name)] = gradient.clone() if is_fsdp1 else gradient
    model.zero_grad()
    return taken
