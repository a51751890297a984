"""Counter-based dropout masks: every bit is a pure function of (sample key, dropout site,
coordinate).

There is no generator and so no state: the mask of a sample depends neither on the samples beside
it, nor on the padded width, nor on what ran before. Each axis is hashed by itself (not the flat
index), so padding moves no coordinate. All arithmetic is on integers modulo 2**32 and 2**64, so a
GPU draws the bits of a CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from hf_ga.exact.hashing import Purpose, fold_in, mixed, signed

# Odd 32-bit multipliers with well-spread bits (Wellons 2018, "Prospecting for hash functions", the
# `lowbias32` pair).
MULTIPLIER_32_1 = 0x7FEB352D
MULTIPLIER_32_2 = 0x846CA68B - (1 << 32)  # as a signed integer
MOST_AXES_OF_KERNELS = 5  # of a sample's mask
# A CPU makes 10 passes over a part of a mask; 2**17 and 2**22 were measured to be slower.
ELEMENTS_IN_CACHE = 1 << 19


def sample_keys(seed: int, epoch: int, positions: np.ndarray) -> Tensor:
    """Return the dropout keys of samples.

    Args:
        seed: Of the run.
        epoch: Of the window.
        positions: Of the samples in the order of the epoch, shape (samples,).

    Returns:
        int64, shape (samples,), on the CPU.
    """
    key_of_epoch = signed(fold_in(Purpose.DROPOUT, seed, epoch))
    return mixed(torch.from_numpy(np.array(positions, np.int64)) ^ key_of_epoch)


def window_key(seed: int, epoch: int, window_index: int) -> Tensor:
    """Return the key of masks that a whole window shares: int64, shape (1,), on the CPU."""
    return torch.tensor([signed(fold_in(Purpose.WINDOW, seed, epoch, window_index))], device="cpu")


def keep_mask(
    keys: Tensor, site: int, shape: Sequence[int], axis: int | None, drop_probability: float
) -> Tensor:
    """Draw which elements dropout keeps.

    Args:
        keys: int64, shape (n,): one key a sample, or (1,) for a mask that the window shares.
        site: 64-bit key of the dropout site.
        shape: Shape of the mask.
        axis: The sample axis; `shape[axis]` is a multiple of n: the rows of a sample are
            consecutive, as in attention over n x heads. None: no sample axis.
        drop_probability: p, with 0 <= p < 1, at a resolution of 2**-32.

    Returns:
        bool, of `shape`, on the device of `keys`. Each element is True with probability 1 - p.
    """
    seeds = keys ^ signed(site)
    if axis is None:
        inner = [1, *shape]
    else:
        inner = [shape[axis] // len(keys), *shape[:axis], *shape[axis + 1 :]]
    if has_kernels(keys.device) and len(inner) <= MOST_AXES_OF_KERNELS:
        from hf_ga.exact import mask_kernel

        kept = mask_kernel.keep_mask(seeds, inner, _threshold(drop_probability))
    else:
        kept = keep_columns(row_keys(seeds, inner[:-1]), inner[-1], drop_probability)
    if axis is None:
        return kept.view(tuple(shape))
    return kept.view(shape[axis], *shape[:axis], *shape[axis + 1 :]).movedim(0, axis)


def apply_dropout_mask(x: Tensor, drop_probability: float, kept: Tensor) -> Tensor:
    """Return x / (1 - p) where `kept` is True, and 0 elsewhere.

    The backward needs the mask only, one byte an element.

    Args:
        x: What to drop from.
        drop_probability: p.
        kept: bool, broadcastable to x.
    """
    scale = 1.0 / (1.0 - drop_probability)
    if x.device.type == "cpu":
        # In a quarter of the time: a CPU has no vector code for bool times float.
        return (x * kept.view(torch.uint8)).mul_(scale)
    # x * kept * scale in one pass.
    return torch.ops.aten.native_dropout_backward(x, kept.expand_as(x), scale)


def drop(
    x: Tensor,
    keys: Tensor,
    site: int,
    axis: int | None,
    drop_probability: float,
    tokens: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Apply the mask that `keep_mask` draws, in one kernel that does not store it.

    Args:
        x: What to drop from.
        keys: As in `keep_mask`.
        site: As in `keep_mask`.
        axis: As in `keep_mask`.
        drop_probability: As in `keep_mask`.
        tokens: For packed tokens, x of shape (1, tokens, features), the sample and the position of
            each: int64, of shape (tokens,).

    Returns:
        A tensor like x. None where no kernel does this: not on a GPU, in float64, for another
        sample axis than the first one.
    """
    if not has_kernels(x.device) or x.dtype == torch.float64:
        return None
    if axis not in (0, None) or not 2 <= x.dim() <= MOST_AXES_OF_KERNELS:
        return None
    from hf_ga.exact import mask_kernel

    sizes = [1, *x.shape] if axis is None else [x.shape[0] // len(keys), *x.shape[1:]]
    if len(sizes) > MOST_AXES_OF_KERNELS:
        return None
    threshold = _threshold(drop_probability)
    scale = 1.0 / (1.0 - drop_probability)
    seeds = keys ^ signed(site)
    return mask_kernel.dropped(x.contiguous(), seeds, sizes, tokens, threshold, scale)


def has_kernels(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda" and has_triton()


def row_keys(seeds: Tensor, sizes: Sequence[int]) -> Tensor:
    """Hash all coordinates but the last.

    Axes of size 1 are hashed too: micro-batches padded to width 1 and to width 2 must agree on
    column 0.

    Args:
        seeds: int64.
        sizes: Of the axes.

    Returns:
        int64, shape (*seeds.shape, *sizes).
    """
    return over_axes(mixed(seeds), sizes)


def over_axes(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Hash each row key with all coordinates of further axes.

    Args:
        rows: int64.
        sizes: Of the axes.

    Returns:
        int64, shape (*rows.shape, *sizes).
    """
    for size in sizes:
        rows = mixed(rows.unsqueeze(-1) ^ torch.arange(size, device=rows.device))
    return rows


def keep_columns(rows: Tensor, size: int, drop_probability: float) -> Tensor:
    """Draw which elements of each row dropout keeps.

    Args:
        rows: int64, of any shape, from `row_keys`.
        size: Elements of a row.
        drop_probability: p, with 0 <= p < 1.

    Returns:
        bool, of shape (*rows.shape, size).
    """
    flat = rows.reshape(-1)
    threshold = _threshold(drop_probability)
    part = max(1, len(flat))
    if rows.device.type == "cpu":
        part = max(1, ELEMENTS_IN_CACHE // max(1, size))
    kept = torch.empty((len(flat), size), dtype=torch.uint8, device=rows.device)
    for start in range(0, len(flat), part):
        # Compared in place, on int32: torch has no vector code for comparisons that return bool on
        # a CPU (an eighth of its speed).
        uniform = _uniform_int32(flat[start : start + part], size)
        kept[start : start + part] = uniform.ge_(threshold)
    return kept.view(torch.bool).view(*rows.shape, size)


def _uniform_int32(rows: Tensor, size: int) -> Tensor:
    """Return uniform int32 of shape (*rows.shape, size), from both halves of the row keys."""
    upper = (rows >> 32).to(torch.int32).mul_(MULTIPLIER_32_2)
    columns = torch.arange(1, size + 1, dtype=torch.int32, device=rows.device) * MULTIPLIER_32_2
    bits = rows.to(torch.int32).unsqueeze(-1) ^ columns
    bits.mul_(MULTIPLIER_32_1)
    bits.bitwise_xor_(bits.bitwise_right_shift(15).bitwise_and_(0x1FFFF))  # a logical shift
    # (bits + upper half) x multiplier in one pass; the threshold reads the upper bits, into which
    # the product carries the lower ones.
    return torch.add(upper.unsqueeze(-1), bits, alpha=MULTIPLIER_32_2, out=bits)


def _threshold(drop_probability: float) -> int:
    """Return the least uniform int32 that is kept."""
    return max(-(1 << 31), min((1 << 31) - 1, round(drop_probability * 2**32) - (1 << 31)))
