"""Checks that a loop compares no sample with a statistic of its micro-batch, as a loss that counts
only where it exceeds the mean of all.

A comparison passes no gradient, so the graph of the loss does not show it, and a sample may lie on
the same side in any company that a rehearsal tries. So what a loop computes from the outputs of its
models and from the batch is watched where a window is rehearsed: each tensor knows what it was
computed from. A statistic that became a number of Python shows in that the number differs between
micro-batches.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.compiler import is_compiling

from hf_ga.model.forward import force_eager
from hf_ga.model.outputs import named_tensors, tensors_in

# Functions whose result changes in steps, or whose gradient does.
COMPARISONS = {"eq", "ne", "gt", "ge", "lt", "le", "isclose", "bucketize", "searchsorted"}
COMPARISONS |= {"not_equal", "greater", "greater_equal", "less", "less_equal"}
ROUNDINGS = {"sign", "sgn", "heaviside", "floor", "ceil", "round", "trunc"}
STEPS = COMPARISONS | ROUNDINGS | {"relu", "leaky_relu", "hardtanh", "threshold", "abs", "l1_loss"}
# Functions that choose between their arguments: steps where one of them is a statistic.
LIMITS = {"clamp", "clip", "clamp_min", "clamp_max", "minimum", "maximum", "max", "min"}
# Functions that take some rows of all, by their size.
CHOICES = {"topk", "kthvalue"}
# Functions that put rows in another order.
ORDERS = {"sort", "argsort", "msort"}
INDEXING = {"__getitem__", "index_select", "gather", "take", "masked_select"}
# Functions whose result has the shape or the type of a tensor, but none of its values.
CONSTANTS = {"zeros_like", "ones_like", "full_like", "empty_like"}
CONSTANTS |= {"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"}
# Functions that may return what is of one sample.
SPLITS = {"unbind", "select", "split", "chunk", "tensor_split"}
# Functions that show the class of a tensor.
SHOWN = {"__deepcopy__", "__reduce_ex__", "__repr__", "__format__"}


@dataclass(frozen=True)
class Step:
    """A comparison, or what else changes in steps, on which samples depend.

    Attributes:
        function: The function of torch.
        numbers: The numbers of Python that it depends on.
        is_mixed: Whether it depends on a statistic of several samples.
    """

    function: str
    numbers: frozenset[float]
    is_mixed: bool


@dataclass(frozen=True)
class Origin:
    """What a watched tensor was computed from.

    Attributes:
        check: The check that watches it.
        is_statistic: Whether it is one number of several samples.
        is_mixed: Whether its rows depend on such a number, or on the order of samples.
        order: The function of which it is the result, if it is that order: what is taken of it are
            chosen samples.
        numbers: The numbers of Python that its rows depend on.
        steps: The steps that it depends on.
    """

    check: "StatisticCheck"
    is_statistic: bool = False
    is_mixed: bool = False
    order: str | None = None
    numbers: frozenset[float] = frozenset()
    steps: frozenset[Step] = frozenset()


class StatisticCheck:
    """Watches what a loop computes in one micro-batch, between its forwards and its backward.

    Attributes:
        is_on: Whether it does in the current one.
    """

    def __init__(self) -> None:
        """Start switched off."""
        self.is_on = False
        self._num_samples = 0
        self._inputs: list[Tensor] = []  # with a row for each sample
        self._watched: list[weakref.ref[Tensor]] = []
        self._eager = ExitStack()
        self._steps_at: dict[Node, frozenset[Step]] = {}

    @contextmanager
    def watching(self, *, is_compiled: bool) -> Iterator[None]:
        """Watch in the block, from the first output of a model on.

        Args:
            is_compiled: Whether models are compiled. If not, functions that call them run eagerly.
        """
        with nullcontext() if is_compiled else force_eager():
            self.is_on = True
            try:
                yield
            finally:
                self.stop()
                self.is_on = False
                self._inputs = []
                self._steps_at = {}

    def stop(self) -> None:
        """Watch no longer, up to the next output: all watched tensors are plain ones again."""
        if is_compiling():  # torch.compile traces a hook
            return
        for reference in self._watched:
            tensor = reference()
            if tensor is not None:
                _make_plain(tensor)
        self._watched = []
        self._eager.close()

    def note_batch(self, batch: Any, num_samples: int) -> None:
        """Note a batch that the loop has."""
        if self.is_on:
            self._num_samples = num_samples
            tensors = named_tensors(batch).values()
            self._inputs += [t for t in tensors if t.dim() and len(t) == num_samples]

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Watch outputs of models or of their layers, and the batch. Compiled functions run eagerly
        from now on: they do not take watched tensors.
        """
        if not is_compiling() and self.is_on:
            for tensor in (*self._inputs, *outputs):
                self._mark(tensor, Origin(self))
            if self._watched:
                self._eager.enter_context(force_eager())

    def steps_at(self, nodes: Iterable[Node]) -> set[Step]:
        """Return the steps that the results at some nodes of the graph depend on."""
        if not self._steps_at:
            return set()
        return {step for node in nodes for step in self._steps_at.get(node, ())}

    def note(
        self, name: str, arguments: Sequence[Any], values: Sequence[Tensor], results: list[Tensor]
    ) -> None:
        """Note what a function of torch computed from watched tensors.

        Args:
            name: The function's name.
            arguments: What it was given.
            values: The watched tensors among them.
            results: The tensors that it returned.
        """
        given = frozenset(number for number in arguments if isinstance(number, float))
        if name in CONSTANTS:
            self._mark(results[0], Origin(self, numbers=given))
            return
        origins = [value.origin for value in values]
        are_statistics = [origin.is_statistic for origin in origins]
        is_compared = any(are_statistics) and not all(are_statistics)
        is_mixed = is_compared or any(o.is_mixed and not o.is_statistic for o in origins)
        if name in INDEXING:  # rows in another order are the same rows
            is_mixed = any(value.origin.is_mixed for value in values if value is arguments[0])
        numbers = frozenset[float]()
        if not all(are_statistics):
            numbers = given.union(*(origin.numbers for origin in origins))
        steps = frozenset[Step]().union(*(origin.steps for origin in origins))
        is_step = (is_mixed and name in STEPS) or (is_compared and name in LIMITS)
        is_row = self._num_samples != 1 and self._is_one_row(values[0])
        if is_step or (name in CHOICES and is_row):
            steps |= {Step(name, numbers, is_mixed=True)}
        elif name == "__getitem__" and _is_part_of_order(values[0], results[0]):
            steps |= {Step(origins[0].order, numbers, is_mixed=True)}
        elif numbers and name in STEPS | LIMITS:
            steps |= {Step(name, numbers, is_mixed=False)}
        order = name if name in ORDERS and is_row else None
        origin = Origin(self, is_mixed=is_mixed, order=order, numbers=numbers, steps=steps)
        for result in results:
            if steps and result.grad_fn is not None:
                self._steps_at[result.grad_fn] = steps
            is_statistic = all(are_statistics) or self._is_statistic(name, values, result)
            is_rank = order is not None and name != "msort" and result is results[-1]
            self._mark(
                result, replace(origin, is_statistic=is_statistic, is_mixed=is_mixed or is_rank)
            )

    def _is_one_row(self, tensor: Tensor) -> bool:
        """Whether a tensor is a row, or a column, of numbers of several samples."""
        is_column = tensor.numel() == self._num_samples and self._num_samples in tensor.shape
        return tensor.dim() == 1 or is_column

    def _is_statistic(self, name: str, values: Sequence[Tensor], result: Tensor) -> bool:
        """Whether a result is one number of several samples, and not one that was taken of them."""
        if result.numel() != 1 or self._num_samples == 1:
            return False
        if name in INDEXING:  # taken, by a statistic or not
            return any(value.origin.is_statistic for value in values)
        return any(value.numel() > 1 for value in values)

    def _mark(self, tensor: Tensor, origin: Origin) -> None:
        """Watch a tensor: in place, as another object would be another node of the graph."""
        if type(tensor) is Tensor:
            tensor.__class__ = WatchedTensor
            self._watched.append(weakref.ref(tensor))
        if type(tensor) is WatchedTensor:
            tensor.origin = origin


class WatchedTensor(Tensor):
    """A tensor of which is known what it was computed from.

    Attributes:
        origin: What that is.
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
        if any(kind is not cls for kind in types):  # another class has functions of its own
            for tensor in tensors_in([*args, *kwargs.values()]):
                _make_plain(tensor)
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if not name.startswith("__"):
            name = name.removesuffix("_")  # of a function that works in place
        if name in SHOWN:
            _make_plain(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if name in SPLITS or (name == "__getitem__" and _takes_one_row(*args)):
            return result
        arguments = [*args, *kwargs.values()]
        results = list(tensors_in(args[:1] if name == "__setitem__" else [result]))
        values = [tensor for tensor in tensors_in(arguments) if type(tensor) is WatchedTensor]
        if results and values:
            values[0].origin.check.note(name, arguments, values, results)
        return result


def _make_plain(tensor: Tensor) -> None:
    """Watch a tensor no longer."""
    if type(tensor) is WatchedTensor:
        tensor.__class__ = Tensor
        del tensor.origin


def _takes_one_row(tensor: Tensor, index: Any) -> bool:
    """Whether an index takes the row of one sample, and not one by their order."""
    if isinstance(tensor, WatchedTensor) and tensor.origin.order is not None:
        return False
    first = index[0] if isinstance(index, tuple) and index else index
    if isinstance(first, slice):
        return len(tensor) > 1 and len(range(*first.indices(len(tensor)))) == 1
    return isinstance(first, int) and not isinstance(first, bool)


def _is_part_of_order(tensor: WatchedTensor, part: Tensor) -> bool:
    """Whether some of the sorted samples were taken."""
    return tensor.origin.order is not None and part.numel() < tensor.numel()
