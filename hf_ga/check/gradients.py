"""Gradients by parameter name: taken from a model, norms, relative errors, clipping."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_ga.exact.forward import unwrapped
from hf_ga.parallel.fsdp import unwrapped_name

Gradients = dict[str, Tensor]


def norms(gradients: Gradients) -> dict[str, float]:
    """Compute the L2 norm of each gradient."""
    return {
        name: float(torch.linalg.vector_norm(value, dtype=torch.float64))
        for name, value in gradients.items()
    }


def total(parts: dict[str, float]) -> float:
    """Compute the L2 norm over all parameters, from the norm of each."""
    return float(torch.tensor(list(parts.values()), dtype=torch.float64).norm())


def ratio(value: float, of: float) -> float:
    """Divide two numbers: 0 / 0 is 0, and any other number / 0 is infinite."""
    if of:
        return value / of
    return 0.0 if value == 0 else float("inf")


def relative_errors(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """Compute the L2 norm of each difference, relative to the norm of the whole reference.

    Their `total` is the relative error over all parameters. Differences are taken in the
    reference's type, one tensor at a time.
    """
    whole = total(norms(reference))
    return {
        name: ratio(float((gradients[name].to(right.dtype) - right).norm()), whole)
        for name, right in reference.items()
    }


def relative_error(vector: Tensor, reference: Tensor) -> float:
    """Compute ||vector - reference|| / ||reference||; a NaN counts as infinite."""
    reference = reference.double()
    difference = (vector.double() - reference).norm()
    error = float(difference / reference.norm().clamp(min=1e-300))
    return float("inf") if math.isnan(error) else error


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Clip all gradients to the given global L2 norm, in place; None: no clipping."""
    if max_grad_norm:
        factor = min(1.0, max_grad_norm / (total(norms(gradients)) + 1e-6))
        torch._foreach_mul_(list(gradients.values()), factor)


def take_gradients(model: nn.Module) -> Gradients:
    """Remove `.grad` from the trainable parameters and return it.

    Args:
        model: Prepared or not. Under FSDP all processes must call this, as they gather the
            gradients from their shards.

    Returns:
        The gradients by the names of the parameters in the unwrapped model; zeros where there is
        none.
    """
    taken = {}
    is_fsdp1 = isinstance(model, FullyShardedDataParallel)
    gathered = nullcontext()
    if is_fsdp1:
        gathered = model.summon_full_params(model, with_grads=True, writeback=False)
    with gathered:
        for name, parameter in unwrapped(model).named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient.detach()
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            # FSDP1 frees what it has gathered.
            taken[unwrapped_name(name)] = gradient.clone() if is_fsdp1 else gradient
    model.zero_grad()
    return taken
