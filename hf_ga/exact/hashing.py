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


def mix_in_place(values: Tensor) -> Tensor:
    """`mix` for every element of an int64 tensor, which is changed and returned."""
    for bits, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        values.bitwise_xor_(
            values.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)
        ).mul_(signed(multiplier))
    return values.bitwise_xor_(values.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def mixed(values: Tensor) -> Tensor:
    """`mix(value + GOLDEN)` for every element of an int64 tensor. So `mixed(values ^
    signed(make_key(*parts)))` is `make_key(*parts, v)` for every v.
    """
    return mix_in_place(values + signed(GOLDEN))


def signed(value: int) -> int:
    """The int64 with the bits of a 64-bit unsigned integer."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def make_key(*parts: int) -> int:
    """A 64-bit key from any number of integers; the order of the parts counts.

    >>> make_key(1, 2) == make_key(2, 1)
    False
    """
    key = 0
    for part in parts:
        key = mix((key ^ (part & MASK64)) + GOLDEN)
    return key


def name_key(name: str) -> int:
    """A 64-bit key of a text (BLAKE2b), the same in every process, unlike Python's own `hash`."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
