"""Gradients by parameter name: taken from a model, norms, relative errors, clipping."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hf_ga.model.forward import unwrapped
from hf_ga.parallel.fsdp import unwrapped_name

Gradients = dict[str, Tensor]


def gradient_norms(gradients: Gradients) -> dict[str, float]:
    """Return the L2 norm of each gradient, computed in float64."""
    return {
        name: float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        for name, gradient in gradients.items()
    }


def total_norm(parameter_norms: dict[str, float]) -> float:
    """Return the L2 norm over all parameters together, from that of each."""
    return float(torch.tensor(list(parameter_norms.values()), dtype=torch.float64).norm())


def ratio(numerator: float, denominator: float) -> float:
    """Divide two numbers. 0 / 0 is 0, and any other number divided by 0 is infinity."""
    if denominator:
        return numerator / denominator
    return 0.0 if numerator == 0 else float("inf")


def relative_errors(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """Return ||gradient - reference|| / ||all reference gradients together|| for each parameter.

    `total_norm` of the result is the relative error over all parameters. Differences are computed
    in the reference's dtype, one tensor at a time.
    """
    reference_norm = total_norm(gradient_norms(reference))
    errors = {}
    for name, reference_gradient in reference.items():
        difference = gradients[name].to(reference_gradient.dtype) - reference_gradient
        errors[name] = ratio(float(difference.norm()), reference_norm)
    return errors


def relative_error(vector: Tensor, reference: Tensor) -> float:
    """Return ||vector - reference|| / ||reference|| in float64; infinity if it is NaN."""
    reference = reference.double()
    difference = (vector.double() - reference).norm()
    error = float(difference / reference.norm().clamp(min=1e-300))
    return float("inf") if math.isnan(error) else error


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Clip gradients in place, as `torch.nn.utils.clip_grad_norm_` does; None or 0: not at all."""
    if max_grad_norm:
        factor = min(1.0, max_grad_norm / (total_norm(gradient_norms(gradients)) + 1e-6))
        torch._foreach_mul_(list(gradients.values()), factor)


def take_gradients(model: nn.Module) -> Gradients:
    """Return the gradients of the trainable parameters, and set every `.grad` to None.

    Args:
        model: Prepared or not. Under FSDP all processes must call this, as they gather the
            gradients from their shards.

    Returns:
        Unsharded gradients by the names of the parameters in the unwrapped model; zeros for
        trainable parameters without a gradient.
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
            # FSDP1 frees the gathered gradients at the end of the block.
            taken[unwrapped_name(name)] = gradient.clone() if is_fsdp1 else gradient
    model.zero_grad()
    return taken
