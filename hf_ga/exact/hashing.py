"""The one 64-bit hash that order, dropout and data seeds are drawn from.

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"; constants of Stafford's variant 13). It is written out for Python integers and for
int64 tensors: integer arithmetic modulo 2**64 gives the same bits on every device, platform and
version, which a library's random generator does not promise.
"""

import enum
import hashlib

from torch import Tensor

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB


class Purpose(enum.IntEnum):
    """What random numbers are for. Keys of different purposes are never the same."""

    ORDER = 1
    SAMPLE = 2  # random transforms of one sample
    COLLATE = 3  # random collators, one key a window
    DROPOUT = 4  # draws that belong to a sample
    WINDOW = 5  # draws that belong to the whole window
    BUFFER = 6  # which sample leaves a shuffle buffer; opening a stream


def mix(value: int) -> int:
    """Scramble the bits of a 64-bit integer. Different integers stay different."""
    value &= MASK64
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & MASK64
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & MASK64
    return value ^ (value >> 31)


def mix_in_place(values: Tensor) -> Tensor:
    """Apply `mix` to every element of an int64 tensor, in place, and return the tensor."""
    values.bitwise_xor_(_shifted_right(values, 30)).mul_(signed(MULTIPLIER_1))
    values.bitwise_xor_(_shifted_right(values, 27)).mul_(signed(MULTIPLIER_2))
    return values.bitwise_xor_(_shifted_right(values, 31))


def _shifted_right(values: Tensor, bits: int) -> Tensor:
    """Shift logically: zeros come in from the left, where torch copies the sign."""
    return values.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def mixed(values: Tensor) -> Tensor:
    """Return `mix(value + GOLDEN)` for every element of an int64 tensor.

    So `mixed(values ^ signed(fold_in(*parts)))` is `fold_in(*parts, value)` for every value.
    """
    return mix_in_place(values + signed(GOLDEN))


def signed(value: int) -> int:
    """Return the int64 with the bits of a 64-bit unsigned integer."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def fold_in(*parts: int) -> int:
    """Make a 64-bit key of any number of integers, whose order counts.

    >>> fold_in(1, 2) == fold_in(2, 1)
    False
    """
    key = 0
    for part in parts:
        key = mix((key ^ (part & MASK64)) + GOLDEN)
    return key


def name_key(name: str) -> int:
    """Make a 64-bit key of a text (BLAKE2b), the same in every process, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
