"""Losses of single samples that a loop adds up: `sum(losses) / len(losses)`.

Each is a mean of its own, but the loss is one mean over samples. Two calls of one model on the same
micro-batch (R-Drop) look the same, so the number of them in other micro-batches decides.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from hf_ga.loss.nodes.saved import Number
from hf_ga.loss.refusals import samples_or_heads, undivided_sum
from hf_ga.loss.stacks import StackSizes, are_apart, sizes_follow_samples
from hf_ga.loss.terms import Term

Found = tuple[Term, Number | None]


def joined_samples(found: Sequence[Found], num_samples: int, stack_sizes: StackSizes) -> list[Term]:
    """Join the terms that are the losses of single samples.

    Args:
        found: The terms, each with what the loss divides it by, if anything.
        num_samples: Number of samples of the micro-batch.
        stack_sizes: The sizes seen in the run (see stacks.py).

    Returns:
        The terms; those of single samples as one, whose divisor is what the loss divides their sum
        by.
    """
    groups: dict[Hashable, list[Found]] = defaultdict(list)
    for term, divisor in found:
        groups[term.identity].append((term, divisor))
    terms = []
    for identity, group in groups.items():
        if _are_samples(identity, group, num_samples, stack_sizes):
            terms.append(_joined(group))
        else:
            terms.extend(term for term, _ in group)
    return terms


def _are_samples(
    identity: Hashable, group: Sequence[Found], num_samples: int, stack_sizes: StackSizes
) -> bool:
    """Whether the terms of one kind are one for each sample of the micro-batch. LossNotAdditive if
    that cannot be known, or their sum is not divided by anything.
    """
    key = ("added", identity)
    first, divisor = group[0]
    if first.is_penalty or not first.node_divides:
        return False
    factors = [term.factor for term, _ in group]
    if all(isinstance(factor, float) for factor in factors) and len(set(factors)) > 1:
        return False
    if len(group) == 1 and key not in stack_sizes.pairs:
        return False  # a plain loss
    if not sizes_follow_samples(key, num_samples, len(group), stack_sizes):
        return False
    is_certain = len(stack_sizes.pairs[key]) > 1
    if divisor is None and is_certain:
        raise undivided_sum(first.node)
    if is_certain:
        return True
    if divisor is None or (isinstance(divisor, float) and divisor != len(group)):
        return False
    if len(group) > 2 and (stack_sizes.may_change or are_apart(t.divisor for t, _ in group)):
        return True
    if stack_sizes.may_change:
        return False  # micro-batches of other sizes follow, or this one is the window
    raise samples_or_heads(first.node, len(group), num_samples)


def _joined(group: Sequence[Found]) -> Term:
    """Return the losses of single samples as one term: factor * sum of the losses / divisor."""
    first, divisor = group[0]
    assert divisor is not None
    return replace(
        first,
        nodes=tuple(term.node for term, _ in group),
        weights=tuple(weight for term, _ in group for weight in term.weights),
        divisions=tuple(node for term, _ in group for node in term.divisions),
        factor=first.factor * divisor,
        divisor=divisor,
        identity=("samples", first.identity),
        is_shape_divisor=False,
        node_divides=False,
    )
