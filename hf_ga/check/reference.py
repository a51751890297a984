"""The slow, obviously right gradient of a window: one forward and one backward of all its samples, in float64 and as trained.

What a layout is judged by (promise 1): its distance from float64 is at most twice that of the full batch in the same precision,
plus 1e-6 of the norm; of one parameter the same, with the floor taken of the norm over all parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_ga.exact.batches import MicroBatch
from hf_ga.exact.dropout import KeyedDropout
from hf_ga.exact.forward import LossFunction, restored_buffers, run_forward
from hf_ga.exact.masks import sample_keys, window_key
from hf_ga.exact.window import Window
from hf_ga.proof.precision import parameters_in

Gradients = dict[str, Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMES_OWN_ERROR, FLOOR = 2.0, 1e-6
# Under autocast the gradient of each micro-batch is rounded: one rounding of the norm for a single parameter.
PARAMETER_FLOORS = {"fp32": FLOOR, "bf16": 2.0**-8, "fp16": 2.0**-11}
# Without float64 two inexact runs are compared, and the own error is that of the same samples in reverse order.
TIMES_WITHOUT_FLOAT64, FLOOR_WITHOUT_FLOAT64 = 3.0, 1e-5
FP16_SCALE = 1024.0  # keeps small gradients above fp16's least number; it is divided out


@dataclass
class Truth:
    """The right result of one window, and how far the full batch in the checked precision is from it.

    Attributes:
        gradients: by parameter name, float64 (or as trained where float64 did not fit, see `is_float64`).
        norm: L2 norm over all of them. errors, error: L2 norms of the full batch's own difference, by parameter and over all.
        update: what one optimizer step adds to each parameter. update_error: the full batch's own, L2.
    """

    loss: float
    loss_error: float
    gradients: Gradients
    norm: float
    errors: dict[str, float]
    error: float
    is_float64: bool
    update: Gradients = field(default_factory=dict)
    update_error: float = 0.0

    def limit(self) -> float:
        """The largest L2 norm of the difference over all parameters together."""
        times, floor = self._factors()
        return times * self.error + floor * self.norm

    def parameter_limits(self, precision: str) -> dict[str, float]:
        """The same for each parameter; the floor is of the norm over all."""
        times, floor = self._factors()
        floor = max(floor, PARAMETER_FLOORS[precision]) * self.norm
        return {name: times * error + floor for name, error in self.errors.items()}

    def loss_limit(self, precision: str) -> float:
        """The largest difference of the loss."""
        times, floor = self._factors()
        return times * self.loss_error + max(floor, PARAMETER_FLOORS[precision]) * abs(self.loss)

    def _factors(self) -> tuple[float, float]:
        return (TIMES_OWN_ERROR, FLOOR) if self.is_float64 else (TIMES_WITHOUT_FLOAT64, FLOOR_WITHOUT_FLOAT64)


def norms(gradients: Gradients) -> dict[str, float]:
    """L2 norm of each."""
    return {name: float(torch.linalg.vector_norm(value, dtype=torch.float64)) for name, value in gradients.items()}


def total(parts: dict[str, float]) -> float:
    """L2 norm over all, from that of each."""
    return float(torch.tensor(list(parts.values()), dtype=torch.float64).norm())


def difference_norms(gradients: Gradients, reference: Gradients) -> dict[str, float]:
    """L2 norm of the difference, by name; the difference is taken in the reference's type, one tensor at a time."""
    return {name: float((gradients[name].to(right.dtype) - right).norm()) for name, right in reference.items()}


def taken_gradients(model: nn.Module) -> Gradients:
    """What lies in `.grad` of the trainable parameters (zeros where there is nothing), taken away from there."""
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


def autocast(model: nn.Module, precision: str) -> AbstractContextManager:
    """The forward's context in "fp32", "bf16" or "fp16"."""
    dtype = DTYPES[precision]
    return torch.autocast(device_of(model).type, dtype=dtype) if dtype else nullcontext()


def device_of(model: nn.Module) -> torch.device:
    """Of its first parameter."""
    return next(model.parameters()).device


def plain_backward(
    model: nn.Module,
    window: Window,
    micro_batch: MicroBatch,
    places: KeyedDropout | None,
    loss_fn: LossFunction | None = None,
    precision: str = "fp32",
) -> tuple[float, Gradients, float | None]:
    """Mean loss of one batch and its gradient: `model(**batch).loss.backward()`, with keyed dropout where the model draws some.

    Args:
        places: None draws nothing by keys: dropout is torch's own.

    Returns:
        (mean loss, gradients, number of targets as `loss_fn` counts them).
    """
    device, scale = device_of(model), FP16_SCALE if precision == "fp16" else 1.0
    batch = send_to_device(micro_batch.batch, device)
    if precision == "float64":
        batch = {name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in batch.items()}
    with nullcontext() if places is None else places.scope(model), restored_buffers(model):
        if places is not None:
            keys = sample_keys(window.seed, window.epoch, micro_batch.positions)
            places.set_keys(keys.to(device), window_key(window.seed, window.epoch, window.index).to(device))
        with autocast(model, "fp32" if precision == "float64" else precision):
            loss, count = run_forward(model, batch, loss_fn)
        mean = loss if count is None else loss / count
        (mean * scale).backward()
    gradients = taken_gradients(model)
    if scale != 1.0:
        torch._foreach_div_(list(gradients.values()), scale)
    return float(mean.detach()), gradients, None if count is None else float(count)


class _InFloat64(TorchFunctionMode):
    """float64 wherever the code of a model asks for float32: many cast logits, norms or softmax up from half precision."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        elif getattr(function, "__name__", "") == "_grouped_mm" and args[1].dim() == 3:  # torch has none in float64
            return _grouped_product(args[0], args[1], (kwargs or {})["offs"])
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return function(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Consecutive groups of rows, each times its own matrix; group i ends at row `ends[i]`."""
    groups = torch.tensor_split(rows, ends.cpu().long())
    return torch.cat([group @ matrix for group, matrix in zip(groups, [*matrices, 0 * matrices[0]], strict=True)])


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Parameters, buffers and the model's own casts in float64 for a while; then each tensor holds its own values again."""
    buffers = [(b, b.data) for b in model.buffers() if b.is_floating_point()]
    with parameters_in(model, torch.float64), _InFloat64():
        try:
            for buffer, data in buffers:
                buffer.data = data.double()
            yield
        finally:
            for buffer, data in buffers:
                buffer.data = data


@dataclass(frozen=True)
class Memory:
    """What the full batch needs, in bytes: estimated from one forward of the longest sample.

    Attributes:
        activations: kept for the backward of the whole window. weights: all parameters. gradients: the trainable ones.
        available: the limit.
    """

    activations: int
    weights: int
    gradients: int
    available: int

    @property
    def full_batch(self) -> int:
        """Activations and gradients beside those kept to compare with."""
        return self.activations + 3 * self.gradients

    @property
    def float64(self) -> int:
        """All that in float64, with the weights too."""
        return 2 * self.activations + 2 * self.weights + 5 * self.gradients


def measure_memory(model: nn.Module, pair: dict[str, Any], num_samples: int, loss_fn: Any, max_gib: float | None) -> Memory:
    """Run one forward of two of the longest samples and add up what autograd keeps of it.

    Args:
        pair: the collated batch of the longest sample, twice. num_samples: of the window.
        max_gib: the limit; None: 70 % of what is free on the model's device now.
    """
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), restored_buffers(model):
        run_forward(model, send_to_device(pair, device_of(model)), loss_fn)
    size = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    trainable = sum(size[id(p)] for p in model.parameters() if p.requires_grad)
    available = int(max_gib * 2**30) if max_gib is not None else int(0.7 * _free_bytes(device_of(model)))
    return Memory(sum(kept.values()) * num_samples // 2, sum(size.values()), trainable, available)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
