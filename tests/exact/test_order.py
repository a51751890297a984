"""The order: a permutation, the same everywhere, and nothing in it related to anything else.

Statistical checks return how many standard deviations a count lies from its expectation; each is shown to fail on a naive order.
The seeds are fixed, so no test can fail by chance: a bound of 4 sigma says only how close a good hash must come.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ga.exact.hashing import GOLDEN, Stream, extend_key, make_key, mix, mix_in_place, name_key
from hf_ga.exact.order import epoch_order

SIGMAS = 4.0
NUM_SEEDS = 20_000
Order = Callable[[int, int, int], np.ndarray]  # (number of samples, seed, epoch) -> order


# ------------------------------------------------------------------------------------------------- the oracle, in plain Python


def splitmix64(state: int) -> int:
    """One output of splitmix64 as Vigna's public-domain splitmix64.c writes it; written again here to check `hashing`."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def oracle_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    key = 0
    for part in (1, seed, epoch):  # 1 is the stream of orders
        key = splitmix64(key ^ (part % 2**64))
    return sorted(range(num_samples), key=lambda sample: (splitmix64(key ^ sample), sample))


integers = st.integers(-(2**70), 2**70)


# ---------------------------------------------------------------------------------------------------------------- the hash


def test_hash_gives_published_splitmix64_outputs():
    """Catches a wrong constant or shift: the first outputs of the published generator for the states 0 and 1234567."""
    assert make_key(0) == 0xE220A8397B1DCDAF
    assert make_key(1234567) == 6457827717110365317
    assert mix(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4  # the second output for state 0


@given(st.lists(integers, min_size=1, max_size=4), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
def test_hash_of_arrays_equals_hash_of_integers(parts, values):
    """Catches signed arithmetic, a missing modulo, or an array version that drifts from the integer one."""
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part % 2**64))
    assert make_key(*parts) == key
    assert extend_key(key, np.array(values)).tolist() == [splitmix64(key ^ value) for value in values]
    assert extend_key(key, np.array(values)).tolist() == [make_key(*parts, value) for value in values]
    unsigned = np.array(values, dtype=np.uint64)
    assert mix_in_place(unsigned).tolist() == [mix(value) for value in values]
    assert unsigned.tolist() == [mix(value) for value in values], "it is its argument that changes"
    again = np.array([1, 2], np.uint64)
    assert extend_key(7, again).tolist() == [mix((value ^ 7) + GOLDEN) for value in (1, 2)]
    assert again.tolist() == [1, 2], "extend_key must not change its argument"


def test_keys_tell_the_order_and_number_of_parts():
    """Catches a key that adds or xors its parts."""
    assert len({make_key(1, 2), make_key(2, 1), make_key(3, 0), make_key(0, 3), make_key(1, 2, 0), make_key(0, 1, 2)}) == 6
    assert len({make_key(stream, 0, 0) for stream in Stream}) == len(Stream)


def test_name_key_is_the_same_in_every_process():
    """Catches Python's own `hash`, which is salted per process."""
    assert name_key("bert.encoder.layer.0") == 0x3DB9EABACC675CE
    assert name_key("") != name_key("a")


# ---------------------------------------------------------------------------------------------------------- exact properties


@given(st.integers(0, 200), integers, integers)
def test_order_is_the_permutation_of_the_oracle(num_samples, seed, epoch):
    """Catches lost or repeated samples, and any change of the stated hash (which would break resuming)."""
    order = epoch_order(num_samples, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num_samples))
    assert order.tolist() == oracle_order(num_samples, seed, epoch)


@pytest.mark.parametrize(
    ("num_samples", "seed", "epoch", "expected"),
    [
        (0, 5, 5, []),
        (1, 5, 5, [0]),
        (8, 0, 0, [3, 1, 6, 2, 4, 7, 0, 5]),
        (8, 0, 1, [5, 1, 7, 0, 4, 3, 6, 2]),
        (8, 1, 0, [1, 7, 2, 6, 5, 4, 0, 3]),
        (8, -1, 0, [3, 5, 4, 2, 7, 0, 1, 6]),
        (8, 2**64 - 1, 0, [3, 5, 4, 2, 7, 0, 1, 6]),  # seeds count modulo 2**64
        (8, 2**63, 7, [1, 2, 7, 0, 6, 5, 4, 3]),
        (8, 10**30, 1000, [6, 0, 2, 7, 5, 3, 4, 1]),
    ],
)
def test_known_orders(num_samples, seed, epoch, expected):
    """Catches an order that depends on a library's generator, platform or version."""
    assert epoch_order(num_samples, seed, epoch).tolist() == expected


def test_large_order_is_a_permutation():
    """Catches 32-bit identifiers or a sort that loses elements beyond the sizes hypothesis tries."""
    assert np.array_equal(np.sort(epoch_order(1_000_003, 0, 0)), np.arange(1_000_003))
    assert epoch_order(100_003, 0, 0).tolist() == oracle_order(100_003, 0, 0)


def test_without_shuffle_the_order_is_that_of_the_dataset():
    """Catches `shuffle` being ignored."""
    assert epoch_order(7, 3, 2, shuffle=False).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("shuffle", [True, False])
def test_negative_number_of_samples_is_refused(shuffle):
    with pytest.raises(ValueError, match="at least 0, got -1"):
        epoch_order(-1, 0, 0, shuffle)


# --------------------------------------------------------------------------------------------- statistics: checkers and controls


def chi_square_sigmas(observed: np.ndarray, expected: float) -> float:
    """Deviation of Pearson's chi-square with `observed.size - 1` degrees of freedom, in normal standard deviations.

    Wilson and Hilferty (1931): (X / k)**(1/3) is close to normal with mean 1 - 2/(9k) and variance 2/(9k). So "below 4" says: X
    below its quantile at 1 - 3.2e-5. For one degree of freedom, where that is poor, sqrt(X) is exactly |normal|.
    """
    statistic, freedom = float(((observed - expected) ** 2).sum() / expected), observed.size - 1
    if freedom == 1:
        return math.sqrt(statistic)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def position_sigmas(order: Order, num_samples: int) -> float:
    """Worst deviation, over samples, of their positions (over seeds) from uniform."""
    positions = np.array([np.argsort(order(num_samples, seed, 0)) for seed in range(NUM_SEEDS)])
    counts = [np.bincount(positions[:, sample], minlength=num_samples) for sample in range(num_samples)]
    return max(chi_square_sigmas(count, NUM_SEEDS / num_samples) for count in counts)


def follower_sigmas(order: Order, n: int) -> float:
    """How often sample i+1 comes right after sample i, against 1/n for each i.

    The number S of such pairs in a random order has mean (n-1)/n, and E[S(S-1)] = (n-1)(n-2) * (n-2)!/n! = (n-2)/n.
    """
    followers = sum(int((np.diff(order(n, seed, 0)) == 1).sum()) for seed in range(NUM_SEEDS))
    mean = (n - 1) / n
    variance = (n - 2) / n + mean - mean**2
    return abs(followers - NUM_SEEDS * mean) / math.sqrt(NUM_SEEDS * variance)


def fixed_point_sigmas(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """How many positions hold the same sample in both orders: for random orders about Poisson with mean 1.

    Checks the mean (exactly 1, variance 1) and the share of pairs without any (1/e).
    """
    counts = np.array([(first == second).sum() for first, second in pairs])
    of_mean = abs(counts.mean() - 1) * math.sqrt(len(pairs))
    none = math.exp(-1)
    of_none = abs((counts == 0).mean() - none) / math.sqrt(none * (1 - none) / len(pairs))
    return max(of_mean, of_none)


def pairs_of(order: Order, seed_step: int, epoch_step: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """2,000 pairs of orders of 50 samples, the second a seed or an epoch later."""
    return [(order(50, seed, 1), order(50, seed + seed_step, 1 + epoch_step)) for seed in range(2000)]


STEPS = {"next epoch": (0, 1), "next seed": (1, 0), "next seed, epoch before": (1, -1), "both next": (1, 1)}


def affine_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: i -> (a i + b) mod n with an odd multiplier (n a power of two): a permutation, uniform positions, no shuffle."""
    multiplier, shift = 2 * (splitmix64(seed) % num_samples) + 1, splitmix64(seed + 2**32) % num_samples
    return (multiplier * np.arange(num_samples) + shift) % num_samples


def cyclic_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: start at a random sample."""
    return (np.arange(num_samples) + splitmix64(seed) % num_samples) % num_samples


def summed_key_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: `seed + epoch` as the key (torch's `DistributedSampler` does so)."""
    return epoch_order(num_samples, seed + epoch, 0)


def by_random_keys_with_ties(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """Naive: sort by a 3-bit hash. Ties keep the order of the ids."""
    return np.argsort(extend_key(make_key(seed), np.arange(num_samples)) >> np.uint64(61), kind="stable")


@pytest.mark.parametrize("num_samples", [2, 3, 5, 16])
def test_every_position_is_equally_likely(num_samples):
    """Catches biased swaps and hashes with ties (see the control)."""
    assert position_sigmas(epoch_order, num_samples) < SIGMAS


def test_positions_and_neighbours_controls():
    assert position_sigmas(by_random_keys_with_ties, 5) > 3 * SIGMAS
    assert position_sigmas(cyclic_order, 4) < SIGMAS, "uniform positions do not tell a rotation from a shuffle"
    assert follower_sigmas(cyclic_order, 16) > 3 * SIGMAS


@pytest.mark.parametrize("num_samples", [3, 16])
def test_neighbours_in_the_dataset_are_not_neighbours_in_the_order(num_samples):
    """Catches block shuffles, rotations, affine maps."""
    assert follower_sigmas(epoch_order, num_samples) < SIGMAS


@pytest.mark.parametrize("step", STEPS)
def test_orders_of_other_epochs_and_seeds_are_unrelated(step):
    """Catches `seed + epoch` as the key (epoch 1 of seed 0 is epoch 0 of seed 1) and an epoch that is not used."""
    seed_step, epoch_step = STEPS[step]
    assert fixed_point_sigmas(pairs_of(epoch_order, seed_step, epoch_step)) < SIGMAS


def test_epochs_and_seeds_control():
    seed_step, epoch_step = STEPS["next seed, epoch before"]
    assert np.array_equal(summed_key_order(50, 1, 0), summed_key_order(50, 0, 1))
    assert fixed_point_sigmas(pairs_of(summed_key_order, seed_step, epoch_step)) > 3 * SIGMAS
    assert fixed_point_sigmas(pairs_of(affine_order, *STEPS["next epoch"])) > 3 * SIGMAS, "affine_order uses no epoch"
