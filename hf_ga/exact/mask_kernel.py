"""Keyed dropout as Triton kernels: the bits of `masks.py`, drawn in registers.

Imported on first use on a GPU, because only there Triton is installed. The tests run the same
kernels on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`), and compare them with `masks.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTER_AXES = 4  # of a sample's mask at most, without the last one
BLOCK = 1024  # elements of one program


@triton.jit
def mixed(values):
    """Compute `hashing.mixed` for uint64 values."""
    values += 0x9E3779B97F4A7C15
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


@triton.jit
def is_kept(row_keys, columns, threshold):
    """`masks.keep_columns`: which elements dropout keeps.

    row_keys: uint64. columns: int32, of the last axis; both broadcast. threshold: int32.
    """
    upper = (row_keys >> 32).to(tl.uint32) * 0x846CA68B
    bits = row_keys.to(tl.uint32) ^ ((columns + 1).to(tl.uint32) * 0x846CA68B)
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits = bits * 0x846CA68B + upper
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _padded_row_keys(SEEDS, rows, is_row, rows_per_sample, size_0, size_1, size_2, size_3, AXES):
    """`masks.row_keys`: the hash of a sample's seed with the row's coordinates, axis by axis."""
    seeds = tl.load(SEEDS + rows // rows_per_sample, mask=is_row, other=0)
    keys = mixed(seeds.to(tl.uint64, bitcast=True))
    left = rows % rows_per_sample
    step = rows_per_sample
    if AXES > 0:
        step = step // size_0
        keys = mixed(keys ^ (left // step).to(tl.uint64))
        left = left % step
    if AXES > 1:
        step = step // size_1
        keys = mixed(keys ^ (left // step).to(tl.uint64))
        left = left % step
    if AXES > 2:
        step = step // size_2
        keys = mixed(keys ^ (left // step).to(tl.uint64))
        left = left % step
    if AXES > 3:
        step = step // size_3
        keys = mixed(keys ^ (left // step).to(tl.uint64))
    return keys


@triton.jit
def _packed_row_keys(SEEDS, SAMPLES, POSITIONS, rows, is_row):
    """The row keys of tokens: a sample's first coordinate is always 0, its second the position."""
    samples = tl.load(SAMPLES + rows, mask=is_row, other=0)
    positions = tl.load(POSITIONS + rows, mask=is_row, other=0)
    seeds = tl.load(SEEDS + samples, mask=is_row, other=0)
    keys = mixed(mixed(seeds.to(tl.uint64, bitcast=True)))  # the second one of (key ^ 0)
    return mixed(keys ^ positions.to(tl.uint64))


# Sizes of ragged micro-batches must not compile the kernel again for each of their divisors. The
# number of columns may: a multiple of 16 makes the reads of x wide.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "rows_per_sample",
        "size_0",
        "size_1",
        "size_2",
        "size_3",
        "threshold",
    ]
)
def _draw(
    X,
    OUT,
    SEEDS,
    SAMPLES,
    POSITIONS,
    num_rows,
    num_columns,
    rows_per_sample,
    size_0,
    size_1,
    size_2,
    size_3,
    threshold,
    scale,
    AXES: tl.constexpr,
    IS_PACKED: tl.constexpr,
    WRITES_MASK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of rows and columns: OUT is the mask, or x / (1 - p) where kept and 0 elsewhere."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row = rows < num_rows
    if IS_PACKED:
        keys = _packed_row_keys(SEEDS, SAMPLES, POSITIONS, rows, is_row)
    else:
        keys = _padded_row_keys(
            SEEDS, rows, is_row, rows_per_sample, size_0, size_1, size_2, size_3, AXES
        )
    kept = is_kept(keys[:, None], columns[None, :], threshold)
    exists = is_row[:, None] & (columns < num_columns)[None, :]
    offsets = rows[:, None] * num_columns + columns[None, :]
    if WRITES_MASK:
        tl.store(OUT + offsets, kept, mask=exists)
    else:
        x = tl.load(X + offsets, mask=exists, other=0.0).to(tl.float32)
        dropped = tl.where(kept, x * scale, 0.0)
        tl.store(OUT + offsets, dropped.to(OUT.dtype.element_ty), mask=exists)


def keep_mask(seeds: Tensor, sizes: Sequence[int], threshold: int) -> Tensor:
    """Draw which elements dropout keeps.

    Args:
        seeds: int64, of shape (samples,): keys of the samples, XOR the key of the site.
        sizes: Of the axes of a sample's mask, at least one and at most `OUTER_AXES` + 1.
        threshold: int32 from which a draw is kept.

    Returns:
        bool, of shape (samples, *sizes).
    """
    kept = torch.empty((len(seeds), *sizes), dtype=torch.bool, device=seeds.device)
    _launch(kept, kept, seeds, sizes, None, threshold, 0.0)
    return kept


def dropped(
    x: Tensor,
    seeds: Tensor,
    sizes: Sequence[int],
    tokens: tuple[Tensor, Tensor] | None,
    threshold: int,
    scale: float,
) -> Tensor:
    """Compute x * scale where dropout keeps, 0 elsewhere; no mask is stored, neither for the
    backward.

    Args:
        x: Contiguous, in at most float32: samples x `sizes` elements in any shape, or packed tokens
            of shape (1, tokens, features).
        seeds: int64, of shape (samples,): keys of the samples, XOR the key of the site.
        sizes: Of the axes of a sample; not read for packed tokens.
        tokens: For packed tokens the sample and the position of each, int64 of shape (tokens,).
        threshold: int32 from which a draw is kept.
        scale: 1 / (1 - drop probability).
    """
    return _Dropped.apply(x, seeds, sizes, tokens, threshold, scale)


class _Dropped(torch.autograd.Function):
    """The gradient of a dropped x is the gradient, dropped in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return _launch(x, torch.empty_like(x), *how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_x = _Dropped.apply(gradient.contiguous(), *ctx.how)  # so that it has a gradient itself
        return of_x, None, None, None, None, None


def _launch(
    x: Tensor,
    out: Tensor,
    seeds: Tensor,
    sizes: Sequence[int],
    tokens: tuple[Tensor, Tensor] | None,
    threshold: int,
    scale: float,
) -> Tensor:
    """Fill `out`: bool for the mask, else `x` dropped. Arguments as in `dropped`."""
    num_columns = out.shape[-1] if tokens is not None else sizes[-1]
    if out.numel() == 0:
        return out
    num_rows = out.numel() // num_columns
    block_columns = min(BLOCK, triton.next_power_of_2(num_columns))
    block_rows = BLOCK // block_columns
    axes = () if tokens is not None else tuple(sizes[:-1])
    samples, positions = (seeds, seeds) if tokens is None else tokens
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_columns, block_columns))
    _draw[grid](
        x,
        out,
        seeds,
        samples,
        positions,
        num_rows,
        num_columns,
        num_rows // len(seeds),  # not read for packed tokens
        *axes,
        *[1] * (OUTER_AXES - len(axes)),
        threshold,
        scale,
        AXES=len(axes),
        IS_PACKED=tokens is not None,
        WRITES_MASK=out.dtype == torch.bool,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        enable_fp_fusion=True,  # the default, of which Triton 3.9 warns if it is not given
    )
    return out
