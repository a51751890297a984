"""What ranks add up at a window's end to find out whether they have the same terms, factors and
proportions: sums that any reduction gives, so that a steady window needs no other exchange.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from hf_ga.engine.sums.divisors import NO_SUCH_FACTOR, RELATIVE_ROUNDING
from hf_ga.engine.sums.groups import Group
from hf_ga.engine.sums.readings import TermKey
from hf_ga.errors import LossNotAdditive


def power_sums(numbers: Sequence[float]) -> tuple[float, float, float]:
    """Return what ranks add up to compare numbers: how many there are, their sum, and that of their
    squares.
    """
    return float(len(numbers)), sum(numbers), sum(number**2 for number in numbers)


def squared_differences(sums: tuple[float, float, float]) -> float:
    """Return the sum of the squared differences of all pairs of numbers; 0 if it is rounding.

    Args:
        sums: Their `power_sums`, added up over all ranks.
    """
    number, total, total_of_squares = sums
    differences = number * total_of_squares - total**2
    return differences if differences > number * total_of_squares * RELATIVE_ROUNDING**2 else 0.0


def factor_sums(keys: Sequence[TermKey], factors: Mapping[TermKey, float]) -> list[float]:
    """Return what shows whether all ranks have the same factors: three numbers for each grouped
    term, and for the sum of the others', of penalties.

    Args:
        keys: The grouped terms, the same on all ranks.
        factors: The factors of this rank's terms.
    """
    others = [factor for key, factor in factors.items() if key not in keys]
    of_terms = [*(factors.get(key) for key in keys), sum(others) if others else None]
    return _flat_power_sums(of_terms)


def present_terms(keys: Sequence[TermKey], sums: Sequence[float]) -> list[TermKey]:
    """Return the terms that any rank has.

    Args:
        keys: The terms.
        sums: The `power_sums` of each, three numbers, of which the first counts the ranks.
    """
    return [key for index, key in enumerate(keys) if sums[3 * index]]


def check_factors(
    keys: Sequence[TermKey], sums: Sequence[float], name_of: Callable[[TermKey], str]
) -> None:
    """Check that all ranks have the same factors; all of them raise otherwise.

    Args:
        keys: The grouped terms.
        sums: The sums of `factor_sums` over all ranks.
        name_of: Returns a term in words.

    Raises:
        LossNotAdditive: If a term has another factor on another rank.
    """
    for index in _differing(sums):
        of_term = tuple(sums[3 * index : 3 * index + 3])
        number, total, _ = of_term
        difference = math.sqrt(squared_differences(of_term)) / abs(number)
        name = name_of(keys[index]) if index < len(keys) else "the penalties on parameters"
        raise LossNotAdditive(
            f"{name}: its factor in the loss differs between processes in the same window, "
            f"by about {difference:.3g} (mean {total / number:.6g}), so {NO_SUCH_FACTOR}"
        )


def ratio_sums(groups: Sequence[Group]) -> list[float]:
    """Return what shows whether the terms of each group have the same proportions on all ranks:
    three numbers for each term but the first one.
    """
    return _flat_power_sums([group.ratios.get(key) for group in groups for key in group.keys[1:]])


def out_of_proportion(groups: Sequence[Group], sums: Sequence[float]) -> list[TermKey]:
    """Return the terms that have other proportions on another rank.

    Args:
        groups: The groups.
        sums: The sums of `ratio_sums` over all ranks.
    """
    later = [key for group in groups for key in group.keys[1:]]
    return [later[index] for index in _differing(sums)]


def raised_sums(groups: Sequence[Group]) -> list[float]:
    """Return what shows what each group divides by if that is the number of targets of another term
    that has none in the window: the number to which it is raised from 0, as in the full batch.
    """
    return [number for g in groups for number in (math.fsum(g.raised), float(len(g.raised)))]


def raised_divisors(sums: Sequence[float]) -> list[float]:
    """Return that number for each group, from the sums of `raised_sums` over all ranks."""
    numbers = iter(sums)
    return [total / (count or 1.0) for total, count in zip(numbers, numbers, strict=True)]


def sample_sums(groups: Sequence[Group]) -> list[float]:
    """Return of how many samples the divisors of each group are, and whether they count samples."""
    return [float(n) for group in groups for n in (group.num_samples, *group.counts_samples)]


def shares_of_samples(
    groups: Sequence[Group],
    sums: Sequence[float],
    num_samples: float,
    name_of: Callable[[TermKey], str],
) -> list[float]:
    """Return the share of the window's samples that each group's divisors are of, 1 where they do
    not count samples. The same on all ranks, which raise LossNotAdditive if it is unknown.

    Args:
        groups: The groups.
        sums: The sums of `sample_sums` over all ranks.
        num_samples: Number of samples of the window.
        name_of: Returns a term in words.
    """
    numbers = iter(sums)
    shares = []
    for group, number, counts, counts_not in zip(groups, numbers, numbers, numbers, strict=True):
        is_complete = number in (0, num_samples)
        if not is_complete and not counts and not counts_not:
            raise _unknown_share(name_of(group.keys[0]))
        shares.append(number / num_samples if counts and not is_complete else 1.0)
    return shares


def penalty_sums(groups: Sequence[Group]) -> list[float]:
    """Return in how many micro-batches penalties are beside the first group's terms, and what they
    count there.
    """
    of_penalties = groups[0].of_penalties if groups else []
    return [float(len(of_penalties)), math.fsum(of_penalties)]


def _unknown_share(name: str) -> LossNotAdditive:
    """Return the error for a divided sum that some micro-batches lack, or have no targets of.

    Args:
        name: The term in words.
    """
    return LossNotAdditive(
        f"{name}: some micro-batches lack this sum or have no target of it, and in the others it "
        "divides by what may be the number of targets, that of samples or a constant, so it cannot "
        "be known what the full batch divides by. Let larger micro-batches have the sum, which may "
        "be 0 (without the condition, an empty sum is), or pass the sum and its number of targets: "
        "accelerator.backward(sum, num_targets=n)."
    )


def _flat_power_sums(numbers: Sequence[float | None]) -> list[float]:
    """Return the power sums of numbers of this rank, None being a number that it lacks."""
    of_this_rank = [[] if number is None else [number] for number in numbers]
    return [value for values in of_this_rank for value in power_sums(values)]


def _differing(sums: Sequence[float]) -> list[int]:
    """Return the indices of the numbers of `_flat_power_sums` that differ between ranks."""
    triples = [tuple(sums[start : start + 3]) for start in range(0, len(sums), 3)]
    return [index for index, triple in enumerate(triples) if squared_differences(triple)]
