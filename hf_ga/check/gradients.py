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


def gradient_norms(gradients: Gradients) -> dict[str, float]:
    """Return the L2 norm of each gradient that the equivalence check compares, by parameter name,
    computed in float64.
    """
    return {
        name: float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        for name, gradient in gradients.items()
    }


def total_norm(parameter_norms: dict[str, float]) -> float:
    """Return the L2 norm of the gradients or errors of an equivalence check over all parameters
    together: the root of the sum of squared norms.

    Args:
        parameter_norms: The L2 norm of each parameter's gradient, or of its difference from the
            reference, by parameter name.
    """
    return float(torch.tensor(list(parameter_norms.values()), dtype=torch.float64).norm())


def ratio(numerator: float, denominator: float) -> float:
    """Divide two numbers, such as an error by its limit in an equivalence report. 0 / 0 is 0, and
    any other number divided by 0 is infinity.
    """
    if denominator:
        return numerator / denominator
    return 0.0 if numerator == 0 else float("inf")


def relative_errors(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """Compute the relative error of a training step's gradient for each parameter, as the
    equivalence check reports it: ||gradient - reference|| / ||all reference gradients together||.

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
    """Compute ||vector - reference|| / ||reference|| of two flat gradients in the equivalence
    check, in float64; infinity if the result is NaN.
    """
    reference = reference.double()
    difference = (vector.double() - reference).norm()
    error = float(difference / reference.norm().clamp(min=1e-300))
    return float("inf") if math.isnan(error) else error


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Clip the gradients that the equivalence check compares all together to the L2 norm
    `max_grad_norm`, in place, as `torch.nn.utils.clip_grad_norm_` does; None or 0 leaves them
    unchanged.
    """
    if max_grad_norm:
        factor = min(1.0, max_grad_norm / (total_norm(gradient_norms(gradients)) + 1e-6))
        torch._foreach_mul_(list(gradients.values()), factor)


def take_gradients(model: nn.Module) -> Gradients:
    """Return the gradients that a training step of the equivalence check left in the trainable
    parameters, and set every `.grad` to None.

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
