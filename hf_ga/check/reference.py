"""The slow, obviously correct gradient: one forward and one backward of the given samples, in
float64 or as trained.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_ga.check.gradients import Gradients, take_gradients
from hf_ga.check.subjects import DTYPES, FP16_SCALE, Subject, device_of
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
    subject: Subject,
    window: Window,
    micro_batch: MicroBatch,
    precision: str | None = None,
    keyed: bool = True,
) -> tuple[float, Gradients, float | None]:
    """Compute the mean loss of one batch and its gradient: `model(**batch).loss.backward()`.

    Args:
        subject: The model and the settings of the check.
        window: The window.
        micro_batch: Some samples of it.
        precision: "float64". None: the check's.
        keyed: Whether dropout is keyed; False keeps torch's own.

    Returns:
        Mean loss, gradients, and the number of targets as `loss_fn` counts them.
    """
    model = subject.model
    precision = precision or subject.precision
    dtype = DTYPES.get(precision)
    scale = FP16_SCALE if precision == "fp16" else 1.0
    device = device_of(model)
    batch = send_to_device(micro_batch.batch, device)
    if precision == "float64":
        batch = {name: _in_float64(value) for name, value in batch.items()}
    with (
        in_float64(model) if precision == "float64" else nullcontext(),
        subject.dropout.scope(model) if keyed else nullcontext(),
        restored_buffers(model),
    ):
        seed = window.request.seed
        keys = sample_keys(seed, window.epoch, micro_batch.positions).to(device)
        key_of_window = window_key(seed, window.epoch, window.index).to(device)
        subject.dropout.set_keys(keys, key_of_window)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss, count = _loss_of(subject, batch)
        mean = loss if count is None else loss / count
        (mean * scale).backward()
    gradients = take_gradients(model)
    if scale != 1.0:
        torch._foreach_div_(list(gradients.values()), scale)
    return float(mean.detach()), gradients, None if count is None else float(count)


def find_dropout(subject: Subject) -> KeyedDropout:
    """Find the model's dropout sites, even if some draws cannot be tied to a sample."""
    longest = max(subject.samples, key=sample_length)

    def forward(count: int) -> None:
        batch = as_batch(subject.collate_fn([longest] * count))
        with torch.enable_grad():  # a loss of whole batches is checked to have a gradient
            _loss_of(subject, send_to_device(batch, device_of(subject.model)))

    return find_dropout_sites(subject.model, forward, allow_split_dependent_randomness=True)


def _loss_of(subject: Subject, batch: Batch) -> tuple[Tensor, float | None]:
    """Compute the loss of a batch, or its sum and its number of targets."""
    model = subject.model
    if subject.whole_batch is None:
        return run_forward(model, batch, subject.loss_fn)
    outputs = model(**argument_filter(model)(batch))
    tensors = {name: at_least_float32(value) for name, value in named_tensors(outputs).items()}
    outputs = with_tensors(outputs, tensors)
    return loss_of_all(subject.whole_batch, outputs, batch, device_of(model)), None


class _InFloat64(TorchFunctionMode):
    """Replaces float32 by float64 in a model's own casts: many upcast logits, norms or softmax from
    half precision.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.float:
            function = Tensor.double
        elif getattr(function, "__name__", None) == "_grouped_mm" and args[1].dim() == 3:
            # torch has no float64 kernel.
            rows, matrices, *_ = args
            return _grouped_product(rows, matrices, kwargs["offs"])
        args = tuple(map(_float64_dtype, args))
        kwargs = {name: _float64_dtype(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of consecutive rows by its own matrix; group i ends at row `ends[i]`."""
    groups = torch.tensor_split(rows, ends.cpu().long())  # and the rows behind the last group
    factors = [*matrices, 0 * matrices[0]]
    products = [group @ matrix for group, matrix in zip(groups, factors, strict=True)]
    return torch.cat(products)


def _float64_dtype(argument: Any) -> Any:
    """Return float64 in place of the dtype float32; other arguments unchanged."""
    return torch.float64 if argument is torch.float32 else argument


def _in_float64(value: Any) -> Any:
    """Convert a floating-point tensor to float64; other values are unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Run the block with parameters, buffers and the model's own casts in float64; then restore the
    tensors.
    """
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    with temporary_dtype(tensors, torch.float64), _InFloat64():
        yield
