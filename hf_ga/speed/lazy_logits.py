"""Logits that are computed on demand: a cross entropy needs only the rows with a target, chunk by
chunk.

Within a window, the output layer of a language model returns `LazyLogits`. Heads pass them through
`view`, `float`, slices and scaling to `torch.nn.functional.cross_entropy`, which computes on chunks
of the rows with a target (`chunked_loss.py`). Any other operation first computes the real logits
with the layer's own forward, so value and gradient are the head's own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.model.forward import compiled_modules
from hf_ga.model.override import Replacement, override
from hf_ga.speed.chunked_loss import (
    OutputProjection,
    choose_rows_per_chunk,
    chunked_cross_entropy,
)
from hf_ga.speed.speed_up import Call, SpeedUp

TensorFunction = Callable[[Tensor], Tensor]
TRIAL_ROWS_PER_CHUNK = 3
# Modules whose parameters are gathered for a forward, and sharded again after it.


class ChunkedLoss(SpeedUp):
    """Speed-up that computes a language model's cross entropy chunk by chunk of logits.

    Within a window, the output layer returns `LazyLogits`, so that no tensor of tokens x vocabulary
    is allocated.

    Attributes:
        output_layer: The model's output layer. None: it cannot be made lazy.
        was_read: Whether any operation other than the loss needed the real logits.
        rows_per_chunk: Rows whose logits are computed together. None: as memory allows.
    """

    name = "chunked loss"

    def __init__(self) -> None:
        """Start the chunked loss without a model; `attach` keeps the model."""
        self.output_layer: nn.Linear | None = None
        self.was_read = False
        self.rows_per_chunk: int | None = None
        # For each chunked cross entropy of the last forward, the rows for which it computed logits.
        self._num_rows: list[int] = []

    def attach(self, model: nn.Module, draws: KeyedDraws) -> str | None:
        """Keep the model; return why its loss cannot be chunked, or None if it can be tried: if it
        has an output layer that can be made lazy.
        """
        self._model = model
        self.find_output_layer(compiled_modules(model))
        if self.output_layer is None:
            return "it has no plain linear output layer"
        return None

    def obstacle(self, compiled: Sequence[nn.Module]) -> str | None:
        """Find the output layer anew; return why it cannot be lazy any more."""
        self.find_output_layer(compiled)
        if self.output_layer is None:
            return "the output layer was changed or sharded after the trials"
        return None

    def find_output_layer(self, compiled: Sequence[nn.Module]) -> None:
        """Find the model's output layer (`get_output_embeddings()`).

        It must be a plain `nn.Linear` without hooks or a replaced forward: adapters and quantized
        layers have other types. It must not be in a compiled module, whose graph lazy logits would
        break, nor in an FSDP unit other than the whole model, which would shard the layer again
        before the loss needs its weight.

        Args:
            compiled: The compiled modules of the model.
        """
        self.output_layer = None
        get_output_embeddings = getattr(self._model, "get_output_embeddings", None)
        layer = None if get_output_embeddings is None else get_output_embeddings()
        if type(layer) is not nn.Linear or "forward" in vars(layer) or layer._forward_hooks:
            return
        if any(layer in root.modules() for root in compiled):
            return
        if isinstance(self._model, FSDPModule):
            for unit in self._model.modules():
                is_inner_unit = isinstance(unit, FSDPModule) and unit is not self._model
                if is_inner_unit and layer in unit.modules():
                    return
        self.output_layer = layer

    def trial(self) -> AbstractContextManager[None]:
        """Use small chunks in the trial of this speed-up, so that small batches have several."""
        return override(self, rows_per_chunk=TRIAL_ROWS_PER_CHUNK)

    def verdict(self) -> str | None:
        """After the trial of this speed-up, return why the chunked loss gained nothing.

        Returns:
            The reason, or None if the loss was computed in chunks and nothing else read the logits.
        """
        if not self._num_rows:
            return "its loss is not a cross entropy of the logits"
        if self.was_read:
            return "its logits are read besides the loss"
        return None

    def before(self, call: Call) -> None:
        """Forget the numbers of rows of the forward before."""
        self._num_rows.clear()  # not in `after`: `verdict` reads them after a trial

    def replacements(self) -> Sequence[Replacement]:
        """Let the model's output layer return lazy logits."""
        layer = self.output_layer
        if layer is None:
            return ()
        return [(layer, "forward", partial(self._lazy_forward, layer, layer.forward))]

    def _lazy_forward(
        self, layer: nn.Linear, forward: TensorFunction, input: Tensor
    ) -> "LazyLogits":
        """Replace the forward of the output layer: return lazy logits instead of computing them.

        Args:
            layer: The output layer.
            forward: Its own forward.
            input: Hidden states, of shape (..., hidden size).

        Returns:
            Lazy logits, of shape (..., classes), with the dtype of the layer's output.
        """
        device_type = input.device.type
        dtype = input.dtype
        autocast_enabled = torch.is_autocast_enabled(device_type)
        # Autocast does not convert float64.
        if autocast_enabled and torch.float64 not in (dtype, layer.weight.dtype):
            dtype = torch.get_autocast_dtype(device_type)
        layer_call = DeferredLayerCall(
            speed_up=self,
            layer=layer,
            forward=forward,
            dtype=dtype,
            autocast_enabled=autocast_enabled,
            grad_enabled=torch.is_grad_enabled(),
        )
        return LazyLogits(layer_call, input)

    def select_rows_with_target(
        self, hidden: Tensor, target: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        """Select the hidden states and targets of the rows whose target is not ignored.

        The chunked loss computes logits for these rows only. Records their number. Waits for the
        device, which counts them.

        Args:
            hidden: Hidden states, of shape (rows, hidden size).
            target: Classes: int64, of shape (rows,).
            ignore_index: The class that marks ignored rows.
        """
        rows = (target != ignore_index).nonzero().squeeze(1)
        self._num_rows.append(len(rows))
        if len(rows) == len(target):
            return hidden, target
        return hidden.index_select(0, rows), target.index_select(0, rows)


@dataclass(frozen=True)
class DeferredLayerCall:
    """A call of the output layer that has not been computed, with torch's settings at that time.

    Attributes:
        speed_up: The speed-up that deferred it.
        layer: The output layer.
        forward: The layer's own forward.
        dtype: The dtype of its output.
        autocast_enabled: Whether autocast was enabled.
        grad_enabled: Whether gradients were enabled.
    """

    speed_up: ChunkedLoss
    layer: nn.Linear
    forward: TensorFunction
    dtype: torch.dtype
    autocast_enabled: bool
    grad_enabled: bool

    def compute(self, hidden: Tensor) -> Tensor:
        """Compute the output layer's logits for hidden states, as when the call was deferred.

        Autocast and grad mode are those of that time.
        """
        with (
            torch.set_grad_enabled(self.grad_enabled),
            torch.autocast(hidden.device.type, self.dtype, enabled=self.autocast_enabled),
        ):
            return self.forward(hidden)


class LazyLogits(Tensor):
    """A placeholder for the logits of an output layer: with shape, dtype and device, without data.

    It stands in for `logit_ops(layer(hidden))`, of shape (..., classes).

    Args:
        layer_call: The deferred call of the output layer.
        hidden: The layer's input, of shape (..., hidden size).
        logit_ops: Row-wise operations that the head has applied to the logits so far, each
            (logits) -> logits.

    Attributes:
        real_logits: The computed logits, once an operation needed them; None before.
    """

    @staticmethod
    def __new__(
        cls: type,
        layer_call: DeferredLayerCall,
        hidden: Tensor,
        logit_ops: Sequence[TensorFunction] = (),
    ) -> "LazyLogits":
        """Create the placeholder for logits, with the shape and dtype that they would have.

        Running the operations on logits without rows shows the dtype.
        """
        num_classes = layer_call.layer.out_features
        no_rows = torch.empty((0, num_classes), dtype=layer_call.dtype, device=hidden.device)
        for logit_op in logit_ops:
            no_rows = logit_op(no_rows)
        shape = (*hidden.shape[:-1], num_classes)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=no_rows.dtype, device=no_rows.device)

    def __init__(
        self,
        layer_call: DeferredLayerCall,
        hidden: Tensor,
        logit_ops: Sequence[TensorFunction] = (),
    ) -> None:
        """Store what is needed to compute the lazy logits later; `__new__` set shape and dtype."""
        self.layer_call = layer_call
        self.hidden = hidden
        self.logit_ops = tuple(logit_ops)
        self.real_logits: Tensor | None = None

    def materialize(self) -> Tensor:
        """Compute and cache the real logits, and record that the chunked loss did not avoid them.

        Each call returns the same tensor, so that later operations see in-place changes.
        """
        if self.real_logits is None:
            self.layer_call.speed_up.was_read = True
            logits = self.layer_call.compute(self.hidden)
            with torch.set_grad_enabled(self.layer_call.grad_enabled):
                for logit_op in self.logit_ops:
                    logits = logit_op(logits)
            self.real_logits = logits
        return self.real_logits

    def with_hidden(self, hidden: Tensor) -> "LazyLogits":
        """Return lazy logits for other hidden states, of the same output layer and operations."""
        return LazyLogits(self.layer_call, hidden, self.logit_ops)

    def with_op(self, logit_op: TensorFunction) -> "LazyLogits":
        """Return lazy logits to which one more row-wise operation is applied."""
        return LazyLogits(self.layer_call, self.hidden, (*self.logit_ops, logit_op))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Intercept each function of torch that is called with lazy logits.

        Functions in `LAZY_FUNCTIONS` return lazy logits, or a loss, without computing the logits.
        Functions in `METADATA_FUNCTIONS` read shape and dtype only. All others, and calls with
        arguments that the lazy version does not support, get the real logits.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in METADATA_FUNCTIONS:
                return function(*args, **kwargs)
            lazy_function = LAZY_FUNCTIONS.get(function)
            is_lazy = bool(args) and isinstance(args[0], LazyLogits) and args[0].real_logits is None
            if lazy_function is not None and is_lazy:
                result = lazy_function(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return function(*_materialized(args), **_materialized(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise a TypeError: lazy logits have reached a kernel of torch, which needs data."""
        raise TypeError(
            f"{function} received lazy logits without going through torch's functions (a custom "
            "autograd function?)."
        )


def _materialized(value: Any) -> Any:
    """Replace lazy logits by real ones in a function's arguments, also in lists, tuples, dicts.

    Other values are returned as they are.
    """
    if isinstance(value, LazyLogits):
        return value.materialize()
    if isinstance(value, dict):
        return {name: _materialized(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        may_contain = any(isinstance(entry, LazyLogits | list | tuple) for entry in value)
        return type(value)(map(_materialized, value)) if may_contain else value
    return value


# Lazy versions of torch's functions, for `LazyLogits.__torch_function__`. If one returns
# NotImplemented, the real logits are computed and passed to torch's own function.


def _lazy_reshape(logits: LazyLogits, *shape: Any) -> Any:
    """Lazy version of `Tensor.reshape` and `view` for logits, if the classes stay the last dim.

    Args:
        logits: Lazy logits, of shape (..., classes).
        shape: The new sizes, as several integers or one sequence.

    Returns:
        Lazy logits, or NotImplemented to compute the real ones: if the last new size is not the
        number of classes, or the new shape has one dim.
    """
    is_one_argument = len(shape) == 1 and isinstance(shape[0], Sequence)
    sizes = tuple(shape[0]) if is_one_argument else shape
    if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if sizes[-1] != logits.layer_call.layer.out_features:
        return NotImplemented
    return logits.with_hidden(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _lazy_getitem(logits: LazyLogits, index: Any) -> Any:
    """Lazy version of slicing logits, if it keeps all classes: `[:, :-1]` or `[..., :-1, :]`.

    Returns:
        Lazy logits, or NotImplemented to compute the real ones: for an index other than slices and
        an ellipsis, or one that slices the last dim.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    reaches_last_dim = len(parts) == logits.hidden.dim() or Ellipsis in parts
    if reaches_last_dim and parts[-1] != slice(None):
        return NotImplemented
    return logits.with_hidden(logits.hidden[index])


def _lazy_to(logits: LazyLogits, to: Any = None, **kwargs: Any) -> Any:
    """Lazy version of `Tensor.to` and `float` for logits: convert to another floating-point dtype.

    Returns:
        Lazy logits (the same ones if they have this dtype or device already), or NotImplemented to
        compute the real ones: for another device, an integer dtype, or other arguments.
    """
    if kwargs or not isinstance(to, torch.dtype | torch.device):
        return NotImplemented
    if to in (logits.dtype, logits.hidden.device):
        return logits
    if isinstance(to, torch.device) or not to.is_floating_point:
        return NotImplemented
    return logits.with_op(lambda real_logits: real_logits.to(to))


def _lazy_scale(function: Callable, logits: LazyLogits, number: Any, **kwargs: Any) -> Any:
    """Lazy version of multiplying or dividing logits by a Python number.

    Args:
        function: torch's function, such as `Tensor.mul` or `torch.div`.
        logits: Lazy logits.
        number: The second argument of the function.
        kwargs: Other arguments of the function.

    Returns:
        Lazy logits, or NotImplemented to compute the real ones: if `number` is a tensor, or there
        are other arguments.
    """
    if kwargs or not isinstance(number, Real):
        return NotImplemented
    return logits.with_op(lambda real_logits: function(real_logits, number))


def _lazy_add(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """Lazy version of adding a bias without gradient to logits (BART's `final_logits_bias`).

    Returns:
        Lazy logits, or NotImplemented to compute the real ones: unless `other` is a tensor with one
        number per class that does not require gradients.
    """
    num_classes = logits.layer_call.layer.out_features
    if kwargs or not isinstance(other, Tensor) or isinstance(other, LazyLogits):
        return NotImplemented
    if other.requires_grad or other.numel() != num_classes or other.shape[-1:] != (num_classes,):
        return NotImplemented
    bias = other.reshape(-1)
    return logits.with_op(lambda real_logits: real_logits + bias)


def _lazy_cross_entropy(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Lazy version of `torch.nn.functional.cross_entropy`, with the same arguments.

    Computes logits only for the rows whose target is not ignored, chunk by chunk.

    Returns:
        The loss, a scalar. NotImplemented to compute the real logits: for reduction "none", the
        deprecated arguments `size_average` and `reduce`, logits that do not have shape (rows,
        classes), or targets that are probabilities.
    """
    is_deprecated_call = size_average is not None or reduce is not None
    if is_deprecated_call or reduction not in ("mean", "sum"):
        return NotImplemented
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return NotImplemented
    layer_call = logits.layer_call
    layer = layer_call.layer
    speed_up = layer_call.speed_up
    hidden, target = speed_up.select_rows_with_target(logits.hidden, target, ignore_index)
    projection = OutputProjection(
        layer.weight,
        layer.bias,
        layer_call.dtype,
        logit_ops=logits.logit_ops,
        class_weights=weight,
        label_smoothing=label_smoothing,
    )
    rows_per_chunk = speed_up.rows_per_chunk
    if rows_per_chunk is None:
        rows_per_chunk = choose_rows_per_chunk(hidden, layer.out_features)
    return chunked_cross_entropy(
        projection, hidden, target, rows_per_chunk, mean=reduction == "mean"
    )


# Functions that do not read the logits' data.
METADATA_FUNCTIONS = {
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
SCALING_FUNCTIONS = (
    Tensor.mul,
    Tensor.__mul__,
    Tensor.__rmul__,
    Tensor.div,
    Tensor.__truediv__,
    torch.mul,
    torch.div,
)
# torch's function -> its lazy version.
LAZY_FUNCTIONS: dict[Callable, Callable] = {
    F.cross_entropy: _lazy_cross_entropy,
    Tensor.view: _lazy_reshape,
    Tensor.reshape: _lazy_reshape,
    torch.reshape: _lazy_reshape,
    Tensor.__getitem__: _lazy_getitem,
    Tensor.contiguous: lambda logits: logits,
    Tensor.float: partial(_lazy_to, to=torch.float32),
    Tensor.to: _lazy_to,
    **dict.fromkeys((Tensor.tanh, torch.tanh), lambda logits: logits.with_op(torch.tanh)),
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _lazy_add),
    **{function: partial(_lazy_scale, function) for function in SCALING_FUNCTIONS},
}
