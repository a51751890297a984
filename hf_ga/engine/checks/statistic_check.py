"""Checks that a loop compares no sample with a statistic of its micro-batch, as a loss that counts
only where it exceeds the mean of all.

A comparison passes no gradient, so the graph of the loss does not show it, and a sample may lie on
the same side in any company that a rehearsal tries. So a model's outputs are watched in a
rehearsal: what is computed from them knows whether it depends on other samples.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.engine.look.inside import nodes_below
from hf_ga.model.forward import force_eager

MAX_NODES = 200  # of a term's graph, from the loss on
COMPARISONS = {"eq", "ne", "gt", "ge", "lt", "le", "isclose", "bucketize", "searchsorted"}
STEPS = COMPARISONS | {"sign", "sgn", "heaviside", "floor", "ceil", "round", "trunc", "relu", "abs"}
LIMITS = {"clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "max", "min"}
ORDERS = {"topk", "sort", "argsort", "msort"}
SPLITS = {"unbind", "select", "split", "chunk", "tensor_split"}
SHOWN = {"__deepcopy__", "__reduce_ex__", "__repr__"}


@dataclass(frozen=True)
class Origin:
    """What a watched tensor was computed from.

    Attributes:
        check: The check that watches it.
        is_statistic: Whether it is one number of several samples.
        is_mixed: Whether its rows depend on such a number.
        function: That by which they do so in steps, without a gradient. None: in no such way.
    """

    check: "StatisticCheck"
    is_statistic: bool = False
    is_mixed: bool = False
    function: str | None = None


class StatisticCheck:
    """Watches what a loop computes from the outputs of its models in one micro-batch."""

    def __init__(self) -> None:
        """Start switched off."""
        self._is_on = False
        self._watched: list[weakref.ref[Tensor]] = []
        self._function_at: dict[Node, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block, until `stop`. Compiled functions of the loop run eagerly: they do not
        take watched tensors.
        """
        self._is_on = True
        try:
            with force_eager():
                yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Watch no longer: all watched tensors are plain ones again."""
        self._is_on = False
        for reference in self._watched:
            tensor = reference()
            if tensor is not None:
                _make_plain(tensor)
        self._watched = []

    def clear(self) -> None:
        """Forget the graph of a micro-batch."""
        self._function_at = {}

    def watch(self, tensor: Tensor) -> None:
        """Watch an output of a model with rows of samples."""
        if self._is_on:
            self._mark(tensor, Origin(self))

    def functions_below(self, nodes: Sequence[Node]) -> set[str]:
        """Return the functions below a term that compare samples with a statistic of several.

        Args:
            nodes: The nodes of the term.
        """
        below = nodes_below(nodes, MAX_NODES) if self._function_at else ()
        return {self._function_at[node] for node in below if node in self._function_at}

    def note(self, name: str, values: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note what a function of torch computed from watched tensors.

        Args:
            name: The function's name.
            values: The watched tensors among its arguments.
            results: The tensors that it returned.
        """
        if not self._is_on:
            return
        origins = [value.origin for value in values]
        are_statistics = [origin.is_statistic for origin in origins]
        is_compared = any(are_statistics) and not all(are_statistics)
        is_mixed = is_compared or any(o.is_mixed and not o.is_statistic for o in origins)
        is_ordered = name in ORDERS and values[0].dim() == 1
        functions = [origin.function for origin in origins if origin.function is not None]
        if is_ordered or (is_mixed and name in STEPS) or (is_compared and name in LIMITS):
            functions.append(f"torch.{name}")
        function = functions[0] if functions else None
        for result in results:
            if function is not None and result.grad_fn is not None:
                self._function_at[result.grad_fn] = function
            is_statistic = all(are_statistics) or result.numel() == 1
            self._mark(result, Origin(self, is_statistic, is_mixed, function))

    def _mark(self, tensor: Tensor, origin: Origin) -> None:
        """Watch a tensor: in place, as another object would be another node of the graph."""
        if type(tensor) is Tensor:
            tensor.__class__ = WatchedTensor
            self._watched.append(weakref.ref(tensor))
        if type(tensor) is WatchedTensor:
            tensor.origin = origin


class WatchedTensor(Tensor):
    """A tensor that was computed from outputs of a model.

    Attributes:
        origin: What it was computed from.
    """

    origin: Origin

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch, and note its results unless they are of single samples."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in SHOWN:  # the class, which the loop must not meet
            _make_plain(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if name in SPLITS or (name == "__getitem__" and _takes_one_row(args[1])):
            return result
        results = list(_tensors(args[:1] if name == "__setitem__" else [result]))
        values = [v for v in _tensors([*args, *kwargs.values()]) if type(v) is WatchedTensor]
        if results and values:
            values[0].origin.check.note(name, values, results)
        return result


def _make_plain(tensor: Tensor) -> None:
    """Watch a tensor no longer."""
    if type(tensor) is WatchedTensor:
        tensor.__class__ = Tensor
        del tensor.origin


def _takes_one_row(index: Any) -> bool:
    """Whether an index takes a single row of the first dim."""
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, int) and not isinstance(first, bool)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among some values, also in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
