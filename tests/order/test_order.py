"""The order: a permutation, the same everywhere, and nothing in it related to anything else.

Each statistic is shown to fail on a naive order.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from hash_oracle import SIGMAS, oracle_key, splitmix64
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.draws.hashing import (
    MASK64,
    Purpose,
    fold_in,
    fold_in_each,
    mix,
    mix_in_place,
    mixed,
    signed,
)
from hf_ga.order.order import epoch_order

Order = Callable[[int, int, int], np.ndarray]  # (number of samples, seed, epoch) -> order
integers = st.integers(-(2**70), 2**70)


def oracle_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    key = oracle_key(1, seed, epoch)  # 1 is the stream of orders
    return sorted(range(num_samples), key=lambda sample: (splitmix64(key ^ sample), sample))


def test_hash_gives_published_splitmix64_outputs():
    """Catches a wrong constant or shift: the first outputs of the published generator for the
    states 0 and 1234567.
    """
    assert fold_in(0) == 0xE220A8397B1DCDAF
    assert fold_in(1234567) == 6457827717110365317
    assert mix(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # the second output for state 0


@given(
    st.lists(integers, min_size=1, max_size=4),
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5),
)
def test_hash_of_arrays_equals_hash_of_integers(parts, values):
    """Catches signed arithmetic, a missing modulo, or an array version that drifts from the integer
    one.
    """
    key = oracle_key(*parts)
    assert fold_in(*parts) == key
    expected = [oracle_key(*parts, value) for value in values]
    assert fold_in_each(key, np.array(values)).tolist() == expected
    tensor = torch.tensor(values)
    assert [v & MASK64 for v in mixed(tensor ^ signed(key)).tolist()] == expected
    assert mixed(tensor) is not tensor and tensor.tolist() == values, (
        "mixed must not change its argument"
    )
    assert mix_in_place(tensor).tolist() == tensor.tolist() == [signed(mix(v)) for v in values], (
        "it is its argument that changes"
    )


def test_keys_tell_the_order_and_number_of_parts():
    """Catches a key that adds or xors its parts, and two streams of one number."""
    assert (
        len(
            {
                fold_in(1, 2),
                fold_in(2, 1),
                fold_in(3, 0),
                fold_in(0, 3),
                fold_in(1, 2, 0),
                fold_in(0, 1, 2),
            }
        )
        == 6
    )
    assert len({fold_in(purpose, 0, 0) for purpose in Purpose}) == len(Purpose.__members__)


@given(st.integers(0, 200), integers, integers)
def test_order_is_the_permutation_of_the_oracle(num_samples, seed, epoch):
    """Catches lost or repeated samples, and any change of the stated hash (which would break
    resuming).
    """
    order = epoch_order(num_samples, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_samples))
    assert order.tolist() == oracle_order(num_samples, seed, epoch)


def test_a_large_order():
    """Catches 32-bit identifiers or a sort that loses elements beyond the sizes hypothesis
    tries.
    """
    assert np.array_equal(np.sort(epoch_order(1_000_003, 0, 0)), np.arange(1_000_003))
    assert epoch_order(30_011, 0, 0).tolist() == oracle_order(30_011, 0, 0)


def test_without_shuffle_the_order_is_that_of_the_dataset():
    """Catches `shuffle` being ignored."""
    assert epoch_order(7, 3, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4, 5, 6]


def fixed_point_sigmas(order: Order, seed_step: int, epoch_step: int) -> float:
    """How many positions hold the same sample in an order and in one a seed or an epoch later: for
    random orders about Poisson with mean 1. Checks the mean (exactly 1, variance 1) and the share
    of pairs without any (1/e).
    """
    pairs = [
        (order(50, seed, 1), order(50, seed + seed_step, 1 + epoch_step)) for seed in range(2000)
    ]
    counts = np.array([(first == second).sum() for first, second in pairs])
    of_mean = abs(counts.mean() - 1) * math.sqrt(len(pairs))
    none = math.exp(-1)
    of_none = abs((counts == 0).mean() - none) / math.sqrt(none * (1 - none) / len(pairs))
    return max(of_mean, of_none)


def cyclic_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: start at a random sample."""
    return (np.arange(num_samples) + splitmix64(seed) % num_samples) % num_samples


def summed_key_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: `seed + epoch` as the key (torch's `DistributedSampler` does so)."""
    return epoch_order(num_samples, seed + epoch, 0)


def test_orders_of_other_epochs_and_seeds_are_unrelated():
    """Catches `seed + epoch` as the key (epoch 1 of seed 0 is epoch 0 of seed 1) and an epoch that
    is not used.
    """
    for seed_step, epoch_step in ((0, 1), (1, 0), (1, -1), (1, 1)):
        assert fixed_point_sigmas(epoch_order, seed_step, epoch_step) < SIGMAS
    assert fixed_point_sigmas(summed_key_order, 1, -1) > 3 * SIGMAS, "control"
    assert fixed_point_sigmas(cyclic_order, 1, 0) > 3 * SIGMAS, "control: rotations"
    assert fixed_point_sigmas(cyclic_order, 0, 1) > 3 * SIGMAS, "control: no epoch"
