"""Records what torch's loss functions average over, while a loop computes its own loss.

A mean of `torch.nn.functional` is a sum over targets divided by a number that follows from its
arguments: the number of targets, or the sum of their class weights. With this divisor, the mean
over a micro-batch becomes its exact part of the window's mean, class weights included.
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
class CriterionMean:
    """A mean that a loss function of `torch.nn.functional` returned to a user's loop.

    Attributes:
        value: The mean, a scalar.
        input: The first argument of the loss function, such as the logits.
        compute_divisor: Returns what the sum of the losses was divided by: a number of targets,
            elements or samples, or a sum of class weights.
    """

    value: Tensor
    input: Tensor
    compute_divisor: Callable[[], float]


def _cross_entropy_divisor(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> float:
    """Compute the divisor of the mean that `cross_entropy` or `nll_loss` returns to a user's loop.

    Args:
        See `torch.nn.functional.cross_entropy`.

    Returns:
        The number of targets other than `ignore_index`; with `weight`, the sum of their class
        weights; for targets that are class probabilities, the number of distributions.
    """
    if target.is_floating_point():  # class probabilities
        class_dim = 1 if input.dim() > 1 else 0
        return input.numel() / input.shape[class_dim]
    counted = target != ignore_index
    if weight is None:
        return float(counted.sum())
    return float(weight[target[counted]].double().sum())


def _num_elements(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> float:
    """Count the elements that an elementwise loss function in a user's loop, such as `mse_loss`,
    averages over.

    Args:
        input: The function's input, which is broadcast with `target`.
        target: The function's target.
        *args: The function's other arguments, ignored.
        **kwargs: Its other keyword arguments, ignored.
    """
    return float(torch.broadcast_shapes(input.shape, target.shape).numel())


def _kl_div_divisor(
    input: Tensor,
    target: Tensor,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> float:
    """Count what the mean of `kl_div` in a user's loop divides by: its elements, or its samples
    with `reduction="batchmean"`.

    Args:
        See `torch.nn.functional.kl_div`.
    """
    if reduction == "batchmean":
        return float(input.shape[0])
    return _num_elements(input, target)


# Name of a function of torch.nn.functional -> computes the divisor of its mean from its arguments.
DIVISORS: dict[str, Callable[..., float]] = {
    "cross_entropy": _cross_entropy_divisor,
    "nll_loss": _cross_entropy_divisor,
    "binary_cross_entropy": _num_elements,
    "binary_cross_entropy_with_logits": _num_elements,
    "mse_loss": _num_elements,
    "l1_loss": _num_elements,
    "smooth_l1_loss": _num_elements,
    "huber_loss": _num_elements,
    "soft_margin_loss": _num_elements,
    "kl_div": _kl_div_divisor,
}


# Arguments of the loss functions that have one weight per class.
CLASS_WEIGHTS = ("weight", "pos_weight")
# Functions whose `weight` has one value per element, and whose mean divides by its sum.
WEIGHTED_BY_ELEMENT = ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")


class CriteriaRecorder:
    """Records the means that torch's loss functions return to the code of a user's loop.

    While it is on, the functions of `torch.nn.functional` are replaced by recording ones. It is off
    while the model's own forward runs, whose loss functions are not the loop's.

    Attributes:
        means: The means of the current micro-batch, in the order of the calls.
        model: The model that is trained, unwrapped.
        submodules_run_by_loop: Names of the model's submodules that the loop called directly,
            outside of the model's forward.
    """

    def __init__(self) -> None:
        """Make a recorder of a user's loop that is off."""
        self.means: list[CriterionMean] = []
        self.model: nn.Module | None = None
        self.submodules_run_by_loop: list[str] = []
        # (function, argument) -> the weight tensor that the function was called with first.
        self._first_weights: dict[tuple[str, str], Tensor] = {}
        self._module_hook: RemovableHandle | None = None
        # Name -> the function of torch that is replaced while the recorder is on.
        self._originals: dict[str, Callable[..., Tensor]] = {}

    def start(self, model: nn.Module) -> None:
        """Forget what the user's loop called for the previous micro-batch, and turn the recording
        on.

        Args:
            model: The model that is trained, unwrapped.
        """
        self.means.clear()
        self.submodules_run_by_loop.clear()
        self.model = model
        self.turn_on()

    def turn_on(self) -> None:
        """Replace torch's loss functions by recording ones, for those that the user's loop calls,
        and hook all module forwards.

        Does nothing if it is on already.
        """
        if self._module_hook is None:
            self._module_hook = register_module_forward_pre_hook(self._record_submodule)
        for name, compute_divisor in DIVISORS.items():
            if name not in self._originals:
                original = getattr(F, name)
                self._originals[name] = original
                setattr(F, name, partial(self._call_and_record, name, original, compute_divisor))

    def turn_off(self) -> None:
        """Restore torch's loss functions, of which the user's loop called recording versions, and
        remove the hook on module forwards.
        """
        for name, original in self._originals.items():
            setattr(F, name, original)
        self._originals.clear()
        if self._module_hook is not None:
            self._module_hook.remove()
            self._module_hook = None

    def _record_submodule(self, module: nn.Module, args: tuple) -> None:
        """Global forward pre-hook: record the name of a submodule of the trained model that the
        user's loop calls directly, in training mode with gradients, such as its output layer.

        The recorder is off during the model's own forward, so calls from there are not recorded.
        """
        if module is self.model or not module.training or not torch.is_grad_enabled():
            return
        for name, submodule in self.model.named_modules():
            if submodule is module:
                self.submodules_run_by_loop.append(name)

    def _call_and_record(
        self,
        name: str,
        original: Callable[..., Tensor],
        compute_divisor: Callable[..., float],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Call a torch loss function for the user's loop, and record its result if it is a mean
        with a known divisor.

        Args:
            name: The function's name in `torch.nn.functional`.
            original: The function itself.
            compute_divisor: Computes the divisor of the mean from the function's arguments.
            *args: The function's positional arguments.
            **kwargs: The function's keyword arguments.

        Returns:
            What the function returned.
        """
        value = original(*args, **kwargs)
        arguments = inspect.signature(original).bind(*args, **kwargs).arguments
        has_deprecated_arguments = (
            arguments.get("size_average") is not None or arguments.get("reduce") is not None
        )
        reduction = arguments.get("reduction", "mean")
        is_mean = reduction in ("mean", "batchmean") and not has_deprecated_arguments
        is_scalar = isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad
        if is_scalar and is_mean:
            self._store_first_weights(name, arguments)
            if self._has_constant_weights(name, arguments):
                divisor_of_call = partial(compute_divisor, **arguments)
                self.means.append(CriterionMean(value, arguments["input"], divisor_of_call))
        return value

    def _store_first_weights(self, name: str, arguments: dict[str, Any]) -> None:
        """Store the class weights of a torch loss function's first call by the user's loop, for
        comparison with later calls.

        Args:
            name: The function's name in `torch.nn.functional`.
            arguments: The arguments of this call by name.
        """
        for argument_name in CLASS_WEIGHTS:
            weight = arguments.get(argument_name)
            if weight is not None:
                self._first_weights.setdefault((name, argument_name), weight)

    def _has_constant_weights(self, name: str, arguments: dict[str, Any]) -> bool:
        """Return whether the user's loop calls a torch loss function with the same class weights in
        every micro-batch.

        Weights that are computed from a micro-batch depend on how the window was split. So the
        weights are compared with those of the function's first call.

        Args:
            name: The function's name in `torch.nn.functional`.
            arguments: The arguments of this call by name.

        Returns:
            True also if there are no weights. False also for weights of single elements, whose sum
            is another divisor than the number of elements.
        """
        if arguments.get("weight") is not None and name in WEIGHTED_BY_ELEMENT:
            return False
        for argument_name in CLASS_WEIGHTS:
            weight = arguments.get(argument_name)
            if weight is None:
                continue
            first_weight = self._first_weights[name, argument_name]
            if first_weight is not weight and not torch.equal(first_weight, weight):
                return False
        return True
