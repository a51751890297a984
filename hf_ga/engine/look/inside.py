"""Backward code inside of a model that torch does not provide: autograd functions, hooks on modules
and on tensors.

The backward of torch's own functions is linear in the gradient, and what it does with a sample is
known from the forward. That of others may clip, normalise, or use the other samples of its
micro-batch, which the gradient at the model's outputs does not show. So where a model has any, the
gradient is compared at what is below it, too: nearer to the model's inputs.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from hf_ga.logs import get_logger
from hf_ga.loss.nodes.saved import inputs
from hf_ga.loss.penalty import PARAMETER
from hf_ga.model.override import override

logger = get_logger(__name__)

MAX_NODES = 50_000  # of a model's graph
NUM_EDGES = 4  # the farthest from the loss, which what is nearer to it reaches, too
REENTRANT = "CheckpointFunctionBackward"  # of checkpoint(..., use_reentrant=True)
MODULE_HOOKS = "torch.nn.modules._functions"  # where torch calls `register_full_backward_hook`'s


@dataclass(frozen=True)
class Inside:
    """What is below backward code that torch does not provide.

    Attributes:
        edges: Edges of the graph.
        names: Names of the functions and hooks.
        is_blocked: Whether the graph has a function of torch that cannot run its backward twice
            (compiled layers, reentrant checkpoints, collectives), so nothing can be compared.
    """

    edges: Sequence[GradientEdge]
    names: Sequence[str]
    is_blocked: bool


class BackwardCode:
    """Finds backward code that torch does not provide in the graphs of micro-batches."""

    def __init__(self) -> None:
        """Start without any hook."""
        self._hooked: dict[Node, str] = {}
        self._has_warned = False

    def clear(self) -> None:
        """Forget the hooks of a micro-batch."""
        self._hooked = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the hooks that are registered on tensors within the block: graphs do not show
        them.
        """
        register_hook = Tensor.register_hook

        def noted(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            function = hook.func if isinstance(hook, partial) else hook
            is_torchs = (getattr(function, "__module__", None) or "").startswith("torch.")
            if tensor.grad_fn is not None and not is_torchs:
                self._hooked[tensor.grad_fn] = f"the hook {_name_of(function)} on a tensor"
            return register_hook(tensor, hook)

        try:
            with override(Tensor, register_hook=noted):
                yield
        finally:
            self.clear()

    def below(self, nodes: Sequence[Node]) -> Inside:
        """Find what is below such code in the graph of a term.

        Args:
            nodes: The nodes of the term.
        """
        names: dict[str, None] = {}
        edges: list[GradientEdge] = []
        is_blocked = False
        for node in nodes_below(nodes, MAX_NODES):
            name = self._hooked.get(node)
            function = getattr(node, "_forward_cls", None)
            if function is not None and name is None:
                module = function.__module__
                if module == MODULE_HOOKS:
                    name = "a backward hook of a module"
                elif module.startswith("torch."):
                    is_blocked = True
                elif not module.startswith("hf_ga."):
                    name = f"the autograd function {function.__qualname__}"
            if name is not None:
                names[name] = None
                edges += [
                    GradientEdge(*child) for child in inputs(node) if child[0].name() != PARAMETER
                ]
        return Inside(edges[-NUM_EDGES:], list(names), is_blocked)

    def warn_of(self, inside: Inside) -> None:
        """Warn once that nothing is compared below such code."""
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            f"hf_ga: the model has {', '.join(inside.names)}. Under FSDP, and with compiled layers "
            "or reentrant checkpoints, it is not tried whether its backward depends on the other "
            "samples of the micro-batch, or is not linear in the gradient (it clips or normalises)."
        )


def nodes_below(nodes: Sequence[Node], max_nodes: int) -> Iterator[Node]:
    """Yield up to so many nodes of a graph, the nearest to the loss first, no parameters, and
    nothing below a reentrant checkpoint, which torch differentiates in a whole backward only.
    """
    waiting = deque(nodes)
    seen = set(nodes)
    number = 0
    while waiting and number < max_nodes:
        node = waiting.popleft()
        number += 1
        yield node
        if node.name() == REENTRANT:
            continue
        for child, _ in inputs(node):
            if child not in seen and child.name() != PARAMETER:
                seen.add(child)
                waiting.append(child)


def _name_of(function: Any) -> str:
    """Return the name of a function, and the line of its definition."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"
