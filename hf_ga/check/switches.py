"""Suspected causes that can be switched off, one at a time: a plain list of (name, whether it applies, context without it)."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ga.check.subjects import Subject
from hf_ga.exact.window import Window
from hf_ga.proof.probes import same_shapes

_COEFFICIENTS = re.compile(r"(router_)?(aux|z)_loss_(coef|alpha|weight)$|load_balancing_(coef|loss_weight)$")


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Another attribute for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def without_dropout(subject: Subject) -> Iterator[None]:
    """torch's functions that draw dropout draw none."""
    with ExitStack() as stack:
        for owner, name in _DROPOUT_FUNCTIONS:
            stack.enter_context(replaced(owner, name, partial(_undropped, getattr(owner, name))))
        attention = F.scaled_dot_product_attention
        stack.enter_context(replaced(F, "scaled_dot_product_attention", partial(_undropped_attention, attention)))
        yield


@contextmanager
def without_batch_statistics(subject: Subject) -> Iterator[None]:
    """BatchNorm normalises by its running statistics, and leaves them."""
    with replaced(F, "batch_norm", partial(_frozen_batch_norm, F.batch_norm)):
        yield


@contextmanager
def without_auxiliary_loss(subject: Subject) -> Iterator[None]:
    """The coefficients of router losses are 0, in modules and configurations."""
    with ExitStack() as stack:
        for owner, name in _coefficients(subject.model):
            stack.enter_context(replaced(owner, name, 0.0))
        yield


def draws_dropout(subject: Subject, window: Window) -> bool:
    """Whether the model draws anything in training."""
    return subject.places is not None and bool(subject.places.sites or subject.places.unkeyed)


def has_batch_norm(subject: Subject, window: Window) -> bool:
    """Whether some module is a BatchNorm (also one in evaluation mode: a step may put it into training mode)."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in subject.model.modules())


def has_auxiliary_loss(subject: Subject, window: Window) -> bool:
    """Whether a coefficient of a router loss is not 0."""
    return bool(_coefficients(subject.model))


def has_unequal_widths(subject: Subject, window: Window) -> bool:
    """Whether micro-batches of the window are padded to different widths."""
    tensors = [{k: v[:1] for k, v in m.batch.items() if isinstance(v, Tensor) and v.dim()} for m in window.micro_batches]
    return not all(same_shapes(tensors[0], other) for other in tensors)


class ClipCounter:
    """Counts calls of torch's clipping by norm (Accelerate and Trainer call it too) inside a `with`; `is_off`: none clips."""

    def __init__(self, is_off: bool) -> None:
        self.is_off, self.calls = is_off, 0

    def __enter__(self) -> "ClipCounter":
        self._original = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = self._watched
        return self

    def __exit__(self, *error: object) -> None:
        torch.nn.utils.clip_grad_norm_ = self._original

    def _watched(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return self._original(parameters, float("inf") if self.is_off else max_norm, *args, **kwargs)


Switch = tuple[str, Callable[[Subject, Window], bool], Callable[[Subject], AbstractContextManager]]
# Padding and clipping are switched by the trial itself: the first in its window, the second by a `ClipCounter`.
SWITCHES: list[Switch] = [
    ("dropout", draws_dropout, without_dropout),
    ("BatchNorm", has_batch_norm, without_batch_statistics),
    ("auxiliary loss", has_auxiliary_loss, without_auxiliary_loss),
    ("padding width", has_unequal_widths, lambda subject: nullcontext()),
    ("clipping per micro-batch", lambda subject, window: True, lambda subject: nullcontext()),
]

_DROPOUT_FUNCTIONS = [
    *((F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")),
    (torch, "dropout"),
]


def _undropped(original: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _undropped_attention(
    original: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kw: Any,
) -> Tensor:
    return original(query, key, value, attn_mask, 0.0, *args, **kw)


def _frozen_batch_norm(
    original: Callable, x: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    if mean is None:  # it keeps no running statistics
        mean, variance = torch.zeros(x.shape[1]).to(x), torch.ones(x.shape[1]).to(x)
    return original(x, mean, variance, weight, bias, False, 0.0, kwargs.get("eps", args[2] if len(args) > 2 else 1e-5))


def _coefficients(model: nn.Module) -> list[tuple[object, str]]:
    found = {}
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in vars(owner).items() if owner is not None else ():
                if _COEFFICIENTS.search(name) and isinstance(value, int | float) and value:
                    found[id(owner), name] = (owner, name)
    routed = any(getattr(getattr(m, "config", None), "output_router_logits", True) for m in model.modules() if hasattr(m, "config"))
    return list(found.values()) if routed else []
