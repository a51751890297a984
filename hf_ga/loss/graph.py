"""Reads which means a scalar loss is a sum of from its autograd graph.

A loss that users write is a sum of terms, each of them a mean or a divided sum:

    loss = sum_k factor_k * numerator_k / divisor_k

The graph keeps all of it. `_Reader` walks from the loss down, through sums, differences and
products with constants, to the nodes that reduce many elements to one number.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.errors import LossNotAdditive
from hf_ga.loss.identity import VIEWS, identity_of
from hf_ga.loss.nodes.means import Reduction, reduced_shape, reduction_of
from hf_ga.loss.nodes.saved import (
    PASSED_THROUGH,
    Number,
    inputs,
    number,
    output_shape,
    quotient,
    saved,
    signed,
)
from hf_ga.loss.part import Part
from hf_ga.loss.penalty import Penalties
from hf_ga.loss.refusals import (
    product_of_two,
    quotient_of_two,
    refusal,
    undivided_sum,
    weight_of_several,
)
from hf_ga.loss.samples import Found, joined_samples
from hf_ga.loss.stacks import (
    STACKS,
    Stack,
    StackSizes,
    find_stack,
    is_per_sample,
    sizes_follow_samples,
)
from hf_ga.loss.terms import Term
from hf_ga.loss.within import check_elements

MAX_PARTS = 30_000


def read_terms(
    loss: Tensor,
    *,
    num_samples: int,
    stack_sizes: StackSizes | None = None,
    with_switched_off: bool = False,
) -> list[Term]:
    """Return the terms that a scalar loss is the sum of.

    Call it before the backward, which frees what the graph keeps.

    Args:
        loss: The loss of one micro-batch.
        num_samples: Number of samples of the micro-batch.
        stack_sizes: Kept by the caller over the run, for losses that stack scalars.
        with_switched_off: Whether to return means with a factor of 0, too, after the others.

    Returns:
        The terms. Empty if the loss needs no gradient.

    Raises:
        LossNotAdditive: If the loss is not a sum of means and divided sums.

    Example:
        loss = F.cross_entropy(logits, labels) + 0.1 * F.mse_loss(values, targets)
        terms = read_terms(loss, num_samples=8)
        # factors 1.0 and 0.1, divisors 8.0 (labels) and 24.0 (values)
    """
    if loss.grad_fn is None:
        return []
    reader = _Reader(
        loss.grad_fn, num_samples, StackSizes() if stack_sizes is None else stack_sizes
    )
    switched_off = reader.read_all([Part(loss.grad_fn, loss.output_nr)])
    terms = joined_samples(reader.found, num_samples, reader.stack_sizes)
    if with_switched_off:
        terms += _readable(switched_off, loss.grad_fn, num_samples)
    return terms


def _readable(parts: Sequence[Part], root: Node, num_samples: int) -> list[Term]:
    """Return the terms of the parts with a factor of 0 that are means, and not such as
    `outputs.sum() * 0`, which stands for no term at all.
    """
    terms = []
    for part in parts:
        reader = _Reader(root, num_samples, StackSizes())
        with suppress(LossNotAdditive):
            reader.read_all([part], at_factor_0=True)
            terms += [term for term, _ in reader.found if not term.is_penalty]
    return terms


class _Reader:
    """Reads the parts of one loss. The terms that it found, each with the part that may be added
    up (see `Found`), are in `found`.
    """

    def __init__(self, root: Node, num_samples: int, stack_sizes: StackSizes) -> None:
        """Start without a term."""
        self.root = root
        self.num_samples = num_samples
        self.stack_sizes = stack_sizes
        self.penalties = Penalties()
        self.found: list[Found] = []

    def read_all(self, parts: list[Part], *, at_factor_0: bool = False) -> list[Part]:
        """Read parts down to their terms. Returns those with a factor of 0, which are read only
        `at_factor_0`.
        """
        waiting = list(parts)
        num_parts = 0
        switched_off = []
        while waiting:
            part = waiting.pop()
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise refusal(part.node, "a loss that adds itself up too often")
            if part.is_switched_off and not at_factor_0:
                switched_off.append(part)
                continue
            waiting.extend(reversed(self.read(part)))
        return switched_off

    def read(self, part: Part) -> list[Part]:
        """Return the parts that a part is the sum of; store it if it is a term."""
        kind = part.node.name()
        is_product_of_two = kind in ("MulBackward0", "DivBackward0") and len(inputs(part.node)) == 2
        if is_product_of_two and not self.penalties.has(part.node):
            return self._read_product(part)
        if kind in LINEAR and not is_product_of_two:
            parts = LINEAR[kind](part)
            if part.weights and len(parts) > 1:
                raise weight_of_several(part.node)
            return parts
        if kind in VIEWS:
            return part.input(0)
        if kind in PASSED_THROUGH:
            return part.input(part.output)
        if self.penalties.has(part.node):
            self._add(part, divisor=1.0, is_penalty=True)
            return []
        if kind in SELECTIONS:
            return _selected(part)
        reduction = reduction_of(part.node)
        if reduction is None:
            raise refusal(part.node)
        if kind in ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1"):
            return self._read_elements(part, reduction)
        self._add_reduction(part, reduction)
        return []

    def _read_product(self, part: Part) -> list[Part]:
        """Read the product of a loss and a trained weight (or the quotient), such as
        exp(-s) * loss, with which losses are weighted by their uncertainty.
        """
        node = part.node
        is_quotient = node.name() == "DivBackward0"
        (first, _), (second, _) = inputs(node)
        is_first_weight = not is_quotient and self.penalties.has(first)
        if not is_first_weight and not self.penalties.has(second):
            raise quotient_of_two(node) if is_quotient else product_of_two(node)
        values = (number(saved(node, "self")), number(saved(node, "other")))
        weight = values[0] if is_first_weight else values[1]
        loss = values[1] if is_first_weight else values[0]
        factor = weight
        slope = loss  # of the product, by the weight
        if is_quotient:
            factor = quotient(1.0, weight)
            slope = quotient(-loss, weight * weight)
        of_weight = (first if is_first_weight else second, part.full_factor() * slope)
        weighted = replace(
            part, weights=(*part.weights, of_weight), divisions=(*part.divisions, node)
        )
        return weighted.input(1 if is_first_weight else 0, factor)

    def _read_elements(self, part: Part, reduction: Reduction) -> list[Part]:
        """Read the sum or the mean of a tensor."""
        is_mean = reduction.divisor is not None
        if _is_of_scalar(part.node, is_mean):
            return part.input(0)
        stack = find_stack(part.node)
        if stack is not None and not is_per_sample(stack, self.num_samples, self.stack_sizes):
            return _heads(part, stack, is_mean)
        samples = self._samples_averaged_below(part.node)
        if samples is not None:
            self._add(part, samples, is_shape=True, node_divides=True)
            return []
        if reduction.divisor is None and part.divisor is None:
            division = _division_below(part.node)
            if division is None:
                raise undivided_sum(part.node)
            check_elements(part.node, self.penalties, self.num_samples)
            self._add(part, number(saved(division, "other")), inner_division=division)
            return []
        self._add_reduction(part, reduction)
        return []

    def _add_reduction(self, part: Part, reduction: Reduction) -> None:
        """Store a mean, or a sum that the loss divides."""
        check_elements(part.node, self.penalties, self.num_samples)
        if reduction.divisor is not None:
            self._add(part, reduction.divisor, is_shape=reduction.is_shape, node_divides=True)
            return
        if part.divisor is None:
            raise undivided_sum(part.node)
        added = part if part.is_closed else part.mean
        self._add(replace(part, divisor=None), part.divisor, added=added)

    def _add(
        self,
        part: Part,
        divisor: Number,
        *,
        is_shape: bool = False,
        is_penalty: bool = False,
        node_divides: bool = False,
        inner_division: Node | None = None,
        added: Part | None = None,
    ) -> None:
        """Store a term. All divisions that the part still has are in its factor.

        Args:
            added: The part that may be added up, see `Found`. None: the part itself.
        """
        term = Term(
            nodes=(part.node,),
            factor=part.full_factor(),
            divisor=divisor,
            identity=identity_of(part.node, part.entries),
            is_shape_divisor=is_shape,
            is_penalty=is_penalty,
            node_divides=node_divides,
            root=self.root,
            inner_division=inner_division,
            weights=part.weights,
            divisions=part.divisions,
        )
        self.found.append((term, added or part))

    def _samples_averaged_below(self, node: Node) -> float | None:
        """Return the number of samples if the elements of a sum or mean are means over samples: in
        `squares.mean(0).sum()` it is the divisor, and the sum belongs to the numerator.
        """
        child = _below_multiples(node)
        if child.name() != "MeanBackward1":
            return None
        dims = [signed(dim) for dim in saved(child, "dim")]
        shape = reduced_shape(child)
        if dims not in ([0], [-len(shape)]):
            return None
        key = ("mean over the first dimension", identity_of(node))
        if not sizes_follow_samples(key, self.num_samples, shape[0], self.stack_sizes):
            return None
        self.stack_sizes.of_samples.add(key)
        return float(shape[0])


def _is_of_scalar(node: Node, is_mean: bool) -> bool:
    """Whether a sum or a mean is that of one number, such as `loss.mean()` of a scalar loss; a mean
    also of the number repeated, `loss.expand(n).mean()`.
    """
    child, index = inputs(node)[0]
    while True:
        shape = output_shape(child, index)
        if shape.numel() != 1 and not is_mean:
            return False
        if shape == ():
            return True
        if child.name() not in VIEWS:
            return False
        child, index = inputs(child)[0]


def _heads(part: Part, stack: Stack, is_mean: bool) -> list[Part]:
    """Return the entries of a stack of heads, each to be read as a loss."""
    share = 1.0 / stack.size if is_mean else 1.0
    parts = []
    for index, (child, output) in enumerate(stack.node.next_functions):
        if child is None:
            continue
        factor = part.factor * share * number(stack.weight(index))
        entries = (*part.entries, index)
        entry = replace(part, node=child, output=output, factor=factor, entries=entries)
        parts.append(entry.closed())
    return parts


def _selected(part: Part) -> list[Part]:
    """Return the entry that `stack[i]` selects from a stack, or the only element of a tensor."""
    child, output = inputs(part.node)[0]
    if output_shape(child, output).numel() == 1:
        return part.input(0)
    is_unbound = part.node.name() == "UnbindBackward0"
    if child.name() not in STACKS or output_shape(child).numel() != len(child.next_functions):
        raise refusal(part.node, "one element of a tensor of several")
    index = part.output if is_unbound else signed(saved(part.node, "index"))
    return replace(part, node=child, entries=(*part.entries, index)).input(index)


def _below_multiples(node: Node) -> Node:
    """Return what is below the views, signs and constant factors under a sum or a mean."""
    child, _ = inputs(node)[0]
    while child.name() in VIEWS or _is_multiple(child):
        child, _ = inputs(child)[0]
    return child


def _is_multiple(node: Node) -> bool:
    """Whether a node multiplies its input by one constant number."""
    kind = node.name()
    if kind in ("MulBackward1", "DivBackward1", "NegBackward0"):
        return True
    if kind not in ("MulBackward0", "DivBackward0") or len(inputs(node)) != 1:
        return False
    is_first = node.next_functions[0][0] is not None
    if kind == "DivBackward0" and not is_first:
        return False
    return saved(node, "other" if is_first else "self").numel() == 1


def _division_below(node: Node) -> Node | None:
    """Return the node that divides all elements of a sum: `(losses / n).sum()`."""
    child, _ = inputs(node)[0]
    while child.name() in VIEWS or _is_multiple(child):
        if child.name() in ("DivBackward0", "DivBackward1"):
            return child
        child, _ = inputs(child)[0]
    return None


def _sum(part: Part) -> list[Part]:
    """first + alpha * second."""
    part = part.closed()
    return part.input(0) + part.input(1, number(saved(part.node, "alpha")))


def _difference(part: Part) -> list[Part]:
    """first - alpha * second."""
    part = part.closed()
    return part.input(0) + part.input(1, -number(saved(part.node, "alpha")))


def _reversed_difference(part: Part) -> list[Part]:
    """second - alpha * first."""
    part = part.closed()
    return part.input(0, -number(saved(part.node, "alpha"))) + part.input(1)


def _first(part: Part) -> list[Part]:
    """first + constant."""
    return part.input(0)


def _negative(part: Part) -> list[Part]:
    """-first."""
    return part.input(0, -1.0)


def _constant_minus(part: Part) -> list[Part]:
    """constant - alpha * first."""
    return part.input(0, -number(saved(part.node, "alpha")))


def _product(part: Part) -> list[Part]:
    """first * second, one of them a constant."""
    if part.node.next_functions[0][0] is not None:
        return part.input(0, number(saved(part.node, "other")))
    return part.input(1, number(saved(part.node, "self")))


def _multiple(part: Part) -> list[Part]:
    """first * number."""
    return part.input(0, number(saved(part.node, "other")))


def _quotient(part: Part) -> list[Part]:
    """first / constant."""
    if len(part.node.next_functions) == 2 and part.node.next_functions[1][0] is not None:
        raise quotient_of_two(part.node)
    return part.divided_by(number(saved(part.node, "other"))).input(0)


def _choice(part: Part) -> list[Part]:
    """torch.where(condition, first, second), whose condition is one element."""
    chosen = number(saved(part.node, "condition"))
    return part.input(0, chosen) + part.input(1, 1.0 - chosen)


LINEAR: dict[str, Callable[[Part], list[Part]]] = {
    "AddBackward0": _sum,
    "AddBackward1": _first,
    "DivBackward0": _quotient,
    "DivBackward1": _quotient,
    "MulBackward0": _product,
    "MulBackward1": _multiple,
    "NegBackward0": _negative,
    "RsubBackward0": _reversed_difference,
    "RsubBackward1": _constant_minus,
    "SubBackward0": _difference,
    "SubBackward1": _first,
    "WhereBackward0": _choice,
}
SELECTIONS = {"SelectBackward0", "UnbindBackward0"}
