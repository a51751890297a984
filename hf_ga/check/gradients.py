"""Gradients by parameter name: norms, relative errors, clipping, and the optimizer step that they make."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Gradients = dict[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def norms(gradients: Gradients) -> dict[str, float]:
    """L2 norm of each."""
    return {name: float(torch.linalg.vector_norm(value, dtype=torch.float64)) for name, value in gradients.items()}


def total(parts: dict[str, float]) -> float:
    """L2 norm over all parameters, from that of each."""
    return float(torch.tensor(list(parts.values()), dtype=torch.float64).norm())


def ratio(value: float, of: float) -> float:
    """value / of; 0 / 0 is 0."""
    return value / of if of else (0.0 if value == 0 else float("inf"))


def relative_errors(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """L2 norm of each difference, relative to the norm of the whole reference; their `total` is the relative error.

    Differences are taken in the reference's type, one tensor at a time.
    """
    whole = total(norms(reference))
    return {name: ratio(float((gradients[name].to(right.dtype) - right).norm()), whole) for name, right in reference.items()}


def clip(gradients: Gradients, max_grad_norm: float | None) -> None:
    """Scale all gradients down to the given global L2 norm, in place; None leaves them."""
    if max_grad_norm:
        factor = min(1.0, max_grad_norm / (total(norms(gradients)) + 1e-6))
        torch._foreach_mul_(list(gradients.values()), factor)


def take_gradients(model: nn.Module) -> Gradients:
    """Remove `.grad` from the trainable parameters and return it; zeros where there is none."""
    taken = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            taken[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            parameter.grad = None
    return taken


def one_step(model: nn.Module, gradients: Gradients, optimizer: MakeOptimizer) -> Gradients:
    """What one optimizer step with these gradients adds to the weights, in the gradients' type; the model is left as it is."""
    weights, update = dict(model.named_parameters()), {}
    for name, gradient in gradients.items():  # one at a time: an optimizer's state is as large as several models
        before = weights[name].detach().to(gradient.dtype)
        parameter = nn.Parameter(before.clone())
        parameter.grad = gradient.clone()
        optimizer([parameter]).step()
        update[name] = parameter.detach() - before
    return update


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=parameters[0].device.type in ("cpu", "cuda"))
