"""Losses of single samples that a loop adds up: `sum(losses) / len(losses)`.

Each is a mean of its own, or a sum, but the loss is one mean. Two calls of one model on the same
micro-batch (R-Drop) look the same, so the number of them in other micro-batches decides.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from hf_ga.loss.nodes.saved import Number
from hf_ga.loss.part import Part
from hf_ga.loss.refusals import samples_or_heads, undivided_sum
from hf_ga.loss.stacks import StackSizes, are_apart, sizes_follow_samples
from hf_ga.loss.terms import Term

# A term, and the part of the loss that may be added up: the node of a mean, of a sum, or of the
# division of a sum by a number of its own.
Found = tuple[Term, Part]


def joined_samples(found: Sequence[Found], num_samples: int, stack_sizes: StackSizes) -> list[Term]:
    """Join the terms that are the losses of single samples.

    Args:
        found: The terms, each with the part that may be added up.
        num_samples: Number of samples of the micro-batch.
        stack_sizes: The sizes seen in the run (see stacks.py).

    Returns:
        The terms; those of single samples as one, whose divisor is what the loss divides their sum
        by.
    """
    groups: dict[Hashable, list[Found]] = defaultdict(list)
    for term, part in found:
        groups[term.identity].append((term, part))
    terms = []
    for group in groups.values():
        if _are_samples(group, num_samples, stack_sizes):
            terms.append(_joined(group))
        else:
            terms.extend(term for term, _ in group)
    return terms


def _key(value: Number | None) -> Hashable:
    """Return a number, or which tensor it is: one on an accelerator is not read."""
    return id(value) if isinstance(value, Tensor) else value


def _is_mean(term: Term, part: Part) -> bool:
    """Whether a term is divided by a number of its own before it is added to others."""
    return term.node_divides or part.node is not term.node


def _are_samples(group: Sequence[Found], num_samples: int, stack_sizes: StackSizes) -> bool:
    """Whether the terms of one kind are one for each sample of the micro-batch. LossNotAdditive if
    that cannot be known, or their sum is not divided by anything.
    """
    first, part = group[0]
    key = ("added", first.identity)
    # A trained weight of a sum that is divided itself would get its gradient twice.
    if first.is_penalty or len(part.weights) != len(first.weights):
        return False
    if len({(_key(part.factor), _key(part.divisor)) for _, part in group}) > 1:
        return False
    is_known = key in stack_sizes.pairs
    if len(group) == 1 and not is_known:
        return False  # a plain loss
    if not sizes_follow_samples(key, num_samples, len(group), stack_sizes):
        return False
    is_certain = len(stack_sizes.pairs[key]) > 1
    if part.divisor is None and is_certain:
        raise undivided_sum(first.node)
    if not is_certain and not _seem_samples(group, num_samples, stack_sizes):
        return False
    if is_known and key not in stack_sizes.of_samples:
        stack_sizes.num_changed += 1  # they were read one by one
    stack_sizes.of_samples.add(key)
    return True


def _seem_samples(group: Sequence[Found], num_samples: int, stack_sizes: StackSizes) -> bool:
    """Whether as many terms as there are samples are taken for those of the samples, as long as all
    micro-batches have had this size.
    """
    first, part = group[0]
    if part.divisor is None:
        return False
    if not _is_mean(first, part):
        # One sum in any case, as all have one divisor; but two are rather those of R-Drop.
        return len(group) > 2 or stack_sizes.may_repeat
    if not first.node_divides and not stack_sizes.may_change:
        return False  # read one by one; they need no buffers of their own if they are in proportion
    has_other_divisor = isinstance(part.divisor, float) and part.divisor != len(group)
    if stack_sizes.may_change and not has_other_divisor:
        return True  # micro-batches of other sizes follow, or this one is the window
    if len(group) > 2 and are_apart(term.divisor for term, _ in group):
        return True
    if has_other_divisor:
        return False
    raise samples_or_heads(first.node, len(group), num_samples)


def _joined(group: Sequence[Found]) -> Term:
    """Return several terms as one: factor * sum of the parts / divisor."""
    first, part = group[0]
    assert part.divisor is not None
    identity = ("samples", first.identity) if _is_mean(first, part) else first.identity
    return replace(
        first,
        nodes=tuple(part.node for _, part in group),
        weights=tuple(weight for _, part in group for weight in part.weights),
        divisions=tuple(node for _, part in group for node in part.divisions),
        factor=part.factor,
        divisor=part.divisor,
        identity=identity,
        is_shape_divisor=False,
        node_divides=False,
    )
