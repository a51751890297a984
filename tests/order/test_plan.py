"""Plans and layouts: every sample of a window once, within the limits, and the arithmetic of batch
sizes by hand.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.errors import ConfigError
from hf_ga.order.layout import Layout
from hf_ga.order.plan import plan_by_sizes, plan_window

window_sizes = st.integers(0, 300)
processes = st.integers(1, 20)
limits = st.integers(1, 70)
lengths_lists = st.lists(st.integers(1, 50), max_size=80)


def sizes_of(plan):
    return [[len(micro_batch) for micro_batch in share] for share in plan]


@given(window_sizes, processes, limits)
def test_plan_window_properties(window, num_processes, limit):
    """Catches lost, repeated or padded samples, broken limits, unbalanced processes and too many
    forwards.
    """
    plan = plan_window(window, num_processes, limit)
    assert len(plan) == num_processes
    shares = [sum(sizes) for sizes in sizes_of(plan)]
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True), "larger ones first"
    assert shares.count(0) == max(0, num_processes - window)
    for sizes, share in zip(sizes_of(plan), shares, strict=True):
        assert len(sizes) == -(-share // limit), "as few micro-batches as the limit allows"
        assert sizes == sorted(sizes, reverse=True)
        if sizes:
            assert min(sizes) >= 1
            assert max(sizes) <= limit
            assert max(sizes) - min(sizes) <= 1
    # Each process gets consecutive positions, in order of the processes.
    assert [int(o) for share in plan for micro_batch in share for o in micro_batch] == list(
        range(window)
    )


@given(lengths_lists, processes, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_plan_by_sizes_properties(lengths, num_processes, sizes):
    """Catches a lost tail, a size used out of turn, micro-batches not sorted by length, and blocks
    dealt out instead of turns.
    """
    plan = plan_by_sizes(np.array(lengths, dtype=np.int64), num_processes, sizes)
    assert len(plan) == num_processes
    in_turn = [share[turn] for turn in range(len(plan[0])) for share in plan if turn < len(share)]
    flat = [int(offset) for micro_batch in in_turn for offset in micro_batch]
    assert flat == sorted(range(len(lengths)), key=lambda offset: lengths[offset]), (
        "equal lengths keep their order"
    )
    got = [len(micro_batch) for micro_batch in in_turn]
    wanted = [sizes[i % len(sizes)] for i in range(len(got))]
    assert got[:-1] == wanted[:-1]
    assert not got or 1 <= got[-1] <= wanted[-1]
    counts = [len(share) for share in plan]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("arguments", "global_batch_size", "expected"),
    [
        ((1, 8), None, (1, 8, 1, 8)),
        ((2, 8, 4), None, (2, 8, 4, 64)),
        ((1, 10), 64, (1, 10, 7, 64)),  # 6.4 steps: 7 uneven micro-batches
        ((2, 8, 4), 64, (2, 8, 4, 64)),  # given twice and right
        ((2, 8, 4), 63, (2, 8, 4, 63)),  # the last micro-batches are a sample short
        ((4, 8), 3, (4, 8, 1, 3)),  # a process has nothing
    ],
)
def test_layout_by_hand(arguments, global_batch_size, expected):
    """Catches rounding down (which would drop samples) and a window of the rounded-up product."""
    assert Layout.from_sizes(*arguments, global_batch_size=global_batch_size) == Layout(*expected)


@pytest.mark.parametrize(
    ("arguments", "global_batch_size", "message"),
    [
        ((0, 8), None, "the number of processes must be at least 1, got 0"),
        ((1, 0), None, "per_device_train_batch_size must be at least 1, got 0"),
        ((1, 8, 0), None, "gradient_accumulation_steps must be at least 1, got 0"),
        ((1, 8), 0, "global_batch_size must be at least 1, got 0"),
        (
            (2, 8, 3),
            64,
            r"2 processes x 8 samples x 3 steps = 48\. Leave gradient_accumulation_steps out \(it "
            r"would be 4\)",
        ),
    ],
)
def test_layout_refuses(arguments, global_batch_size, message):
    """Catches `steps or 1`, which takes 0 for "left out"; each error must give the rule, the values
    and the remedy.
    """
    with pytest.raises(ConfigError, match=message):
        Layout.from_sizes(*arguments, global_batch_size=global_batch_size)
