"""Plans of loops that get as many micro-batches as their loaders have batches."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.order.length_plan import Computed, row_length, row_lengths
from hf_ga.order.numbered_plan import ByNumber, numbered_planner
from hf_ga.order.plan import check_plan, plan_by_sizes

windows = st.lists(st.integers(0, 300), min_size=1, max_size=40).map(np.array)
sizes = st.integers(1, 9)
processes = st.integers(1, 5)
kinds = st.sampled_from(Computed)


def ragged(seed, number=64):
    shares = np.random.default_rng(seed).uniform(size=number) ** 2
    return (8 + shares * 248).astype(int)


def rows_of(plan, lengths, max_tokens):
    return [[row_length(int(lengths[m].sum()), max_tokens) for m in share] for share in plan]


@given(windows, sizes, processes, kinds)
def test_properties(lengths, size, num_processes, computed):
    """Catches lost samples, other numbers of iterations than the loop has, broken limits."""
    max_tokens = size * max(1, int(lengths.max()))
    plan = ByNumber(size, max_tokens, computed)(lengths, num_processes)
    check_plan(plan, len(lengths), num_processes)
    by_sizes = plan_by_sizes(lengths, num_processes, [size])
    assert list(map(len, plan)) == list(map(len, by_sizes))
    for micro_batch in (micro_batch for share in plan for micro_batch in share):
        assert len(micro_batch) * lengths[micro_batch].max() <= max_tokens


def test_padded_batches_have_equally_many_samples():
    lengths = ragged(0, 13)
    (plan,) = numbered_planner(4, lengths)(lengths, 1)
    assert list(map(len, plan)) == [4, 4, 4, 1]
    assert [m.tolist() for m in plan] == [m.tolist() for m in plan_by_sizes(lengths, 1, [4])[0]]
    (unknown,) = numbered_planner(4, None)(np.ones(13, int), 1)
    assert list(map(len, unknown)) == [4, 4, 4, 1]


@pytest.mark.parametrize("num_processes", [1, 8])
def test_rows_are_full(num_processes):
    """The control is a plan of equally many samples: short ones leave rows empty, long ones need
    rows of which there are few.
    """
    for seed in range(20):
        lengths = ragged(seed)
        planner = ByNumber(8, 8 * 256, Computed.ROWS)
        ours = rows_of(planner(lengths, num_processes), lengths, planner.max_tokens)
        plain = rows_of(plan_by_sizes(lengths, num_processes, [8]), lengths, planner.max_tokens)
        assert sum(map(sum, ours)) < 1.25 * lengths.sum()
        assert sum(map(sum, plain)) > 1.35 * lengths.sum(), "control"
        assert max(map(sum, ours)) <= max(map(sum, plain)) / (1.2 if num_processes == 1 else 2)


def test_packed_micro_batches_have_about_equally_many_tokens():
    for seed in range(20):
        lengths = ragged(seed)
        planner = ByNumber(8, 8 * 256, Computed.REAL)
        (share,) = planner(lengths, 1)
        (plain,) = plan_by_sizes(lengths, 1, [8])
        mean = lengths.sum() / 8
        assert max(lengths[m].sum() for m in share) < mean + lengths.max()
        assert max(lengths[m].sum() for m in plain) > 1.5 * mean, "control"


def fewest_tokens(lengths, number, max_tokens):
    """Every way to cut the sorted samples, without those that are too large."""
    descending = np.sort(lengths)[::-1]
    best = None
    for cuts in combinations(range(1, len(lengths)), number - 1):
        parts = [descending[begin:end] for begin, end in pairwise((0, *cuts, len(lengths)))]
        if all(len(part) * part[0] <= max_tokens for part in parts):
            rows = sum(row_length(int(part.sum()), max_tokens) for part in parts)
            best = rows if best is None else min(best, rows)
    return best


def test_hardly_more_tokens_than_the_fewest():
    """The oracle tries every cut of the sorted window."""
    ours = best = 0
    for seed in range(40):
        lengths = ragged(seed, 14)
        max_tokens = 4 * 256
        plan = ByNumber(4, max_tokens, Computed.ROWS)(lengths, 1)
        found = sum(rows_of(plan, lengths, max_tokens)[0])
        fewest = fewest_tokens(lengths, 4, max_tokens)
        assert fewest <= found <= fewest + row_lengths(max_tokens)[0]
        ours += found
        best += fewest
    assert ours < 1.1 * best
