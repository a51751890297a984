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
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_ga.exact.batches import Batch
from hf_ga.exact.forward import compiled_modules
from hf_ga.exact.hooks import Call, Hook, SpeedUp
from hf_ga.exact.loss import COUNTING_RULES
from hf_ga.speed.chunked_loss import OutputProjection, cross_entropy, rows_of_chunk

Forward = Callable[[Tensor], Tensor]
TRIAL_ROWS = 3
UNITS = (
    FullyShardedDataParallel,
    FSDPModule,
)  # modules whose parameters are gathered for a forward


class ChunkedLoss(SpeedUp):
    """The output layer of a language model returns `LazyLogits`, so no tensor of tokens x
    vocabulary is allocated.
    """

    name = "chunked loss"

    def __init__(self) -> None:
        self._expected: int | None = None  # rows with a target in the next forward
        self._count: Callable[[Batch, int], int] | None = (
            None  # counts the targets of the head's only cross entropy on the host
        )
        self._call: Call | None = None
        self._rows: list[int] = []  # for each cross entropy in scope: rows that reached the layer
        self.was_read = False  # an operation other than the loss read logits
        self.rows_per_chunk: int | None = None  # None: limited by memory

    def attach(
        self, model: nn.Module, dropout: Hook, *, reads_logits: bool, has_router: bool
    ) -> str:
        if reads_logits:  # after the forward: under FSDP the layer is sharded again
            return "its loss is computed from the logits"
        self._model = model
        return "" if self.layer is not None else "it has no plain linear output layer"

    @property
    def layer(self) -> nn.Linear | None:
        """The output layer, if it is a plain linear layer without wrappers or hooks, and not part
        of compiled code, whose graph it would break.

        Adapters and quantised layers have other types. An FSDP unit below the model reshards its
        layer before the loss.
        """
        get = getattr(self._model, "get_output_embeddings", None)
        layer = get() if get is not None else None
        plain = (
            type(layer) is nn.Linear and "forward" not in vars(layer) and not layer._forward_hooks
        )
        if not plain or any(layer in root.modules() for root in compiled_modules(self._model)):
            return None
        units = (
            unit
            for unit in self._model.modules()
            if isinstance(unit, UNITS) and unit is not self._model
        )
        return (
            None if any(layer is module for unit in units for module in unit.modules()) else layer
        )

    def trial(self) -> AbstractContextManager[None]:
        """Use chunks of few rows, so that probes have several."""
        return patch.object(self, "rows_per_chunk", TRIAL_ROWS)

    def verdict(self) -> str:
        if not self._rows:
            return "its loss is not a cross entropy of the logits"
        micro_batch = self._call.micro_batch
        rules = (
            COUNTING_RULES[name]
            for name in ("shifted labels", "labels")
            if "labels" in micro_batch.batch
        )
        self._count = next(
            (rule for rule in rules if [rule(micro_batch.batch, len(micro_batch))] == self._rows),
            None,
        )
        return "its logits are read besides the loss" if self.was_read else ""

    def before(self, call: Call) -> None:
        """Count targets on the host if possible, to avoid counting them on the device."""
        self._call, micro_batch = call, call.micro_batch
        self._expected = (
            self._count(micro_batch.batch, len(micro_batch))
            if self._count and call.counts
            else None
        )

    @contextmanager
    def scope(self, model: nn.Module) -> Iterator[None]:
        self._rows.clear()  # at the beginning: `verdict` reads them after a trial
        with ExitStack() as stack:
            if (layer := self.layer) is not None:
                stack.enter_context(
                    patch.object(layer, "forward", partial(self._defer, layer, layer.forward))
                )
            yield

    def _defer(self, layer: nn.Linear, forward: Forward, input: Tensor) -> "LazyLogits":
        """Replaces `layer.forward`."""
        kind, dtype = input.device.type, input.dtype
        autocast = torch.is_autocast_enabled(kind)
        if autocast and torch.float64 not in (dtype, layer.weight.dtype):  # float64 stays
            dtype = torch.get_autocast_dtype(kind)
        return LazyLogits(
            Source(self, layer, forward, dtype, autocast, torch.is_grad_enabled()), input
        )

    def rows_with_target(
        self, hidden: Tensor, target: Tensor, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        """Hidden states and targets of the rows with a target."""
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
        return (
            (hidden, target)
            if len(rows) == len(target)
            else (hidden.index_select(0, rows), target.index_select(0, rows))
        )


@dataclass(frozen=True)
class Source:
    """A deferred call of a layer, and the settings at the time of the call.

    Attributes:
        forward: the layer's own. dtype: of its output. autocast, gradient: whether they were
            enabled.
    """

    head: ChunkedLoss
    layer: nn.Linear
    forward: Forward
    dtype: torch.dtype
    autocast: bool
    gradient: bool

    def values(self, hidden: Tensor) -> Tensor:
        """The layer's output."""
        with (
            torch.set_grad_enabled(self.gradient),
            torch.autocast(hidden.device.type, self.dtype, enabled=self.autocast),
        ):
            return self.forward(hidden)


class LazyLogits(Tensor):
    """A placeholder for `steps(layer(hidden))`, shape (..., classes): a tensor with shape, dtype
    and device, but without data.

    Args:
        hidden: shape (..., width). steps: row-wise operations of the head on the logits, each
            (logits) -> logits.
    """

    @staticmethod
    def __new__(
        cls: type, source: Source, hidden: Tensor, steps: Sequence[Forward] = ()
    ) -> "LazyLogits":
        like = torch.empty((0, source.layer.out_features), dtype=source.dtype, device=hidden.device)
        for step in steps:
            like = step(like)
        shape = (*hidden.shape[:-1], source.layer.out_features)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def __init__(self, source: Source, hidden: Tensor, steps: Sequence[Forward] = ()) -> None:
        self.source, self.hidden, self.steps = source, hidden, tuple(steps)
        self.made: Tensor | None = None

    def values(self) -> Tensor:
        """Compute the real logits once: later operations see in-place changes."""
        if self.made is None:
            self.source.head.was_read = True
            made = self.source.values(self.hidden)
            with torch.set_grad_enabled(self.source.gradient):
                for step in self.steps:
                    made = step(made)
            self.made = made
        return self.made

    def rows_of(self, hidden: Tensor) -> "LazyLogits":
        """The same logits for other rows."""
        return LazyLogits(self.source, hidden, self.steps)

    def then(self, step: Forward) -> "LazyLogits":
        """The same logits with one more step."""
        return LazyLogits(self.source, self.hidden, (*self.steps, step))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _METADATA:
                return function(*args, **kwargs)
            lazy = _HANDLED.get(function)
            if (
                lazy is not None
                and args
                and isinstance(args[0], LazyLogits)
                and args[0].made is None
            ):
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
    if isinstance(value, LazyLogits):
        return value.values()
    if isinstance(value, list | tuple) and any(
        isinstance(v, LazyLogits | list | tuple) for v in value
    ):
        return type(value)(map(_made, value)) if type(value) in (list, tuple) else value
    return {name: _made(v) for name, v in value.items()} if isinstance(value, dict) else value


def _reshaped(logits: LazyLogits, *shape: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if (
        len(sizes) < 2
        or not all(isinstance(size, int) for size in sizes)
        or sizes[-1] != logits.source.layer.out_features
    ):
        return NotImplemented
    return logits.rows_of(logits.hidden.reshape(*sizes[:-1], logits.hidden.shape[-1]))


def _indexed(logits: LazyLogits, index: Any) -> Any:
    """Slices that leave the last axis whole: `[:, :-1]`, `[..., :-1, :]`."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts):
        return NotImplemented
    whole = (
        parts[-1] == slice(None) if len(parts) == logits.hidden.dim() or Ellipsis in parts else True
    )
    return logits.rows_of(logits.hidden[index]) if whole else NotImplemented


def _to(logits: LazyLogits, to: Any = None, **kwargs: Any) -> Any:
    if kwargs or not isinstance(to, torch.dtype | torch.device):
        return NotImplemented
    if isinstance(to, torch.device):
        return logits if to == logits.hidden.device else NotImplemented
    if to == logits.dtype:
        return logits
    return logits.then(lambda made: made.to(to)) if to.is_floating_point else NotImplemented


def _with_number(function: Callable, logits: LazyLogits, number: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(number, Real):
        return NotImplemented
    return logits.then(lambda made: function(made, number))


def _plus(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
    """Add a bias that is not a parameter (BART's `final_logits_bias`)."""
    constant = (
        isinstance(other, Tensor)
        and not other.requires_grad
        and other.shape[-1:] == logits.shape[-1:]
    )
    if (
        kwargs
        or not constant
        or isinstance(other, LazyLogits)
        or other.numel() != logits.source.layer.out_features
    ):
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
    plain = size_average is None and reduce is None and reduction in ("mean", "sum")
    if (
        not plain
        or logits.dim() != 2
        or target.dim() != 1
        or len(target) != len(logits)
        or target.is_floating_point()
    ):
        return NotImplemented
    source, layer = logits.source, logits.source.layer
    hidden, target = source.head.rows_with_target(logits.hidden, target, ignore_index)
    head = OutputProjection(
        layer.weight, layer.bias, source.dtype, logits.steps, weight, label_smoothing
    )
    rows = source.head.rows_per_chunk or rows_of_chunk(hidden, layer.out_features)
    return cross_entropy(head, hidden, target, rows, mean=reduction == "mean")


# Functions that do not read the logits' data.
_METADATA = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "ndim",
            "layout",
            "is_cuda",
            "requires_grad",
            "is_leaf",
        )
    ),
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        Tensor.__hash__,
    ),
}
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
    **{
        function: partial(_with_number, function)
        for function in (
            Tensor.mul,
            Tensor.__mul__,
            Tensor.__rmul__,
            Tensor.div,
            Tensor.__truediv__,
            torch.mul,
            torch.div,
        )
    },
}
