"""Records what the models return in a micro-batch, and finds where a loss has rows of samples."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge, Node

from hf_ga.engine.checks.statistic_check import StatisticCheck, Step
from hf_ga.engine.look.inside import BackwardCode, nodes_below
from hf_ga.loss.nodes.saved import inputs, output_shape
from hf_ga.loss.penalty import PARAMETER, Penalties
from hf_ga.model.forward import compiled_modules, unwrapped
from hf_ga.model.hooks import Hook
from hf_ga.model.outputs import named_tensors
from hf_ga.model.override import override

MAX_NODES = 200  # of the graph that are searched for edges with rows of samples
MAX_EDGES = 16
Place = Hashable  # which output, or (`INSIDE`, which edge)
INSIDE = "inside"


class Arrangement(NamedTuple):
    """Where a tensor may hold the samples.

    Attributes:
        dim: The dim of the samples. None: there is a tensor for each sample.
        rows: "one": a row for each sample. "next": several, next to each other. "blocks": one in
            each block of rows, as in torch.cat([chosen, rejected]).
    """

    dim: int | None
    rows: Literal["one", "next", "blocks"]


OF_CALLS = Arrangement(None, "one")


@dataclass(frozen=True)
class Watched:
    """What the loss is computed from, where the gradients of samples are compared.

    Attributes:
        targets: Tensors or edges of the graph.
        values: The values of the tensors. None: unknown.
        arrangements: All that its shape allows: 4 channels may look like 4 samples. The true one
            is possible for other numbers of samples, too.
        kind: What it is, equal in the rehearsal and in the window.
    """

    targets: Sequence[Tensor | GradientEdge]
    values: Sequence[Tensor] | None
    arrangements: Sequence[Arrangement]
    kind: Place


class OutputRecorder:
    """Records what models return in a micro-batch, while it is switched on.

    Attributes:
        outputs: Tensors of the models' outputs that need a gradient, in the order of the calls.
        nested: Those within tuples or lists of the outputs, such as hidden states.
        inner: Outputs of submodules, for a model that returns nothing but its loss.
        statistics: Watches what the loop computes from `outputs`.
        backward_code: Finds backward code inside of the models that torch does not provide.
    """

    def __init__(self) -> None:
        """Start switched off."""
        self.backward_code = BackwardCode()
        self.statistics = StatisticCheck()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.outputs: list[Tensor] = []
        self.nested: list[Tensor] = []
        self.inner: list[Tensor] = []
        self.backward_code.clear()

    @contextmanager
    def recording(self, models: Sequence[nn.Module], *, with_layers: bool) -> Iterator[None]:
        """Record the outputs of these prepared models, and of their layers, in the block."""
        with ExitStack() as stack:
            stack.callback(self.clear)
            for model in map(unwrapped, models):  # in the wrapper of torch.compile, if it has one
                if with_layers:
                    stack.enter_context(self._recording_inside(model))
                stack.enter_context(_hooked(model, self._record, self._stop_watching))
            stack.enter_context(self.backward_code.recording())
            yield

    @contextmanager
    def _recording_inside(self, model: nn.Module) -> Iterator[None]:
        """Record the outputs of the layers of a model in the block. A compiled module is one."""
        compiled = compiled_modules(model)
        inside = {module for outer in compiled for module in outer.modules()}
        layers = [
            module
            for module in model.modules()
            if module in compiled or (module not in inside and not list(module.children()))
        ]
        if model in layers:
            layers.remove(model)
        # The loss that a model computes itself comes after its last layer with weights.
        with_weights = [layer for layer in layers if any(True for _ in layer.parameters())]
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(_hooked(layer, self._record_inner))
            for layer in with_weights[-1:]:
                stack.enter_context(_hooked(layer, self._watch_inner))
            yield

    def _stop_watching(self, module: nn.Module, args: tuple) -> None:
        """Let a model take plain tensors; a forward pre-hook."""
        self.statistics.stop()

    def _record(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Record the outputs of a model; a forward hook."""
        for value in _values(outputs):
            if _needs_gradient(value):
                self.outputs.append(value)
            elif not isinstance(value, Tensor):
                inner = named_tensors(value).values()
                self.nested += [tensor for tensor in inner if _needs_gradient(tensor)]
        self.statistics.watch(self.outputs + self.nested)

    def _record_inner(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Record the outputs of a submodule; a forward hook."""
        self.inner += [value for value in _values(outputs) if _needs_gradient(value)]

    def _watch_inner(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Watch what a model computes after its last layer; a forward hook."""
        self.statistics.watch(self.inner)

    def steps_below(self, nodes: Sequence[Node]) -> set[Step]:
        """Return the steps, such as comparisons with statistics, that a term depends on.

        Args:
            nodes: The nodes of the term.
        """
        return self.statistics.steps_at(nodes_below(nodes, MAX_NODES))

    def candidates(self, num_samples: int, nodes: Sequence[Node]) -> Iterator[list[Watched]]:
        """Yield lists of what a term may be computed from, the nearest to the loss first.

        Args:
            num_samples: Number of samples of the micro-batch.
            nodes: The nodes of the term, for loops that use parameters without their model.
        """
        outputs = _usable(self.outputs)
        yield [*_calls(outputs, num_samples), *_with_rows(outputs, num_samples)]
        yield _with_rows(_usable(self.nested), num_samples)
        for watched in reversed(_with_rows(_usable(self.inner), num_samples)):
            yield [watched]
        yield _edges_with_rows(nodes, num_samples)


@contextmanager
def _hooked(
    module: nn.Module,
    after: Callable[[nn.Module, tuple, Any], None],
    before: Callable[[nn.Module, tuple], None] | None = None,
) -> Iterator[None]:
    """Call functions after, and before, the forwards of a module in the block. Hooks of a module
    that is compiled in place would be traced.
    """
    compiled = module._compiled_call_impl
    if compiled is not None:

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call the compiled module."""
            if before is not None:
                before(module, args)
            outputs = compiled(*args, **kwargs)
            after(module, args, outputs)
            return outputs

        with override(module, _compiled_call_impl=call):
            yield
        return
    handles = [module.register_forward_hook(Hook(after))]
    if before is not None:
        handles.append(module.register_forward_pre_hook(Hook(before)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values(outputs: Any) -> list[Any]:
    """Return the values of a model's outputs: of a mapping, a tuple, or a single one."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    if isinstance(outputs, tuple | list):
        return list(outputs)
    return [outputs]


def widths_of(batch: Any) -> list[torch.Size]:
    """Return the sizes of all tensors of a batch, but for the number of samples."""
    return [tensor.shape[1:] for tensor in named_tensors(batch).values()]


def _needs_gradient(value: Any) -> bool:
    """Whether a value is a tensor of numbers through which samples may have a gradient, and not a
    parameter or a function of parameters alone.
    """
    if not isinstance(value, Tensor) or not value.requires_grad or value.dim() == 0:
        return False
    if value.grad_fn is None:
        return not isinstance(value, nn.Parameter)
    return not Penalties().has(value.grad_fn)


def _usable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors without those of a transform of torch.func, which outlive it in name only. Not
    in a hook, which torch.compile could not trace.
    """
    return [tensor for tensor in tensors if not is_functorch_wrapped_tensor(tensor)]


def _with_rows(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the tensors with one row, or with equally many rows, for each sample."""
    found = []
    for index, tensor in enumerate(tensors):
        arrangements = _arrangements(tensor.shape, num_samples)
        if arrangements:
            found.append(Watched([tensor], [tensor.detach()], arrangements, ("rows", index)))
    return found


def _arrangements(shape: torch.Size, num_samples: int) -> list[Arrangement]:
    """Return the possible arrangements of samples: in any dim of their number, as the second one
    where time is first, or in the first dim with several rows for each.
    """
    found = [Arrangement(dim, "one") for dim, size in enumerate(shape) if size == num_samples]
    if shape[0] > num_samples and shape[0] % num_samples == 0:
        found += [Arrangement(0, "next"), Arrangement(0, "blocks")]
    return found


def _calls(tensors: Sequence[Tensor], num_samples: int) -> list[Watched]:
    """Return the outputs of calls with one sample each, as a loop over samples makes them."""
    is_of_samples = len(tensors) >= num_samples and len(tensors) % num_samples == 0
    has_rows = num_samples > 1 and any(
        _arrangements(tensor.shape, num_samples) for tensor in tensors
    )
    if not tensors or not is_of_samples or has_rows:
        return []
    values = [tensor.detach() for tensor in tensors]
    return [Watched(list(tensors), values, [OF_CALLS], ("calls",))]


def edges_inside(edges: Sequence[GradientEdge], num_samples: int) -> list[Watched]:
    """Return the edges inside of a model at which there are rows of samples."""
    found = []
    for number, edge in enumerate(edges):
        shape = output_shape(edge.node, edge.output_nr)
        arrangements = _arrangements(shape, num_samples) if len(shape) else []
        if arrangements:
            found.append(Watched([edge], None, arrangements, (INSIDE, number, edge.node.name())))
    return found


def _edges_with_rows(nodes: Sequence[Node], num_samples: int) -> list[Watched]:
    """Return edges of the graph below a term whose first dim is that of the samples."""
    found = []
    for number, node in enumerate(nodes_below(nodes, MAX_NODES), start=1):
        children = [child for child, _ in inputs(node)]
        is_parameter = bool(children) and all(child.name() == PARAMETER for child in children)
        shape = output_shape(node)
        if len(shape) and shape[0] == num_samples and not is_parameter:
            kind = ("edge", number, node.name())
            found.append(Watched([GradientEdge(node, 0)], None, [Arrangement(0, "one")], kind))
        if len(found) == MAX_EDGES:
            break
    return found
