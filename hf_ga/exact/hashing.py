"""The one 64-bit hash that order, dropout and data seeds are drawn from.

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; constants
of Stafford's variant 13). It is written out for Python integers and for numpy arrays: integer arithmetic modulo 2**64 gives the
same bits on every platform and version, which a library's random generator does not promise.
"""

import enum
import hashlib

import numpy as np

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
GOLDEN_64 = np.uint64(GOLDEN)
# The steps of `mix`: shift, multiplier.
_STEPS_64 = ((np.uint64(30), np.uint64(MULTIPLIER_1)), (np.uint64(27), np.uint64(MULTIPLIER_2)))
_LAST_SHIFT_64 = np.uint64(31)


class Stream(enum.IntEnum):
    """What a key is for. Different streams never share keys."""

    ORDER = 1
    SAMPLE = 2  # random transforms of one sample
    COLLATE = 3  # random collators, one key a window
    DROPOUT = 4  # draws that belong to a sample
    WINDOW = 5  # draws that belong to the whole window
    BUFFER = 6  # which sample leaves a shuffle buffer; opening a stream


def mix(value: int) -> int:
    """Scramble a 64-bit integer (a bijection)."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK64
    return value ^ (value >> 31)


def mix_in_place(values: np.ndarray) -> np.ndarray:
    """`mix` for every element of a uint64 array, which is changed and returned."""
    for shift, multiplier in _STEPS_64:
        values ^= values >> shift
        values *= multiplier
    values ^= values >> _LAST_SHIFT_64
    return values


def make_key(*parts: int) -> int:
    """A 64-bit key from any number of integers; the order of the parts counts.

    >>> make_key(1, 2) == make_key(2, 1)
    False
    """
    key = 0
    for part in parts:
        key = mix((key ^ (part & MASK64)) + GOLDEN)
    return key


def extend_key(key: int, values: np.ndarray) -> np.ndarray:
    """`make_key(*parts, v)` for every v of an integer array, given `key = make_key(*parts)`. Returns uint64, same shape."""
    return mix_in_place((np.asarray(values).astype(np.uint64) ^ np.uint64(key)) + GOLDEN_64)


def name_key(name: str) -> int:
    """A 64-bit key of a text (BLAKE2b), the same in every process, unlike Python's own `hash`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
