"""Plans by length: against every plan there is (small windows), the plans by number, and the limit
on padded tokens.
"""

import time
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_ga.order.length_plan import (
    ATTENTION_WIDTH,
    CPU_OVERHEAD,
    GPU_OVERHEAD_OF_ROWS,
    MAX_PADDING,
    ByLength,
    Computed,
    padded_tokens,
    row_length,
)
from hf_ga.order.plan import check_plan, plan_by_sizes, plan_window

lengths_lists = st.lists(st.integers(0, 60), max_size=70)
small_lists = st.lists(st.integers(0, 12), min_size=1, max_size=7)
overheads = st.integers(0, 80)
processes = st.integers(1, 9)
limits = st.integers(1, 900)


def planner(
    limit,
    overhead=CPU_OVERHEAD,
    lockstep=False,
    computed=Computed.PADDED,
    pads_attention=True,
):
    return ByLength(1, limit, overhead, lockstep, computed, pads_attention)


def as_lists(plan):
    return [[micro_batch.tolist() for micro_batch in share] for share in plan]


def priced(share, lengths, overhead):
    """The formula, in floating point: overhead + samples x width x (1 + width /
    ATTENTION_WIDTH).
    """
    total = 0.0
    for m in share:
        width = max(1, *(int(lengths[o]) for o in m))
        total += overhead + len(m) * width * (1 + width / ATTENTION_WIDTH)
    return total


def time_in_turns(plan, lengths, overhead):
    """Where all wait for the longest: who has fewer micro-batches repeats its first one, in
    front.
    """
    most = max(map(len, plan))
    filled = [[*([s[0]] * (most - len(s)) if s else []), *s] for s in plan]
    return sum(
        max((priced([s[turn]], lengths, overhead) for s in filled if s), default=0)
        for turn in range(most)
    )


@cache
def set_partitions(n):
    """All ways to put 0 ... n - 1 into groups, by recursion: 877 of 7."""
    if not n:
        return [[]]
    smaller = set_partitions(n - 1)
    joined = [[*p[:i], [*p[i], n - 1], *p[i + 1 :]] for p in smaller for i in range(len(p))]
    return joined + [[*p, [n - 1]] for p in smaller]


def fits(group, lengths, limit, overhead):
    return len(group) == 1 or len(group) * max(1, *(lengths[o] for o in group)) <= limit


def cheapest(lengths, limit, overhead):
    """The micro-batches between the cheapest cuts, one a list of lengths."""
    widths = np.maximum(np.sort(lengths), 1)
    ((cuts, _),) = planner(limit, overhead).cheapest_splits(widths, [limit])
    return [widths[a:b] for a, b in pairwise(cuts.tolist())]


def total(groups, overhead):
    return sum(priced([range(len(group))], group, overhead) for group in groups)


@example(
    [1, 1, 1, 9, 9], 27, 1
)  # filling each micro-batch up to the limit pads 9 + 1, and costs more
@given(small_lists, limits, overheads)
def test_cheapest_cuts_of_all_plans(lengths, limit, overhead):
    """The oracle tries every way to put the samples into groups, sorted or not. Catches greedy
    cuts.
    """
    allowed = [
        p for p in set_partitions(len(lengths)) if all(fits(g, lengths, limit, overhead) for g in p)
    ]
    least = min(priced(p, lengths, overhead) for p in allowed)
    assert total(cheapest(lengths, limit, overhead), overhead) == pytest.approx(least, rel=1e-12)


def packed_price(group, overhead, pads_attention, row_limit=None):
    """The formula for packed tokens, in floating point."""
    widths = [max(group)] * len(group) if pads_attention else group
    num_tokens = sum(group)
    if row_limit is not None and num_tokens <= row_limit:
        num_tokens = row_length(num_tokens, row_limit)
    return overhead + num_tokens + sum(width**2 for width in widths) / ATTENTION_WIDTH


def fits_packed(group, limit):
    return len(group) == 1 or (
        sum(group) <= limit and len(group) * max(group) <= MAX_PADDING * limit
    )


@example([1, 1, 1, 1, 9, 9], 20, 0, True, None)  # with overhead 0, attention cuts at the lengths
# Rows of 64, 128 and 256 tokens, not two of 256, as the fewest micro-batches would be.
@example([60, 61, 62, 200], 260, 1, False, 256)
@given(small_lists, limits, overheads, st.booleans(), st.sampled_from([None, 256, 1024]))
def test_cheapest_cuts_of_packed_tokens(lengths, limit, overhead, pads_attention, row_limit):
    """The oracle tries every way to cut the sorted samples."""
    widths = np.maximum(np.sort(lengths), 1)
    prices = []
    for number in range(len(widths)):
        for cuts in combinations(range(1, len(widths)), number):
            groups = [widths[a:b].tolist() for a, b in pairwise([0, *cuts, len(widths)])]
            if all(fits_packed(group, limit) for group in groups):
                options = (overhead, pads_attention, row_limit)
                prices.append(sum(packed_price(group, *options) for group in groups))
    computed = Computed.REAL if row_limit is None else Computed.ROWS
    plans = planner(row_limit, overhead, computed=computed, pads_attention=pads_attention)
    ((boundaries, _),) = plans.cheapest_splits(widths, [limit])
    chosen = [widths[a:b].tolist() for a, b in pairwise(boundaries)]
    assert all(fits_packed(group, limit) for group in chosen)
    found = sum(packed_price(group, overhead, pads_attention, row_limit) for group in chosen)
    assert found == pytest.approx(min(prices), rel=1e-12)


@given(lengths_lists, processes, limits, overheads, st.booleans(), st.booleans())
def test_properties_of_plans_for_packed_tokens(
    lengths, num_processes, limit, overhead, lockstep, pads_attention
):
    window = np.array(lengths, np.int64)
    options = {"overhead": overhead, "lockstep": lockstep, "pads_attention": pads_attention}
    plan = planner(limit, computed=Computed.REAL, **options)(window, num_processes)
    check_plan(plan, len(lengths), num_processes)
    one_by_one = [
        [packed_price(np.maximum(window[m], 1).tolist(), overhead, pads_attention) for m in share]
        for share in plan
    ]
    if len(set(np.maximum(window, 1).tolist())) > 1:  # otherwise split by number
        assert all(prices == sorted(prices) for prices in one_by_one)
        for share in plan:
            assert all(fits_packed(np.maximum(window[m], 1).tolist(), limit) for m in share)


def test_rows_are_few():
    """Where only the number of micro-batches costs, it is at most one more than the tokens need."""
    for seed in range(20):
        shares = np.random.default_rng(seed).uniform(size=64) ** 2
        lengths = (8 + shares * 248).astype(int)
        limit = 8 * int(lengths.max())
        (share,) = planner(limit, 7000, computed=Computed.REAL, pads_attention=False)(lengths, 1)
        (padded,) = planner(limit, 192)(lengths, 1)
        assert len(share) <= -(-lengths.sum() // limit) + 1
        assert len(padded) > len(share) + 2, "control"


def test_rows_are_full():
    """Compiled rows have three lengths: tails take fewer tokens where the plan knows them."""
    tails = {True: 0, False: 0}
    num_tokens = 0
    for seed in range(20):
        shares = np.random.default_rng(seed).uniform(size=64) ** 2
        lengths = (8 + shares * 248).astype(int)
        limit = 8 * 256
        num_tokens += int(lengths.sum())
        for knows in tails:
            (share,) = planner(
                limit,
                GPU_OVERHEAD_OF_ROWS * limit // 8192,
                computed=Computed.ROWS if knows else Computed.REAL,
                pads_attention=False,
            )(lengths, 1)
            rows = [row_length(int(lengths[m].sum()), limit) for m in share]
            tails[knows] += sum(rows) - int(lengths.sum())
            assert len(share) <= -(-lengths.sum() // limit) + 1
    assert tails[True] < 0.1 * num_tokens
    assert tails[False] > 2 * tails[True], "control"


@given(lengths_lists, processes, limits, overheads, st.booleans())
def test_properties(lengths, num_processes, limit, overhead, lockstep):
    """Catches lost or repeated samples, broken limits, a plan that is no function of its arguments,
    an order in a share that is not from the cheapest to the dearest, and under FSDP numbers of
    micro-batches that differ by more than one.
    """
    window = np.array(lengths, np.int64)
    plan = planner(limit, overhead, lockstep)(window, num_processes)
    check_plan(plan, len(lengths), num_processes)
    for share in plan:
        assert all(fits(m, lengths, limit, overhead) for m in share)
        one_by_one = [priced([m], lengths, overhead) for m in share]
        assert one_by_one == sorted(one_by_one)
    assert not lockstep or max(map(len, plan)) - min(map(len, plan)) <= 1
    again = planner(limit, overhead, lockstep)(window.copy(), num_processes)
    assert as_lists(again) == as_lists(plan)


@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=70),
    processes,
    st.integers(1, 12),
    overheads,
    st.booleans(),
)
def test_hardly_slower_than_plans_by_number(
    lengths, num_processes, micro_batch, overhead, lockstep
):
    """With the memory of `micro_batch` samples of the longest. The others: the window's own order
    in even shares, and sorted by length in equal numbers, dealt out in turn.
    """
    window = np.array(lengths)
    limit = micro_batch * max(1, max(lengths))
    plan = planner(limit, overhead, lockstep)(window, num_processes)

    def time(plan):
        return (
            time_in_turns(plan, lengths, overhead)
            if lockstep
            else max(priced(share, lengths, overhead) for share in plan)
        )

    slack = 1 + 1 / 32 if num_processes == 1 else 1.1
    for other in (
        plan_window(len(lengths), num_processes, micro_batch),
        plan_by_sizes(window, num_processes, [micro_batch]),
    ):
        assert time(plan) <= time(other) * slack * (1 + 1e-12)


@pytest.mark.parametrize("lockstep", [False, True], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("window", "num_processes", "micro_batch"), [(64, 8, 8), (1024, 16, 8), (100, 7, 4)]
)
def test_balance_on_ragged_lengths(window, num_processes, micro_batch, lockstep):
    """Sizes of a log-normal distribution, as texts have. Control: plans by number, the sorted one
    too, take longer.
    """
    overhead = 32  # cuts finely, whatever the constants of a device are
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, window), 2, 256).astype(int)
    plan = planner(micro_batch * 256, overhead, lockstep)(lengths, num_processes)
    others = (
        plan_window(window, num_processes, micro_batch),
        plan_by_sizes(lengths, num_processes, [micro_batch]),
    )
    shares = [priced(share, lengths, overhead) for share in plan]
    if lockstep:
        assert time_in_turns(plan, lengths, overhead) < 1.3 * np.mean(shares)
        ratios = [
            time_in_turns(other, lengths, overhead) / time_in_turns(plan, lengths, overhead)
            for other in others
        ]
        assert ratios[0] > 2
        assert ratios[1] > 1.05
    else:
        assert max(shares) < 1.07 * np.mean(shares)
        ratios = [
            max(priced(s, lengths, overhead) for s in other) / max(shares) for other in others
        ]
        assert ratios[0] > 2
        assert ratios[1] > 1.15


@given(st.integers(1, 300), processes, st.integers(1, 40), st.integers(1, 30), st.booleans())
def test_equal_lengths_are_split_by_number(window, num_processes, micro_batch, length, lockstep):
    """As `plan_window` does."""
    plans = planner(micro_batch * length, lockstep=lockstep)
    plan = plans(np.full(window, length), num_processes)
    assert as_lists(plan) == as_lists(plan_window(window, num_processes, micro_batch))


def test_without_a_limit_it_is_that_of_the_windows_longest():
    plans = ByLength(2, None, 1000, lockstep=False)
    assert as_lists(plans(np.array([4, 4, 4, 4, 8]), 1)) == [
        [[4], [0, 1, 2, 3]]
    ]  # 2 x 8 = 16 tokens
    assert as_lists(plans(np.array([4, 4, 4, 4]), 1)) == [[[0, 1], [2, 3]]]  # 2 x 4 = 8 tokens
    assert as_lists(ByLength(2, 16, 1000, lockstep=False)(np.array([4, 4, 4, 4]), 1)) == [
        [[0, 1, 2, 3]]
    ]


def test_padded_tokens_by_hand():
    assert (
        padded_tokens([[np.array([0, 1]), np.array([2])], [np.array([3])]], np.array([3, 8, 9, 1]))
        == 16 + 9 + 1
    )


@pytest.mark.parametrize("computed", [Computed.PADDED, Computed.REAL])
def test_is_quick(computed):
    """4,096 samples over 256 processes: below 0.3 s; 64 on one: below 12 ms. Catches a loop over
    pairs of samples.
    """
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 4096), 2, 512).astype(int)
    for window, num_processes, most in ((4096, 256, 0.3), (64, 1, 0.012)):
        seconds = []
        for _ in range(5):  # the least: other programs share this machine's cores
            began = time.process_time()
            planner(4096, computed=computed)(lengths[:window], num_processes)
            seconds.append(time.process_time() - began)
        assert min(seconds) < most


def test_a_smaller_limit_is_taken_where_it_costs_next_to_nothing():
    """On one process: less memory for at most 1/32 more time. Control: the limit that was given
    alone takes more memory.
    """
    lengths = np.clip(np.random.default_rng(2).lognormal(3.6, 1.1, 64), 3, 256).astype(int)
    overhead = 32
    largest = []
    times = []
    for groups in (
        [lengths[m] for m in planner(8 * 256, overhead)(lengths, 1)[0]],
        cheapest(lengths, 8 * 256, overhead),
    ):
        largest.append(max(len(group) * int(group.max()) for group in groups))
        times.append(total(groups, overhead))
    assert largest[0] < largest[1]
    assert times[1] <= times[0] <= times[1] * (1 + 1 / 32)
