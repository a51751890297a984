"""Counter-based dropout masks: every bit is a pure function of (sample key, dropout site,
coordinate).

There is no generator and so no state: the mask of a sample depends neither on the other samples of
the micro-batch, nor on the padded length, nor on what ran before. The coordinate in each dim is
hashed separately (not the flat index), so padding does not change the coordinates of real tokens.
All arithmetic is on integers modulo 2**32 and 2**64, so a GPU draws the same bits as a CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from hf_ga.draws.hashing import Purpose, fold_in, fold_in_each, mixed, signed

# Odd 32-bit multipliers with well-spread bits (Wellons 2018, "Prospecting for hash functions", the
# `lowbias32` pair).
MULTIPLIER_32_1 = 0x7FEB352D
MULTIPLIER_32_2 = 0x846CA68B - (1 << 32)  # as a signed integer
MAX_DIMS_OF_KERNELS = 5  # dims of one sample's mask that the Triton kernels support
# Elements of a mask that are drawn at a time on a CPU, which makes 10 passes over them; 2**17 and
# 2**22 were measured to be slower.
ELEMENTS_IN_CACHE = 1 << 19


def sample_keys(seed: int, epoch: int, positions: np.ndarray) -> Tensor:
    """Return the random keys from which the dropout masks of samples are drawn.

    Args:
        seed: Seed of the training run.
        epoch: Epoch of the window.
        positions: Positions of the samples in the order of the epoch: integers, shape (samples,).

    Returns:
        int64, shape (samples,), on the CPU.
    """
    keys = fold_in_each(fold_in(Purpose.DROPOUT, seed, epoch), np.asarray(positions))
    return torch.from_numpy(keys.view(np.int64))


def window_key(seed: int, epoch: int, window_index: int) -> Tensor:
    """Return the random key of dropout masks that all samples of a window share.

    Args:
        seed: Seed of the training run.
        epoch: Epoch of the window.
        window_index: Index of the window in the epoch.

    Returns:
        int64, shape (1,), on the CPU.
    """
    return torch.tensor([signed(fold_in(Purpose.WINDOW, seed, epoch, window_index))], device="cpu")


def keep_mask(
    keys: Tensor, site: int, shape: Sequence[int], sample_dim: int | None, drop_probability: float
) -> Tensor:
    """Draw a dropout mask from the random keys of samples: True where dropout keeps an element.

    Args:
        keys: One random key per sample: int64, shape (samples,); or the key of the window, shape
            (1,), if all samples share the mask.
        site: 64-bit key of the dropout site.
        shape: Shape of the mask.
        sample_dim: The dim of the mask that holds the samples. Its size is a multiple of their
            number; the rows of one sample are consecutive, as in attention over samples x heads.
            None: all samples share the mask.
        drop_probability: p, with 0 <= p < 1, at a resolution of 2**-32.

    Returns:
        bool, of the given shape, on the device of `keys`. Each element is True with probability
        1 - p.
    """
    seeds = keys ^ signed(site)
    if sample_dim is None:
        sizes = [1, *shape]
    else:
        rows_per_sample = shape[sample_dim] // len(keys)
        sizes = [rows_per_sample, *shape[:sample_dim], *shape[sample_dim + 1 :]]
    if has_kernels(keys.device) and len(sizes) <= MAX_DIMS_OF_KERNELS:
        from hf_ga.draws.dropout import mask_kernel

        kept = mask_kernel.keep_mask(seeds, sizes, keep_threshold(drop_probability))
    else:
        kept = keep_columns(row_keys(seeds, sizes[:-1]), sizes[-1], drop_probability)
    if sample_dim is None:
        return kept.view(tuple(shape))
    samples_first = kept.view(shape[sample_dim], *shape[:sample_dim], *shape[sample_dim + 1 :])
    return samples_first.movedim(0, sample_dim)


def apply_dropout_mask(x: Tensor, drop_probability: float, kept: Tensor) -> Tensor:
    """Apply dropout with a given mask, which keyed dropout has drawn from the random keys of the
    samples: x / (1 - p) where the mask is True, and 0 elsewhere.

    Only the mask is saved for the backward, one byte per element.

    Args:
        x: The input of dropout.
        drop_probability: Dropout probability p.
        kept: The mask, True where dropout keeps: bool, broadcastable to x.

    Returns:
        A tensor like x.
    """
    scale = 1.0 / (1.0 - drop_probability)
    if x.device.type == "cpu":
        # Four times faster than with bool: a CPU has no vector instructions for bool times float.
        return (x * kept.view(torch.uint8)).mul_(scale)
    # Computes x * kept * scale in one pass.
    return torch.ops.aten.native_dropout_backward(x, kept.expand_as(x), scale)


def drop(
    x: Tensor,
    keys: Tensor,
    site: int,
    sample_dim: int | None,
    drop_probability: float,
    tokens: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Apply keyed dropout to a tensor with a Triton kernel that draws the mask of `keep_mask` from
    the random keys of the samples without storing it.

    Args:
        x: The input of dropout.
        keys: As in `keep_mask`.
        site: As in `keep_mask`.
        sample_dim: As in `keep_mask`.
        drop_probability: As in `keep_mask`.
        tokens: For packed tokens, x of shape (1, tokens, features): the index of each token's
            sample, and the token's position in its sample; both int64, shape (tokens,).

    Returns:
        x / (1 - p) where the mask keeps, 0 elsewhere. None where there is no kernel: not on a GPU,
        for float64, for another sample dim than the first, or for fewer than 2 or too many dims.
    """
    if not has_kernels(x.device) or x.dtype == torch.float64:
        return None
    if sample_dim not in (0, None) or not 2 <= x.dim() <= MAX_DIMS_OF_KERNELS:
        return None
    from hf_ga.draws.dropout import mask_kernel

    sizes = [1, *x.shape] if sample_dim is None else [x.shape[0] // len(keys), *x.shape[1:]]
    if len(sizes) > MAX_DIMS_OF_KERNELS:
        return None
    threshold = keep_threshold(drop_probability)
    scale = 1.0 / (1.0 - drop_probability)
    seeds = keys ^ signed(site)
    return mask_kernel.dropped(
        x.contiguous(), seeds, sizes, tokens=tokens, threshold=threshold, scale=scale
    )


def has_kernels(device: torch.device) -> bool:
    """Whether a device runs the Triton kernels that draw keyed dropout masks: a CUDA GPU, with
    Triton installed.
    """
    return device.type == "cuda" and has_triton()


def row_keys(seeds: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a random key for every row of the dropout masks of samples: the hash of a sample's
    seed with all coordinates except the last.

    Dims of size 1 are hashed too, because micro-batches padded to length 1 and to length 2 must
    agree on column 0.

    Args:
        seeds: Keys of the samples, XOR the key of the dropout site: int64.
        sizes: Sizes of the dims of one sample's mask, without the last.

    Returns:
        int64, shape (*seeds.shape, *sizes).
    """
    return fold_in_coordinates(mixed(seeds), sizes)


def fold_in_coordinates(keys: Tensor, sizes: Sequence[int]) -> Tensor:
    """Hash each random key of keyed dropout with all coordinates of further dims of the mask, so
    that every element of these dims gets a key of its own.

    Args:
        keys: int64.
        sizes: Sizes of the further dims.

    Returns:
        int64, shape (*keys.shape, *sizes).
    """
    for size in sizes:
        keys = mixed(keys.unsqueeze(-1) ^ torch.arange(size, device=keys.device))
    return keys


def keep_columns(rows: Tensor, size: int, drop_probability: float) -> Tensor:
    """Draw the rows of a keyed dropout mask by hashing each row's random key with the column
    indices: True where dropout keeps an element.

    Args:
        rows: The random keys of the rows from `row_keys`: int64, any shape.
        size: Elements per row.
        drop_probability: p, with 0 <= p < 1.

    Returns:
        bool, shape (*rows.shape, size).
    """
    flat_rows = rows.reshape(-1)
    threshold = keep_threshold(drop_probability)
    rows_at_a_time = max(1, len(flat_rows))
    if rows.device.type == "cpu":
        rows_at_a_time = max(1, ELEMENTS_IN_CACHE // max(1, size))
    kept = torch.empty((len(flat_rows), size), dtype=torch.uint8, device=rows.device)
    for start in range(0, len(flat_rows), rows_at_a_time):
        # Compared in place, as int32: torch has no vector code for comparisons that return bool on
        # a CPU, so that they are eight times slower.
        uniform = uniform_int32(flat_rows[start : start + rows_at_a_time], size)
        kept[start : start + rows_at_a_time] = uniform.ge_(threshold)
    return kept.view(torch.bool).view(*rows.shape, size)


def uniform_int32(rows: Tensor, size: int) -> Tensor:
    """Draw uniformly distributed int32 numbers for a keyed dropout mask by hashing each row's key
    with the column index.

    Args:
        rows: The random keys of the rows: int64, shape (rows,). Both of their 32-bit halves are
            used.
        size: Number of columns of each row.

    Returns:
        int32, shape (rows, size).
    """
    upper = (rows >> 32).to(torch.int32).mul_(MULTIPLIER_32_2)
    columns = torch.arange(1, size + 1, dtype=torch.int32, device=rows.device) * MULTIPLIER_32_2
    bits = rows.to(torch.int32).unsqueeze(-1) ^ columns
    bits.mul_(MULTIPLIER_32_1)
    bits.bitwise_xor_(bits.bitwise_right_shift(15).bitwise_and_(0x1FFFF))  # a logical shift
    # (bits + upper half) x multiplier in one pass; the threshold reads the upper bits, into which
    # the product carries the lower ones.
    return torch.add(upper.unsqueeze(-1), bits, alpha=MULTIPLIER_32_2, out=bits)


def keep_threshold(drop_probability: float) -> int:
    """Return the threshold with which keyed dropout draws a mask: it keeps an element if the
    uniformly distributed int32 of this element is at least the threshold, which has probability
    1 - p.
    """
    return max(-(1 << 31), min((1 << 31) - 1, round(drop_probability * 2**32) - (1 << 31)))
