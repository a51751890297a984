"""The slow, obviously correct gradient that the equivalence check compares with: one forward and
one backward of the given samples, in float64 or in the checked precision.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.steps import DTYPES, FP16_SCALE, CheckContext, device_of
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.exact.batches import Batch, MicroBatch, as_batch, sample_length
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import argument_filter, restored_buffers, run_forward
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.outputs import named_tensors, with_tensors
from hf_ga.exact.precision import at_least_float32
from hf_ga.exact.whole_window import loss_of_all
from hf_ga.exact.window import Window
from hf_ga.proof.precision import temporary_dtype
from hf_ga.proof.sites import find_dropout_sites


def plain_backward(
    context: CheckContext,
    window: Window,
    micro_batch: MicroBatch,
    precision: str | None = None,
    keyed: bool = True,
) -> tuple[float, Gradients, float | None]:
    """Compute the mean loss of one batch and its gradient in the simplest way, as the reference of
    the equivalence check: `model(**batch).loss.backward()`. Afterwards `.grad` is None and the
    buffers are as before.

    Args:
        context: The model and the settings of the check.
        window: The window; its seed, epoch and index set the keys of dropout.
        micro_batch: The batch: some samples of the window, or all.
        precision: "float64". None: the precision of the check.
        keyed: Whether hf_ga's keyed dropout is on; False keeps torch's own dropout.

    Returns:
        The mean loss, the gradients by parameter name, and the number of targets that `loss_fn`
        counted (None for the loss of the model's head or a loss of whole batches).
    """
    model = context.model
    precision = precision or context.precision
    autocast_dtype = DTYPES.get(precision)
    loss_scale = FP16_SCALE if precision == "fp16" else 1.0
    device = device_of(model)
    batch = send_to_device(micro_batch.batch, device)
    if precision == "float64":
        batch = {name: _to_float64(value) for name, value in batch.items()}
    with (
        running_in_float64(model) if precision == "float64" else nullcontext(),
        context.dropout.scope(model) if keyed else nullcontext(),
        restored_buffers(model),
    ):
        seed = window.request.seed
        keys_of_samples = sample_keys(seed, window.epoch, micro_batch.positions).to(device)
        key_of_window = window_key(seed, window.epoch, window.index).to(device)
        context.dropout.set_keys(keys_of_samples, key_of_window)
        with torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
            loss, count = _compute_loss(context, batch)
        mean = loss if count is None else loss / count
        (mean * loss_scale).backward()
    gradients = take_gradients(model)
    if loss_scale != 1.0:
        torch._foreach_div_(list(gradients.values()), loss_scale)
    num_targets = None if count is None else float(count)
    return float(mean.detach()), gradients, num_targets


class DrawsOfReference:
    """Keyed draws in place of `KeyedDropout`, for a training step whose random numbers are keyed by
    the number of the draw in a micro-batch.
    """

    unkeyed: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()

    def __init__(self) -> None:
        """Start without keys."""
        self._draws = KeyedDraws()

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which torch's random functions draw keyed numbers."""
        return self._draws.scope()

    def set_keys(self, keys: Tensor, window_key: Tensor) -> None:
        """Set the keys of the samples and of the window, before a forward."""
        self._draws.begin(keys, window_key)


def find_dropout(context: CheckContext) -> KeyedDropout:
    """Find where the model of an equivalence check draws dropout (its dropout sites), by forwards
    of the longest sample.

    Modules whose random draws cannot be tied to a sample do not raise; they are listed in the
    result's `unkeyed`.
    """
    longest = max(context.samples, key=sample_length)

    def forward(num_samples: int) -> None:
        """Run the checked model and its loss on `num_samples` copies of the longest sample."""
        batch = as_batch(context.collate_fn([longest] * num_samples))
        with torch.enable_grad():  # a loss of whole batches is checked to have a gradient
            _compute_loss(context, send_to_device(batch, device_of(context.model)))

    return find_dropout_sites(context.model, forward, allow_split_dependent_randomness=True)


def _compute_loss(context: CheckContext, batch: Batch) -> tuple[Tensor, float | None]:
    """Run the model of an equivalence check on a batch, and compute its loss.

    Returns:
        The sum of the loss and the number of targets for a `loss_fn`; otherwise the loss itself and
        None.
    """
    model = context.model
    if context.whole_batch is None:
        return run_forward(model, batch, context.loss_fn)
    outputs = model(**argument_filter(model)(batch))
    tensors = {name: at_least_float32(value) for name, value in named_tensors(outputs).items()}
    outputs = with_tensors(outputs, tensors)
    return loss_of_all(context.whole_batch, outputs, batch, device_of(model)), None


class _Float64Casts(TorchFunctionMode):
    """Turns a model's own casts to float32 into casts to float64: many models upcast logits, norms
    or softmax from half precision, which would round the float64 reference.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call a torch function, in the equivalence check's float64 reference, with float64 in
        place of every argument that is `torch.float32`. `Tensor.float` becomes `Tensor.double`.
        """
        kwargs = kwargs or {}
        if function is Tensor.float:
            function = Tensor.double
        elif getattr(function, "__name__", None) == "_grouped_mm" and args[1].dim() == 3:
            # torch has no float64 kernel for it.
            rows, matrices, *_ = args
            return _grouped_matmul(rows, matrices, kwargs["offs"])
        args = tuple(map(_float64_dtype, args))
        kwargs = {name: _float64_dtype(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _grouped_matmul(rows: Tensor, matrices: Tensor, group_ends: Tensor) -> Tensor:
    """Multiply each group of consecutive rows by the matrix of its group, as `torch._grouped_mm`
    does for a mixture of experts, but in any dtype: for the equivalence check's float64 reference.

    Args:
        rows: Shape (rows, in_features).
        matrices: Shape (groups, in_features, out_features).
        group_ends: Shape (groups,): group i ends before row `group_ends[i]`.

    Returns:
        Shape (rows, out_features); zeros for rows behind the last group.
    """
    groups = torch.tensor_split(rows, group_ends.cpu().long())
    # tensor_split also returns the rows behind the last group: multiply them by zeros.
    factors = [*matrices, 0 * matrices[0]]
    products = [group @ matrix for group, matrix in zip(groups, factors, strict=True)]
    return torch.cat(products)


def _float64_dtype(argument: Any) -> Any:
    """Return `torch.float64` for the dtype `torch.float32`, and any other argument of a torch
    function unchanged, for the equivalence check's float64 reference.
    """
    return torch.float64 if argument is torch.float32 else argument


def _to_float64(value: Any) -> Any:
    """Convert a floating-point tensor of a batch to float64, for the equivalence check's reference;
    return any other value unchanged.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


@contextmanager
def running_in_float64(model: nn.Module) -> Iterator[None]:
    """Run the block, which computes the equivalence check's reference, with the model's parameters
    and buffers in float64, and with its own casts to float32 as casts to float64. Afterwards the
    tensors are restored.
    """
    tensors = [*model.parameters(), *model.buffers()]
    floating_point = [tensor for tensor in tensors if tensor.is_floating_point()]
    with temporary_dtype(floating_point, torch.float64), _Float64Casts():
        yield
