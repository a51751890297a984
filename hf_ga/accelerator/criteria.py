"""What torch's loss functions average over, noted while a loop computes its own loss.

A mean of `torch.nn.functional` is a sum over targets divided by a number that follows from its
arguments: the targets, or the sum of their class weights. With this number, the mean of a
micro-batch becomes its exact part of the window's mean, class weights included.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Mean:
    """A mean that a loss function of torch returned.

    Attributes:
        value: The mean, a scalar.
        input: What the loss function compared with the targets.
        number: Computes what was divided by.
    """

    value: Tensor
    input: Tensor
    number: Callable[[], float]


def _classes(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> float:
    """Count the targets of `cross_entropy` or `nll_loss`, or add up their class weights."""
    if target.is_floating_point():  # probabilities of the classes
        return input.numel() / input.shape[1 if input.dim() > 1 else 0]
    counted = target != ignore_index
    if weight is None:
        return float(counted.sum())
    return float(weight[target[counted]].double().sum())


def _elements(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> float:
    """Count the elements of a mean over all elements."""
    return float(torch.broadcast_shapes(input.shape, target.shape).numel())


def _kl_divergence(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> float:
    """Count what `kl_div` averages over: elements, or samples with `batchmean`."""
    if reduction == "batchmean":
        return float(input.shape[0])
    return _elements(input, target)


# Loss functions of torch, and what their means divide by.
DIVISORS: dict[str, Callable[..., float]] = {
    "cross_entropy": _classes,
    "nll_loss": _classes,
    "binary_cross_entropy": _elements,
    "binary_cross_entropy_with_logits": _elements,
    "mse_loss": _elements,
    "l1_loss": _elements,
    "smooth_l1_loss": _elements,
    "huber_loss": _elements,
    "soft_margin_loss": _elements,
    "kl_div": _kl_divergence,
}


# Functions that divide by the sum of `weight`, one for each element.
WEIGHTED_ELEMENTS = ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")


class CriteriaWatch:
    """Notes the means that torch's loss functions return to the code of a loop.

    Functions of `torch.nn.functional` are replaced while it is on. It is off while a model's
    forward runs: what happens there is the model's own business.

    Attributes:
        found: The means, in the order of the calls.
        model: The model that is trained.
        ran_outside: Names of its submodules that ran outside of its forward.
    """

    def __init__(self) -> None:
        self.found: list[Mean] = []
        self.model: nn.Module | None = None
        self.ran_outside: list[str] = []
        self._weights: dict[tuple[str, str], Tensor] = {}  # that the loss functions got first
        self._handle: RemovableHandle | None = None
        self._originals: dict[str, Callable[..., Tensor]] = {}

    def start(self, model: nn.Module) -> None:
        """Begin a micro-batch."""
        self.found.clear()
        self.ran_outside.clear()
        self.model = model
        self.turn_on()

    def turn_on(self) -> None:
        """Replace the functions, and note which modules run."""
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._note_module)
        for name, divisor in DIVISORS.items():
            if name not in self._originals:
                original = getattr(F, name)
                self._originals[name] = original
                setattr(F, name, partial(self._call, name, original, divisor))

    def turn_off(self) -> None:
        """Put torch's functions back."""
        for name, original in self._originals.items():
            setattr(F, name, original)
        self._originals.clear()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _note_module(self, module: nn.Module, args: tuple) -> None:
        if module is self.model or not module.training or not torch.is_grad_enabled():
            return
        for name, part in self.model.named_modules():
            if part is module:
                self.ran_outside.append(name)

    def _call(
        self,
        name: str,
        original: Callable[..., Tensor],
        divisor: Callable[..., float],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Call a loss function of torch, and note its value if it is a mean."""
        value = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        is_old_style = given.get("size_average") is not None or given.get("reduce") is not None
        is_mean = given.get("reduction", "mean") in ("mean", "batchmean") and not is_old_style
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad
        if is_scalar and is_mean and self._has_known_weights(name, given):
            self.found.append(Mean(value, given["input"], partial(divisor, **given)))
        return value

    def _has_known_weights(self, name: str, given: dict[str, Any]) -> bool:
        """Whether the weights of a loss function are those of the micro-batches before.

        Weights that are computed from a micro-batch depend on the split.

        Args:
            name: Of the function.
            given: Its arguments.
        """
        if given.get("weight") is not None and name in WEIGHTED_ELEMENTS:
            return False  # weights of single elements change what these divide by
        for key in ("weight", "pos_weight"):
            weight = given.get(key)
            if weight is None:
                continue
            known = self._weights.setdefault((name, key), weight)
            if known is not weight and not torch.equal(known, weight):
                return False
        return True
