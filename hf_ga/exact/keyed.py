"""Counter-based random bits: a dropout mask as a pure function of (sample key, place, coordinate).

No generator, so no state: the bits of a sample do not depend on which samples stand beside it, on how wide the batch is padded
or on what ran before. Each axis is hashed by itself (not the flat index), so padding moves no coordinate.
Only integer arithmetic modulo 2**32 and 2**64 is used, so that a GPU draws the bits of a CPU. There the row keys, which are few,
are numpy's: a call of torch costs some times as much, and asks for Python's lock once more, for which the other lane waits.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from hf_ga.exact.hashing import GOLDEN, GOLDEN_64, MULTIPLIER_1, MULTIPLIER_2, Stream, extend_key, make_key, mix_in_place

# Odd 32-bit multipliers with well-spread bits (Wellons 2018, "Prospecting for hash functions", the `lowbias32` pair).
MULTIPLIER_32_1 = 0x7FEB352D
MULTIPLIER_32_2 = 0x846CA68B - (1 << 32)  # as a signed integer
UNSIGNED_32_2 = np.uint32(MULTIPLIER_32_2 & 0xFFFFFFFF)
CACHED_ELEMENTS = 1 << 19  # of the 10 passes over a mask; measured: 2**17 and 2**22 are slower
# Masks that torch would draw on one thread: the calls of numpy cost a quarter as much, and 30,000 elements take half the time.
SMALL_ELEMENTS = 1 << 15

Keys = np.ndarray | Tensor  # 64-bit keys: on a CPU uint64 in numpy, elsewhere int64


def sample_keys(seed: int, epoch: int, positions: np.ndarray) -> Tensor:
    """The dropout keys of samples by their positions in the order. Returns int64, shape (number of samples,), on the CPU."""
    return torch.from_numpy(extend_key(make_key(Stream.DROPOUT, seed, epoch), positions).view(np.int64))


def window_key(seed: int, epoch: int, window_index: int) -> Tensor:
    """The key of draws that belong to a whole window. Returns int64, shape (1,), on the CPU."""
    return torch.from_numpy(extend_key(make_key(Stream.WINDOW, seed, epoch), np.array([window_index])).view(np.int64))


def keep_mask(keys: Tensor, place: int, shape: Sequence[int], axis: int | None, drop_probability: float) -> Tensor:
    """Which elements dropout keeps.

    Args:
        keys: int64, shape (n,): one key per sample, or (1,) for a draw that belongs to the window.
        place: 64-bit key of the place.
        shape: shape of the mask.
        axis: the sample axis; `shape[axis]` is n times a whole number m (n samples with m rows each, the sample index
            outermost, as in attention over n x heads). None: no sample axis.
        drop_probability: p, at least 0 and less than 1, kept to a resolution of 2**-32.

    Returns:
        bool tensor of `shape` on the device of `keys`; an element is True with probability 1 - p.
    """
    return keep_masks(keys, [place], shape, axis, drop_probability)[0]


def keep_masks(keys: Tensor, places: Sequence[int], shape: Sequence[int], axis: int | None, drop_probability: float) -> Tensor:
    """The masks of `keep_mask` for several places, drawn at once: bool, shape (places, *shape)."""
    seeds = seeds_of(keys, places).reshape(-1)
    inner = [1, *shape] if axis is None else [shape[axis] // len(keys), *shape[:axis], *shape[axis + 1 :]]
    if keys.device.type == "cuda" and has_triton():
        kept = _fused_mask()(seeds, inner, _threshold(drop_probability))
    else:
        kept = kept_columns(_row_keys(seeds, inner[:-1]), inner[-1], drop_probability)
    if axis is None:
        return kept.view(len(places), *shape)
    return kept.view(len(places), shape[axis], *shape[:axis], *shape[axis + 1 :]).movedim(1, axis + 1)


def seeds_of(keys: Tensor, places: Sequence[int]) -> Keys:
    """Shape (places, keys): where the bits of a key and a place begin."""
    if keys.device.type == "cpu":
        return keys.numpy().view(np.uint64) ^ np.array(places, dtype=np.uint64)[:, None]
    return _seeds_on_device(keys, places)


def _seeds_on_device(keys: Tensor, places: Sequence[int]) -> Tensor:
    return torch.stack([keys ^ _signed(place) for place in places])


def whole_mask(seeds: Tensor, sizes: Sequence[int], threshold: int) -> Tensor:
    """The mask of `keep_mask` as one expression: what is compiled for a GPU. `seeds` int64 (n,); returns bool (n, *sizes)."""
    return _uniform_int32(_row_keys(seeds, sizes[:-1]), sizes[-1]) >= threshold


@functools.cache
def _fused_mask() -> Callable[[Tensor, Sequence[int], int], Tensor]:
    """One kernel for all sizes instead of some 40, each of which would read and write the whole mask."""
    return torch.compile(whole_mask, dynamic=True)


def kept_columns(rows: Keys, size: int, drop_probability: float) -> Tensor:
    """Which elements of each row dropout keeps.

    Args:
        rows: any shape: the hash of all coordinates but the last. size: of the last axis.

    Returns:
        bool tensor of shape (*rows.shape, size).
    """
    flat, threshold = rows.reshape(-1), _threshold(drop_probability)
    on_cpu = isinstance(rows, np.ndarray)
    if on_cpu and rows.size * size <= SMALL_ELEMENTS:
        return torch.from_numpy(_uniform_uint32(flat, size).view(np.int32) >= threshold).view(*rows.shape, size)
    # Parts that stay in a processor's cache; a GPU takes all at once.
    part = max(1, CACHED_ELEMENTS // max(1, size)) if on_cpu else max(1, len(flat))
    kept = torch.empty((len(flat), size), dtype=torch.uint8, device="cpu" if on_cpu else rows.device)
    for start in range(0, len(flat), part):
        # The comparison in place, on int32: torch has no vector code for one that returns bool on a CPU (an eighth of its speed).
        kept[start : start + part] = _uniform_int32(flat[start : start + part], size).ge_(threshold)
    return kept.view(torch.bool).view(*rows.shape, size)


def keyed_dropout(x: Tensor, drop_probability: float, kept: Tensor) -> Tensor:
    """x / (1 - p) where `kept` (bool, broadcastable to x), 0 elsewhere. Only the mask, a byte an element, is saved for backward."""
    scale = 1.0 / (1.0 - drop_probability)
    if x.device.type == "cpu":  # the same products, in a quarter of the time: a CPU has no vector code for bool times float
        return (x * kept.view(torch.uint8)).mul_(scale)
    # The fused x * mask * scale of torch's own dropout; it is differentiable in x.
    return torch.ops.aten.native_dropout_backward(x, kept.expand_as(x), scale)


def _row_keys(seeds: Keys, sizes: Sequence[int]) -> Keys:
    """The hash of all coordinates but the last: shape (*seeds.shape, *sizes).

    Axes of size 1 are hashed too: a micro-batch padded to width 1 and one padded to width 2 must agree on column 0.
    """
    rows = mixed(seeds)
    for size in sizes:
        rows = mixed(along_next_axis(rows, size))
    return rows


def along_next_axis(rows: Keys, size: int) -> Keys:
    """Each row key with each coordinate of the next axis: shape (*rows.shape, size), to be mixed."""
    if isinstance(rows, np.ndarray):
        return rows[..., None] ^ np.arange(size, dtype=np.uint64)
    return rows.unsqueeze(-1) ^ torch.arange(size, device=rows.device)


def mixed(values: Keys) -> Keys:
    """`hashing.mix(value + GOLDEN)` for every element."""
    if isinstance(values, np.ndarray):
        return mix_in_place(values + GOLDEN_64)
    values = values + _signed(GOLDEN)
    for bits, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        values.bitwise_xor_(values.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)).mul_(_signed(multiplier))
    return values.bitwise_xor_(values.bitwise_right_shift(31).bitwise_and_((1 << 33) - 1))


def _uniform_int32(rows: Keys, size: int) -> Tensor:
    """Uniform int32 of shape (*rows.shape, size) from 64-bit row keys: both halves of the row key enter the hash."""
    lower, upper, columns = _halves_and_columns(rows, size)
    bits = lower.unsqueeze(-1) ^ columns
    bits.mul_(MULTIPLIER_32_1)
    bits.bitwise_xor_(bits.bitwise_right_shift(15).bitwise_and_(0x1FFFF))  # a logical shift
    # (bits + upper half) x multiplier in one pass. The comparison with the threshold reads the upper bits, into which this product
    # carries the lower ones.
    return torch.add(upper.unsqueeze(-1), bits, alpha=MULTIPLIER_32_2, out=bits)


def _halves_and_columns(rows: Keys, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the row keys the lower halves and the upper ones times the second multiplier, and what tells columns apart; int32."""
    if isinstance(rows, np.ndarray):
        upper, columns = (rows >> np.uint64(32)).astype(np.uint32), np.arange(1, size + 1, dtype=np.uint32)
        halves = (rows.astype(np.uint32), upper * UNSIGNED_32_2, columns * UNSIGNED_32_2)
        return tuple(torch.from_numpy(values.view(np.int32)) for values in halves)
    columns = torch.arange(1, size + 1, dtype=torch.int32, device=rows.device) * MULTIPLIER_32_2
    return rows.to(torch.int32), (rows >> 32).to(torch.int32).mul_(MULTIPLIER_32_2), columns


def _uniform_uint32(rows: np.ndarray, size: int) -> np.ndarray:
    """The bits of `_uniform_int32` from row keys as uint64 (rows,). Returns uint32 (rows, size)."""
    columns = np.arange(1, size + 1, dtype=np.uint32) * UNSIGNED_32_2
    bits = rows.astype(np.uint32)[:, None] ^ columns
    bits *= np.uint32(MULTIPLIER_32_1)
    bits ^= bits >> np.uint32(15)
    bits += (rows >> np.uint64(32)).astype(np.uint32)[:, None]
    bits *= UNSIGNED_32_2
    return bits


def _threshold(drop_probability: float) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, round(drop_probability * 2**32) - (1 << 31)))


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
