"""The slow, obviously correct gradient that the equivalence check compares with: one forward and
one backward of the given samples, in float64 or in the checked precision.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.steps import DTYPES, FP16_SCALE, CheckContext, device_of
from hf_ga.draws.dropout.masks import sample_keys, window_key
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.engine.whole.whole_window import loss_of_all
from hf_ga.loading.batches import MicroBatch
from hf_ga.model.forward import (
    Batch,
    argument_filter,
    restored_state,
    run_forward,
    transformers_configs,
)
from hf_ga.model.outputs import named_tensors, with_tensors
from hf_ga.model.override import replaced
from hf_ga.model.precision import at_least_float32, temporary_dtype


def plain_backward(
    context: CheckContext,
    micro_batch: MicroBatch,
    precision: str | None = None,
    *,
    draws: KeyedDraws | None = None,
) -> tuple[float, Gradients]:
    """Compute the mean loss of one batch and its gradient in the simplest way:
    `model(**batch).loss.backward()`. Afterwards `.grad` is None and the buffers are as before.

    Args:
        context: The model and the settings of the check.
        micro_batch: The batch: some samples of the window, or all.
        precision: "float64". None: the precision of the check.
        draws: The random draws of the forward. None: those of the reference.

    Returns:
        The mean loss, and the gradients by parameter name.
    """
    model = context.model
    precision = precision or context.precision
    autocast_dtype = DTYPES.get(precision)
    loss_scale = FP16_SCALE if precision == "fp16" else 1.0
    device = device_of(model)
    batch = send_to_device(micro_batch.batch, device)
    if precision == "float64":
        batch = {name: _to_float64(value) for name, value in batch.items()}
    begin_draws(context, micro_batch.positions)
    with (
        running_in_float64(model) if precision == "float64" else nullcontext(),
        (draws or context.draws).scope(),
        restored_state(model),
    ):
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            mean = mean_loss(context, batch)
        (mean * loss_scale).backward()
    gradients = take_gradients(model)
    if loss_scale != 1.0:
        torch._foreach_div_(list(gradients.values()), loss_scale)
    return float(mean.detach()), gradients


def begin_draws(context: CheckContext, positions: np.ndarray) -> None:
    """Key the random draws of the next forward by the samples at these positions of the window,
    the first one of epoch 0.
    """
    keys = sample_keys(context.seed, 0, positions)
    context.draws.begin(keys, window_key(context.seed, 0, 0), device_of(context.model))


def mean_loss(context: CheckContext, batch: Batch) -> Tensor:
    """Run the model on a batch on its device, and return the mean loss."""
    model = context.model
    if context.settings.whole_batch is None:
        loss, count = run_forward(model, batch, context.settings.loss_fn)
        return loss if count is None else loss / count
    outputs = model(**argument_filter(model)(batch))
    tensors = {name: at_least_float32(value) for name, value in named_tensors(outputs).items()}
    outputs = with_tensors(outputs, tensors)
    return loss_of_all(context.settings.whole_batch, outputs, batch, device_of(model))


class _Float64Casts(TorchFunctionMode):
    """Turns a model's own casts to float32 into casts to float64: many models upcast logits, norms
    or softmax from half precision, which would round the float64 reference.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a torch function with float64 in place of every argument `torch.float32`."""
        kwargs = kwargs or {}
        if function is Tensor.float:
            function = Tensor.double
        args = tuple(map(_float64_dtype, args))
        kwargs = {name: _float64_dtype(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _float64_dtype(argument: Any) -> Any:
    """Return float64 for the dtype float32, and any other argument unchanged."""
    return torch.float64 if argument is torch.float32 else argument


def _to_float64(value: Any) -> Any:
    """Convert a floating-point tensor to float64; return any other value unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


@contextmanager
def running_in_float64(model: nn.Module) -> Iterator[None]:
    """Run the block with the model's parameters, buffers and own casts to float32 in float64."""
    tensors = [*model.parameters(), *model.buffers()]
    floating_point = [tensor for tensor in tensors if tensor.is_floating_point()]
    # torch has no float64 kernel for the products of all experts at once.
    experts_one_by_one = [
        (config, "_experts_implementation_internal", "eager")
        for config in transformers_configs(model)
    ]
    with (
        temporary_dtype(floating_point, torch.float64),
        _Float64Casts(),
        replaced(experts_one_by_one),
    ):
        yield
