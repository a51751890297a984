"""The 64-bit hash from which sample order, dropout masks and data seeds are drawn.

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"; constants of Stafford's variant 13). It is implemented for Python integers, for arrays
of numpy and for int64 tensors: integer arithmetic modulo 2**64 gives the same bits on every device,
platform and version, which a library's random generator does not guarantee.
"""

import enum

import numpy as np
from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


def signed(value: int) -> int:
    """Convert a 64-bit unsigned integer (a random key) to the signed one with the same bits, as
    torch's int64 needs it.
    """
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


# The same for int64 tensors.
SIGNED_GOLDEN = signed(GOLDEN)
SIGNED_MULTIPLIER_1 = signed(MULTIPLIER_1)
SIGNED_MULTIPLIER_2 = signed(MULTIPLIER_2)
# And for numpy, which takes longer with numbers of Python.
NUMPY_GOLDEN, NUMPY_MULTIPLIER_1, NUMPY_MULTIPLIER_2, NUMPY_27, NUMPY_30, NUMPY_31 = map(
    np.uint64, (GOLDEN, MULTIPLIER_1, MULTIPLIER_2, 27, 30, 31)
)


class Purpose(enum.IntEnum):
    """What a random key is used for: the first argument of `fold_in`, so that keys with different
    purposes are independent.
    """

    ORDER = 1  # the order of samples in an epoch
    SAMPLE = 2  # random transforms of one sample
    COLLATE = 3  # random collate functions, one key per window
    DROPOUT = 4  # dropout masks of a sample
    WINDOW = 5  # dropout masks that all samples of a window share
    BUFFER = 6  # which sample leaves a shuffle buffer; opening a stream


def mix(value: int) -> int:
    """Hash a 64-bit integer to another (the finaliser of splitmix64), to draw the order of samples
    and dropout masks. Different integers have different hashes.
    """
    value &= MASK64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK64
    return value ^ (value >> 31)


def mix_in_place(values: Tensor) -> Tensor:
    """Hash every element of an int64 tensor in place with `mix` (the finaliser of splitmix64), and
    return the tensor, for the order of samples and dropout masks.
    """
    values.bitwise_xor_(_shifted_right(values, 30)).mul_(SIGNED_MULTIPLIER_1)
    values.bitwise_xor_(_shifted_right(values, 27)).mul_(SIGNED_MULTIPLIER_2)
    return values.bitwise_xor_(_shifted_right(values, 31))


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Shift int64 values right and fill with zeros, for the hash of sample order and dropout masks;
    torch's own shift copies the sign bit.
    """
    return values.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def mixed(values: Tensor) -> Tensor:
    """Return a tensor with the hash of every element of an int64 tensor, to derive one random key
    per sample: one step of `fold_in`, `mix(value + GOLDEN)`. The argument is unchanged.

    So `mixed(values ^ signed(fold_in(*parts)))` equals `fold_in(*parts, value)` for every value.
    """
    return mix_in_place(values + SIGNED_GOLDEN)


def fold_in(*parts: int) -> int:
    """Hash integers such as (purpose, seed, epoch, sample) to a 64-bit random key, for the order of
    samples, random transforms and dropout. The key depends on the order of the integers.

    >>> fold_in(1, 2) == fold_in(2, 1)
    False
    """
    key = 0
    for part in parts:
        key = mix((key ^ (part & MASK64)) + GOLDEN)
    return key


def fold_in_each(key: int, values: np.ndarray) -> np.ndarray:
    """Return the keys that `fold_in(*parts, value)` gives for each of some integers.

    Args:
        key: `fold_in(*parts)`, or 0 without parts.
        values: Integers of 64 bits.

    Returns:
        uint64, of the shape of `values`.
    """
    hashes = (values.astype(np.uint64) ^ np.uint64(key)) + NUMPY_GOLDEN
    hashes = (hashes ^ (hashes >> NUMPY_30)) * NUMPY_MULTIPLIER_1
    hashes = (hashes ^ (hashes >> NUMPY_27)) * NUMPY_MULTIPLIER_2
    return hashes ^ (hashes >> NUMPY_31)
