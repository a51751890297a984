"""Same bits, the arithmetic: for any number of ranks, the sum along the tree of a window's chunks is the same number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.exact.chunks import Chunks, TreeSum


def sum_over(chunks: Chunks, values: np.ndarray) -> np.float32:
    """As the ranks compute it: each its own roots, then all roots in order."""
    whole = TreeSum(chunks, np.add)
    for run in chunks.runs:
        own = TreeSum(chunks, np.add)
        for chunk in run:
            own.add((chunk, chunk + 1), values[chunk])
        for node, value in own.nodes:
            whole.add(node, value)
    (((first, end), total),) = whole.nodes
    assert (first, end) == (0, len(values))
    return total


def added_in_turn(chunks: Chunks, values: np.ndarray) -> np.float32:
    """What an all-reduce of the ranks' own sums may give."""
    return np.add.reduce([np.add.reduce(values[run.start : run.stop], initial=np.float32(0)) for run in chunks.runs])


@pytest.mark.parametrize("num_chunks", range(1, 65))
def test_any_number_of_ranks_gives_the_same_bits(num_chunks):
    generator = np.random.default_rng(num_chunks)
    costs = tuple(generator.integers(1, 100, num_chunks).tolist())
    values = (generator.standard_normal((num_chunks, 64)) * 10.0 ** generator.integers(-3, 4, (num_chunks, 64))).astype(np.float32)
    by_ranks = [sum_over(Chunks(costs, ranks), values).tobytes() for ranks in range(1, 10)]
    assert set(by_ranks) == {by_ranks[0]}
    if num_chunks > 3:  # the values' sums do depend on the order
        assert len({added_in_turn(Chunks(costs, ranks), values).tobytes() for ranks in range(1, 10)}) > 1


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=64), st.integers(1, 9))
def test_chunks_are_shared_out_evenly_in_few_roots(costs, num_processes):
    chunks = Chunks(tuple(costs), num_processes)
    assert [chunk for run in chunks.runs for chunk in run] == list(range(len(costs)))
    busiest = max(sum(costs[run.start : run.stop]) for run in chunks.runs)
    assert busiest <= sum(costs) / num_processes + max(costs)
    for rank, run in enumerate(chunks.runs):
        roots = chunks.roots(rank)
        assert [chunk for start, stop in roots for chunk in range(start, stop)] == list(run)
        assert len(roots) <= (1 if num_processes <= 2 else 2 * 64)
