"""Logits that are computed on demand: a cross entropy needs only the rows with a target, chunk by
chunk.

Within a window, the output layer of a language model returns `LazyLogits`. Heads pass them through
`view`, `float`, slices and scaling to `torch.nn.functional.cross_entropy`, which computes on chunks
of the rows with a target (`chunked_loss.py`). Any other operation first computes the real logits
with the layer's own forward, so value and gradient are the head's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_ga.exact.batches import Batch
from hf_ga.exact.forward import compiled_modules
from hf_ga.exact.hooks import Call, Hook, SpeedUp
from hf_ga.exact.loss import COUNTING_RULES
from hf_ga.exact.override import override
from hf_ga.speed.chunked_loss import OutputProjection, cross_entropy, rows_of_chunk

TensorFunction = Callable[[Tensor], Tensor]
TRIAL_ROWS = 3
# Modules whose parameters are gathered for a forward.
UNITS = (FullyShardedDataParallel, FSDPModule)


class ChunkedLoss(SpeedUp):
    """Lets the output layer of a language model return `LazyLogits`, so that no tensor of tokens x
    vocabulary is allocated.

    Attributes:
        was_read: An operation other than the loss read logits.
        rows_per_chunk: Rows whose logits are computed together. None: as memory allows.
    """

    name = "chunked loss"

    def __init__(self) -> None:
        self.was_read = False
        self.rows_per_chunk: int | None = None
        self._call: Call | None = None
        # Counts the targets of the head's only cross entropy on the host, if a rule does.
        self._count: Callable[[Batch, int], int] | None = None
        self._expected: int | None = None  # rows with a target in the next forward
        self._rows: list[int] = []  # for each cross entropy in scope: rows that reached the layer

    def attach(
        self, model: nn.Module, dropout: Hook, *, reads_logits: bool, has_router: bool
    ) -> str | None:
        if reads_logits:  # after the forward: under FSDP the layer is sharded again
            return "its loss is computed from the logits"
        self._model = model
        if self.layer is None:
            return "it has no plain linear output layer"
        return None

    @property
    def layer(self) -> nn.Linear | None:
        """The output layer, if it is a plain linear layer without wrappers or hooks, and not part
        of compiled code, whose graph it would break.

        Adapters and quantised layers have other types. An FSDP unit below the model reshards its
        layer before the loss.
        """
        get = getattr(self._model, "get_output_embeddings", None)
        layer = None if get is None else get()
        if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks:
            return None
        if any(layer in root.modules() for root in compiled_modules(self._model)):
            return None
        for unit in self._model.modules():
            is_inner_unit = isinstance(unit, UNITS) and unit is not self._model
            if is_inner_unit and layer in unit.modules():
                return None
        return layer

    def trial(self) -> AbstractContextManager[None]:
        """Use chunks of few rows, so that probes have several."""
        return override(self, rows_per_chunk=TRIAL_ROWS)

    def verdict(self) -> str | None:
        if not self._rows:
            return "its loss is not a cross entropy of the logits"
        self._count = self._rule_that_fits()
        if self.was_read:
            return "its logits are read besides the loss"
        return None

    def _rule_that_fits(self) -> Callable[[Batch, int], int] | None:
        """Find the rule that counts the targets of the last forward's only cross entropy."""
        micro_batch = self._call.micro_batch
        if "labels" not in micro_batch.batch:
            return None
        for name in ("shifted labels", "labels"):
            rule = COUNTING_RULES[name]
            if [rule(micro_batch.batch, len(micro_batch))] == self._rows:
                return rule
        return None

    def before(self, call: Call) -> None:
        """Count targets on the host if possible, to avoid counting them on the device."""
        self._call = call
        self._expected = None
        if self._count is not None and call.counts:
            self._expected = self._count(call.micro_batch.batch, len(call.micro_batch))

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        self._rows.clear()  # at the beginning: `verdict` reads them after a trial
        with ExitStack() as stack:
            layer = self.layer
            if layer is not None:
                forward = partial(self._defer, layer, layer.forward)
                stack.enter_context(override(layer, forward=forward))
            yield

    def _defer(self, layer: nn.Linear, forward: TensorFunction, input: Tensor) -> "LazyLogits":
        """Replace `layer.forward`."""
        device = input.device.type
        dtype = input.dtype
        autocast = torch.is_autocast_enabled(device)
        if autocast and torch.float64 not in (dtype, layer.weight.dtype):  # float64 stays
            dtype = torch.get_autocast_dtype(device)
        gradient = torch.is_grad_enabled()
        return LazyLogits(DeferredCall(self, layer, forward, dtype, autocast, gradient), input)

    def rows_with_target(
        self, hidden: Tensor, target: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        """Take the hidden states and targets of the rows with a target."""
        counted = target != ignore_index
        if self._expected is None:
            rows = counted.nonzero().squeeze(1)
        else:
            torch._assert_async(
                counted.sum() == self._expected,
                "the number of targets of the loss differs from the count",
            )
            rows = torch.nonzero_static(counted, size=self._expected).squeeze(1)
        self._rows.append(len(rows))
        if len(rows) == len(target):
            return hidden, target
        return hidden.index_select(0, rows), target.index_select(0, rows)


@dataclass(frozen=True)
class DeferredCall:
    """A call of the output layer that was not computed, and the settings at its time.

    Attributes:
        head: The speed-up that deferred it.
        layer: The output layer.
        forward: The layer's own forward.
        dtype: Of its output.
        autocast: Whether autocast was enabled.
        gradient: Whether gradients were enabled.
    """

    head: ChunkedLoss
    layer: nn.Linear
    forward: TensorFunction
    dtype: torch.dtype
    autocast: bool
    gradient: bool

    def values(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output."""
        with (
            torch.set_grad_enabled(self.gradient),
            torch.autocast(hidden.device.type, self.dtype, enabled=self.autocast),
        ):
            return self.forward(hidden)


class LazyLogits(Tensor):
    """A placeholder for `steps(layer(hidden))`, shape (..., classes): a tensor with shape, dtype
    and device, but without data.

    Args:
        call: The call of the layer.
        hidden: Hidden states, of shape (..., width).
        steps: Row-wise operations of the head on the logits, each (logits) -> logits.
    """

    @staticmethod
    def __new__(
        cls: type, call: DeferredCall, hidden: Tensor, steps: Sequence[TensorFunction] = ()
    ) -> "LazyLogits":
        num_classes = call.layer.out_features
        like = torch.empty((0, num_classes), dtype=call.dtype, device=hidden.device)
        for step in steps:
            like = step(like)
        shape = (*hidden.shape[:-1], num_classes)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def __init__(
        self, call: DeferredCall, hidden: Tensor, steps: Sequence[TensorFunction] = ()
    ) -> None:
        self.call = call
        self.hidden = hidden
        self.steps = tuple(steps)
        self.made: Tensor | None = None

    def values(self) -> Tensor:
        """Compute the real logits once: later operations see in-place changes."""
        if self.made is None:
            self.call.head.was_read = True
            made = self.call.values(self.hidden)
            with torch.set_grad_enabled(self.call.gradient):
                for step in self.steps:
                    made = step(made)
            self.made = made
        return self.made

    def rows_of(self, hidden: Tensor) -> "LazyLogits":
        """Return the same logits for other rows."""
        return LazyLogits(self.call, hidden, self.steps)

    def then(self, step: TensorFunction) -> "LazyLogits":
        """Return the same logits with one more step."""
        return LazyLogits(self.call, self.hidden, (*self.steps, step))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called in place of each function of torch that gets lazy logits.

        A function that is known here returns lazy logits, or a loss, without computing them. Any
        other gets the real logits.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _METADATA:
                return function(*args, **kwargs)
            lazy = _HANDLED.get(function)
            is_first = bool(args) and isinstance(args[0], LazyLogits) and args[0].made is None
            if lazy is not None and is_first:
                result = lazy(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return function(*_made(args), **_made(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(
            f"{function} received lazy logits without going through torch's functions (a custom "
            "autograd function?)."
        )


def _made(value: Any) -> Any:
    """Replace lazy logits in arguments of a function by the real ones."""
    if isinstance(value, LazyLogits):
        return value.values()
    if isinstance(value, dict):
        return {name: _made(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        has_some = any(isinstance(entry, LazyLogits | list | tuple) for entry in value)
        return type(value)(map(_made, value)) if has_some else value
    return value


# In place of functions of torch. NotImplemented: the real logits are computed first.


def _reshaped(logits: LazyLogits, *shape: Any) -> Any:
    """Reshape rows, with the classes as the last axis."""
    is_one_argument = len(shape) == 1 and isinstance(shape[0], Sequence)
    sizes = tuple(shape[0]) if is_one_argument else shape
    if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if sizes[-1] != logits.call.layer.out_features:
        return NotImplemented
    return logits.rows_of(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _indexed(logits: LazyLogits, index: Any) -> Any:
    """Take slices that leave the last axis whole: `[:, :-1]`, `[..., :-1, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    reaches_last_axis = len(parts) == logits.hidden.dim() or Ellipsis in parts
    if reaches_last_axis and parts[-1] != slice(None):
        return NotImplemented
    return logits.rows_of(logits.hidden[index])


def _to(logits: LazyLogits, to: Any = None, **kwargs: Any) -> Any:
    """Convert to another floating-point type; other devices are not supported."""
    if kwargs or not isinstance(to, torch.dtype | torch.device):
        return NotImplemented
    if to in (logits.dtype, logits.hidden.device):
        return logits
    if isinstance(to, torch.device) or not to.is_floating_point:
        return NotImplemented
    return logits.then(lambda made: made.to(to))


def _with_number(function: Callable, logits: LazyLogits, number: Any, **kwargs: Any) -> Any:
    """Multiply or divide by a number."""
    if kwargs or not isinstance(number, Real):
        return NotImplemented
    return logits.then(lambda made: function(made, number))


def _plus(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """Add a bias that is not a parameter (BART's `final_logits_bias`)."""
    num_classes = logits.call.layer.out_features
    if kwargs or not isinstance(other, Tensor) or isinstance(other, LazyLogits):
        return NotImplemented
    if other.requires_grad or other.numel() != num_classes or other.shape[-1:] != (num_classes,):
        return NotImplemented
    bias = other.reshape(-1)
    return logits.then(lambda made: made + bias)


def _cross_entropy(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """See `torch.nn.functional.cross_entropy`. Only rows with a target reach the layer."""
    is_old_style = size_average is not None or reduce is not None
    if is_old_style or reduction not in ("mean", "sum"):
        return NotImplemented
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return NotImplemented
    call = logits.call
    layer = call.layer
    hidden, target = call.head.rows_with_target(logits.hidden, target, ignore_index)
    head = OutputProjection(
        layer.weight, layer.bias, call.dtype, logits.steps, weight, label_smoothing
    )
    rows = call.head.rows_per_chunk or rows_of_chunk(hidden, layer.out_features)
    return cross_entropy(head, hidden, target, rows, mean=reduction == "mean")


# Functions that do not read the logits' data.
_METADATA = {
    Tensor.shape.__get__,
    Tensor.dtype.__get__,
    Tensor.device.__get__,
    Tensor.ndim.__get__,
    Tensor.layout.__get__,
    Tensor.is_cuda.__get__,
    Tensor.requires_grad.__get__,
    Tensor.is_leaf.__get__,
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.__hash__,
}
_SCALING = (
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.div,
    Tensor.__truediv__,
    torch.mul,
    torch.div,
)
_HANDLED: dict[Callable, Callable] = {
    F.cross_entropy: _cross_entropy,
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: lambda logits: logits,
    Tensor.float: partial(_to, to=torch.float32),
    Tensor.to: _to,
    **dict.fromkeys((Tensor.tanh, torch.tanh), lambda logits: logits.then(torch.tanh)),
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _plus),
    **{function: partial(_with_number, function) for function in _SCALING},
}
