"""A term of a loss, and the backward that leaves out what the terms divide by."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, where, zeros_like
from torch.autograd.graph import Node

from hf_ga.loss.nodes.counts import count_of, num_nonzero_of
from hf_ga.loss.nodes.means import CROSS_ENTROPIES, SUMS, reduced_shape
from hf_ga.loss.nodes.saved import Number, saved, signed
from hf_ga.loss.nodes.values import value_of
from hf_ga.loss.penalty import PARAMETER
from hf_ga.loss.within import selects_below

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class NodeName:
    """In place of a node whose graph is no longer needed."""

    text: str

    def name(self) -> str:
        """Return the name of the node."""
        return self.text


@dataclass(frozen=True, eq=False)
class Term:
    """One term of a loss: factor * numerator / divisor.

    Attributes:
        nodes: The nodes that compute the numerator, or the mean itself. Several only if a loop adds
            up the losses of single samples.
        factor: What the loss multiplies the term by. A tensor only if it is on an accelerator.
        divisor: What the term divides by in this micro-batch. A tensor only if it is on an
            accelerator.
        identity: What the term is: equal in all micro-batches of a process, whatever their sizes
            and the order of the terms. It contains ids of parameters, which differ between
            processes. Two terms of one loss may have the same.
        is_shape_divisor: Whether the divisor is a number of elements, not one computed from data.
        is_penalty: Whether only parameters enter the term. Its divisor is 1.
        node_divides: Whether the nodes themselves divide by the divisor, as a mean does. False if
            the loss divides the nodes' result.
        root: The node of the loss.
        inner_division: The node that divides the elements before they are summed, as in
            `(losses / n).sum()`. None: no division but `divisor` is to be left out.
        weights: Trained weights that the term is multiplied by, whose values are in `factor`: the
            node of each, and the gradient that the loss passes to it.
        divisions: The nodes between the loss and the term that may turn zeros into NaN: divisions
            by what may be 0, products with what may be NaN.
    """

    nodes: tuple[Node | NodeName, ...]
    factor: Number
    divisor: Number
    identity: tuple
    is_shape_divisor: bool
    is_penalty: bool
    node_divides: bool
    root: Node | NodeName
    inner_division: Node | None = None
    weights: tuple[tuple[Node, Number], ...] = ()
    divisions: tuple[Node, ...] = ()

    @property
    def node(self) -> Node:
        """The (first) node of the term."""
        return self.nodes[0]

    def without_graph(self) -> "Term":
        """Return what describes the term, without the graph, which keeps activations."""
        names = tuple(NodeName(node.name()) for node in self.nodes)
        return replace(
            self,
            nodes=names,
            root=NodeName(""),
            inner_division=None,
            weights=(),
            divisions=(),
        )

    def count(self) -> Number | None:
        """Return what the numerator sums over: elements, or the sum of their mask or weights.

        None: unknown. It does not depend on the divisor.
        """
        if self.is_penalty:
            return None
        if self.identity[0] == "samples":
            return float(len(self.nodes))
        return _added(count_of(node) for node in self.nodes)

    def class_weights(self) -> Tensor | None:
        """Return the class weights of a cross entropy, which must not differ between
        micro-batches. None: it has none.
        """
        is_cross_entropy = self.node.name() in CROSS_ENTROPIES
        return saved(self.node, "weight") if is_cross_entropy else None

    def ignores_width(self) -> bool:
        """Whether a cross entropy ignores the label that is its number of classes: these are the
        tokens of a row then, and what is ignored depends on how wide rows are padded.
        """
        if self.node.name() not in CROSS_ENTROPIES:
            return False
        logits = saved(self.node, "self")
        # Scores of a single sample may have no dim of samples.
        width = logits.shape[1] if logits.dim() > 1 else len(logits)
        return signed(saved(self.node, "ignore_index")) == width

    def selects(self) -> bool:
        """Whether a mean is over elements that an index or a mask selected, as far as is seen."""
        is_mean = self.node_divides and self.is_shape_divisor
        return is_mean and any(map(selects_below, self.nodes))

    def num_nonzero(self) -> Number | None:
        """Return how many elements of the numerator have a weight other than 0. None: unknown."""
        is_plain = not self.is_penalty and self.identity[0] != "samples"
        return _added(num_nonzero_of(node) for node in self.nodes) if is_plain else None

    @property
    def num_elements(self) -> int | None:
        """Number of elements of what a sum reduces, without regard to masks. None: unknown."""
        is_sum = self.node.name() in SUMS and not self.is_penalty
        return sum(reduced_shape(node).numel() for node in self.nodes) if is_sum else None

    def value(self) -> Tensor | None:
        """Return what the term adds to the loss. None: its inputs are not saved."""
        values = [value_of(node) for node in self.nodes]
        if any(value is None for value in values):
            return None
        total = sum(values[1:], values[0]) * self.factor
        return total if self.node_divides else total / self.divisor


def _added(numbers: Iterable[Number | None]) -> Number | None:
    """Return the sum of some numbers. None: one of them is unknown."""
    first, *others = numbers
    if first is None or any(number is None for number in others):
        return None
    return sum(others, first)  # no operation on a device for a single one


def describe(term: Term) -> str:
    """Return a term in words, for error messages."""
    kind = term.node.name()
    if term.is_penalty:
        what = f"the penalty on parameters ({kind})"
    elif term.identity[0] == "samples":
        what = f"the mean of {len(term.nodes)} losses of single samples ({kind})"
    elif "NllLoss" in kind:
        what = f"the mean of {kind} (cross entropy)"
    elif term.node_divides:
        what = f"the mean of {kind}"
    else:
        what = f"the divided sum of {kind}"
    return f"{what}, factor {_shown(term.factor)}, divisor {_shown(term.divisor)}"


def _shown(value: Number) -> str:
    """Return a number as text; one on an accelerator is not read."""
    return f"{value:.6g}" if isinstance(value, float) else f"a number on {value.device}"


@contextmanager
def undivided(terms: Sequence[Term], scales: Sequence[Number]) -> Iterator[None]:
    """Make the backward of a loss leave out the divisions by its terms' divisors.

    Within the block, `loss.backward()`, the backward of a multiple of `loss`, and
    `torch.autograd.grad` compute

        sum_k scales[k] * factor_k * gradient of numerator_k

    The loss passes zeros down to its terms, whose nodes get the gradient from here, beside what
    they get where the loss uses them otherwise (a temperature that is penalized, too). A divisor of
    0 causes no NaN. With scale 0, the backward below runs all the same: with sharded parameters it
    is a collective.

    Args:
        terms: All terms of the loss, from `read_terms`.
        scales: One number for each term.
    """
    entering: dict[Node, Number] = defaultdict(float)
    for term, scale in zip(terms, scales, strict=True):
        for node in term.nodes:
            entering[node] = entering[node] + _gradient_that_enters(term, scale)
        for node, gradient in term.weights:
            entering[node] = entering[node] + _undivided_gradient(term, scale, gradient)
    of_loss: list[Tensor] = []
    with ExitStack() as hooks:
        if terms:
            handle = terms[0].root.register_prehook(_take(of_loss))
            hooks.callback(handle.remove)
        for node, value in entering.items():
            handle = node.register_prehook(_add(node, value, of_loss))
            hooks.callback(handle.remove)
        empty = [node for node, v in entering.items() if _is_zero(v) and node.name() != PARAMETER]
        for node in dict.fromkeys([*empty, *(n for term in terms for n in term.divisions)]):
            handle = node.register_hook(_zeros)
            hooks.callback(handle.remove)
        for term in terms:
            if term.inner_division is not None:
                handle = term.inner_division.register_hook(_pass_through)
                hooks.callback(handle.remove)
        yield


def _gradient_that_enters(term: Term, scale: Number) -> Number:
    """Return the gradient that enters a term's nodes if that of the loss is 1."""
    if term.node_divides:
        return _undivided_gradient(term, scale, term.factor)
    return 0.0 if _is_zero(scale) else scale * term.factor


def _undivided_gradient(term: Term, scale: Number, gradient: Number) -> Number:
    """Return a gradient without the division by the term's divisor."""
    if _is_zero(scale) or _is_zero(term.divisor):
        return 0.0
    return scale * gradient * term.divisor


def _is_zero(value: Number) -> bool:
    """Whether a number is 0; one on an accelerator is not read."""
    return isinstance(value, (int, float)) and value == 0


def _take(of_loss: list[Tensor]) -> Callable[[Gradients], Gradients]:
    """Return a hook that keeps the gradient that enters the loss, and lets zeros enter instead."""

    def hook(gradients: Gradients) -> Gradients:
        of_loss[:] = gradients
        return tuple(zeros_like(gradient) for gradient in gradients)

    return hook


def _add(node: Node, value: Number, of_loss: list[Tensor]) -> Callable[[Gradients], Gradients]:
    """Return a hook that adds a multiple of the loss's gradient to the one that enters a node."""
    metadata = node._input_metadata[0]

    def hook(gradients: Gradients) -> Gradients:
        gradient = (of_loss[0] * value).to(device=metadata.device, dtype=metadata.dtype)
        gradient = gradient.reshape(metadata.shape)
        return (gradient if gradients[0] is None else gradients[0] + gradient,)

    return hook


def _zeros(gradients: Gradients, entered: Gradients) -> Gradients:
    """Let zeros leave a node that zeros enter: it may compute 0 / 0."""
    has_entered = entered[0].any()
    return tuple(
        None if gradient is None else where(has_entered, gradient, 0.0) for gradient in gradients
    )


def _pass_through(gradients: Gradients, entered: Gradients) -> Gradients:
    """Let the gradient leave a division as it entered."""
    return (entered[0], *gradients[1:])
