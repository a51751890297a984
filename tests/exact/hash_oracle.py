"""The hash of order and masks, written again in plain Python integers, and what judges how random its results look."""

import math

import numpy as np

SIGMAS = 4.0  # bound of all statistics: standard deviations of what independent draws give; seeds are fixed


def splitmix64(state: int) -> int:
    """One output of splitmix64 as Vigna's public-domain splitmix64.c writes it."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def oracle_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part % 2**64))
    return key


def chi_square_sigmas(observed: np.ndarray) -> float:
    """Deviation of Pearson's chi-square of equally likely classes from its mean, in normal standard deviations.

    Wilson and Hilferty (1931): (X / k)**(1/3) is close to normal with mean 1 - 2/(9k) and variance 2/(9k).
    """
    expected, freedom = observed.mean(), observed.size - 1
    statistic = float(((observed - expected) ** 2).sum() / expected)
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
