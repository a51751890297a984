"""Stacked scalars: the losses of single samples, or those of several heads.

`torch.stack(losses).mean()` is one mean over samples if each entry is the loss of a sample. If each
is the loss of a head, every entry is a mean with a divisor of its own. The graph of one micro-batch
may fit both, so the sizes of all stacks of a run are kept.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from hf_ga.errors import LossNotAdditive
from hf_ga.loss.identity import VIEWS, nearest_parameters
from hf_ga.loss.nodes.means import reduction_of
from hf_ga.loss.nodes.saved import Number, inputs, output_shape, saved
from hf_ga.loss.refusals import samples_or_heads

STACKS = {"CatBackward0", "StackBackward0"}
FACTORS = {"DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1", "NegBackward0", *VIEWS}


@dataclass
class StackSizes:
    """The sizes of all stacks of a run.

    Attributes:
        pairs: For each stack, the pairs (number of samples, size of the stack) seen so far.
        of_samples: The stacks that were read as the losses of single samples.
        settled: The stacks whose reading has entered an update.
        may_change: Whether a stack that fits both answers may be read as either for now, because
            micro-batches of other sizes follow before the update, or the micro-batch is the window.
        may_repeat: Whether the window can be computed again if a stack was read wrongly.
        num_changed: How often a stack turned out to be the other kind.
    """

    pairs: dict[Hashable, set[tuple[int, int]]] = field(default_factory=dict)
    of_samples: set[Hashable] = field(default_factory=set)
    settled: set[Hashable] = field(default_factory=set)
    may_change: bool = False
    may_repeat: bool = True
    num_changed: int = 0

    @property
    def num_pairs(self) -> int:
        """How many pairs were seen."""
        return sum(map(len, self.pairs.values()))

    def merge(self, others: Mapping[Hashable, set[tuple[int, int]]]) -> bool:
        """Add the pairs that other ranks have seen.

        Returns:
            Whether a stack that was read here turned out to be the other kind.
        """
        is_other_kind = False
        for key, pairs in others.items():
            before = self.pairs.get(key, set())
            after = before | pairs
            self.pairs[key] = after
            is_read = bool(before) and (key in self.of_samples or not _follow(before))
            is_other_kind |= is_read and _follow(before) != _follow(after)
        return is_other_kind

    def settle(self) -> None:
        """Note that the readings so far enter an update."""
        self.settled.update(self.pairs)


@dataclass(frozen=True)
class Stack:
    """Scalars that a loss stacks.

    Attributes:
        node: The node of `torch.stack` or `torch.cat`.
        weights: What the loss multiplies the entries by. None: 1.
    """

    node: Node
    weights: Tensor | None

    @property
    def size(self) -> int:
        """The number of entries, those without a gradient included."""
        return len(self.node.next_functions)

    def weight(self, index: int) -> Tensor | float:
        """Return what the loss multiplies an entry by."""
        if self.weights is None:
            return 1.0
        return self.weights.expand(self.size)[index]


def find_stack(node: Node) -> Stack | None:
    """Return the stack of scalars that a sum or a mean reduces. None: it reduces something else."""
    factors = []
    child, _ = inputs(node)[0]
    while child.name() not in STACKS:
        kind = child.name()
        if kind == "MulBackward0" and len(inputs(child)) == 1:
            is_first = child.next_functions[0][0] is not None
            factors.append(saved(child, "other" if is_first else "self"))
        elif kind not in VIEWS:
            return None
        child, _ = inputs(child)[0]
    are_scalars = all(output_shape(entry, i).numel() == 1 for entry, i in inputs(child))
    if not are_scalars or output_shape(child).numel() != len(child.next_functions):
        return None
    weights = None
    for factor in factors:
        flat = factor.detach().reshape(-1)
        weights = flat if weights is None else weights * flat
    return Stack(child, weights)


def is_per_sample(stack: Stack, num_samples: int, stack_sizes: StackSizes) -> bool:
    """Whether the entries of a stack are the losses of single samples.

    Args:
        stack: The stack.
        num_samples: Number of samples of the micro-batch.
        stack_sizes: The sizes of the run's stacks. Adds that of this one.

    Raises:
        LossNotAdditive: If the sizes fitted the other answer before.
    """
    nodes = [entry for entry, _ in inputs(stack.node)]
    entries = [nearest_parameters(node) for node in nodes]
    # A product may be the 0 in place of the loss of a sample without targets.
    kinds = {node.name() for node in nodes} - {"MulBackward0"}
    if len(set(entries)) > 1 or len(kinds) > 1:
        return False  # losses of several heads, or of several kinds
    key = (stack.node.name(), entries[0])
    if not sizes_follow_samples(key, num_samples, stack.size, stack_sizes):
        return False
    is_certain = len(stack_sizes.pairs[key]) > 1 or num_samples == 1
    if not is_certain and not stack_sizes.may_change:
        reductions = [reduction_of(_below_factors(node)) for node in nodes]
        divisors = [None if reduction is None else reduction.divisor for reduction in reductions]
        if None not in divisors and not are_apart(divisors):
            raise samples_or_heads(nodes[0], stack.size, num_samples)
    stack_sizes.of_samples.add(key)
    return True


def _below_factors(node: Node) -> Node:
    """Return what is below the views and constant factors of a scalar."""
    while node.name() in FACTORS and len(inputs(node)) == 1:
        node, _ = inputs(node)[0]
    return node


def are_apart(divisors: Iterable[Number]) -> bool:
    """Whether means cannot be over the same samples: they have other numbers of targets, or one
    each. Waits for the device, in micro-batches of the first size of a run.
    """
    found = {float(divisor) for divisor in divisors}
    return len(found) > 1 or found == {1.0}


def sizes_follow_samples(
    key: Hashable, num_samples: int, size: int, stack_sizes: StackSizes
) -> bool:
    """Whether something has as many elements as the micro-batch has samples, in all of them.

    Args:
        key: What it is, the same in all micro-batches.
        num_samples: Number of samples of the micro-batch.
        size: Its number of elements in this micro-batch.
        stack_sizes: See `is_per_sample`.

    Raises:
        LossNotAdditive: If it seemed to have before, in micro-batches that are done.
    """
    before = stack_sizes.pairs.get(key, set())
    after = before | {(num_samples, size)}
    followed = _follow(before)
    follow = _follow(after)
    stack_sizes.pairs[key] = after
    if not before or not followed or follow or key not in stack_sizes.of_samples:
        return follow
    if key in stack_sizes.settled or not stack_sizes.may_change:
        raise LossNotAdditive(
            f"the loss averages {size} values in a micro-batch of {num_samples} samples, but one "
            "for each sample in micro-batches before, so it was read as a mean over samples. "
            "Add the means up instead of stacking them, or pass a sum and its number of targets: "
            "accelerator.backward(sum, num_targets=n)."
        )
    stack_sizes.num_changed += 1
    return False


def _follow(pairs: set[tuple[int, int]]) -> bool:
    """Whether all sizes are the number of samples, or the same multiple of it, which counts only if
    micro-batches of several sizes have it.
    """
    ratios = {size / num_samples for num_samples, size in pairs}
    if len(ratios) != 1:
        return False
    return ratios == {1.0} or len(pairs) > 1
