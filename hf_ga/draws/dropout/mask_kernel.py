"""Keyed dropout as Triton kernels: the same bits as `masks.py`, drawn in registers.

Imported on first use on a GPU, as Triton may be missing elsewhere. The tests run the same kernels
on a CPU in Triton's interpreter (`TRITON_INTERPRET=1`), and compare them with `masks.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_OUTER_DIMS = 4  # maximum number of dims of one sample's mask, without the last
BLOCK = 1024  # elements of the mask that one program draws


@triton.jit
def mixed(values):
    """Hash uint64 values in the Triton kernel of keyed dropout (masks are hashes of the random keys
    of samples), as `hashing.mixed` does: one step of `hashing.fold_in`.
    """
    values += 0x9E3779B97F4A7C15
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


@triton.jit
def is_kept(row_keys, columns, threshold):
    """Draw elements of a keyed dropout mask in a Triton kernel by hashing each row's random key
    with the column index, with the same bits as `masks.keep_columns`: True where dropout keeps.

    Args:
        row_keys: The random keys of the rows: uint64, broadcastable with `columns`.
        columns: The column indices: int32, broadcastable with `row_keys`.
        threshold: int32, from `masks.keep_threshold`.
    """
    upper = (row_keys >> 32).to(tl.uint32) * 0x846CA68B
    bits = row_keys.to(tl.uint32) ^ ((columns + 1).to(tl.uint32) * 0x846CA68B)
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits = bits * 0x846CA68B + upper
    return bits.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def _padded_row_keys(
    SEEDS, rows, is_row, rows_per_sample, size_0, size_1, size_2, size_3, NUM_OUTER_DIMS
):
    """Compute the random keys of rows of a padded micro-batch's keyed dropout mask in a Triton
    kernel, as `masks.row_keys`: the hash of a sample's seed with the row's coordinates, one dim
    after the other.

    Args:
        SEEDS: Pointer to the samples' seeds, int64.
        rows: Indices of the rows in the flattened mask.
        is_row: False for indices beyond the last row.
        rows_per_sample: size_0 * size_1 * size_2 * size_3.
        size_0: size_0 to size_3 are the sizes of a sample's mask without the last dim, filled up
            with 1.
        NUM_OUTER_DIMS: How many of these sizes are real dims.
    """
    seeds = tl.load(SEEDS + rows // rows_per_sample, mask=is_row, other=0)
    keys = mixed(seeds.to(tl.uint64, bitcast=True))
    # Split the row's index within its sample into its coordinates.
    remainder = rows % rows_per_sample
    stride = rows_per_sample
    if NUM_OUTER_DIMS > 0:
        stride = stride // size_0
        keys = mixed(keys ^ (remainder // stride).to(tl.uint64))
        remainder = remainder % stride
    if NUM_OUTER_DIMS > 1:
        stride = stride // size_1
        keys = mixed(keys ^ (remainder // stride).to(tl.uint64))
        remainder = remainder % stride
    if NUM_OUTER_DIMS > 2:
        stride = stride // size_2
        keys = mixed(keys ^ (remainder // stride).to(tl.uint64))
        remainder = remainder % stride
    if NUM_OUTER_DIMS > 3:
        stride = stride // size_3
        keys = mixed(keys ^ (remainder // stride).to(tl.uint64))
    return keys


@triton.jit
def _packed_row_keys(SEEDS, SAMPLES, POSITIONS, rows, is_row):
    """Compute the random keys of packed tokens' rows of a keyed dropout mask in a Triton kernel,
    equal to those that the tokens have in a padded micro-batch. There, the coordinates are 0 (one
    row per sample) and the position.

    Args:
        SEEDS: Pointer to the samples' seeds, int64.
        SAMPLES: Pointer to the index of each token's sample, int64.
        POSITIONS: Pointer to the position of each token in its sample, int64.
        rows: Indices of the packed tokens.
        is_row: False for indices beyond the last token.
    """
    samples = tl.load(SAMPLES + rows, mask=is_row, other=0)
    positions = tl.load(POSITIONS + rows, mask=is_row, other=0)
    seeds = tl.load(SEEDS + samples, mask=is_row, other=0)
    # The outer hash is that of the coordinate 0: key ^ 0 is the key.
    keys = mixed(mixed(seeds.to(tl.uint64, bitcast=True)))
    return mixed(keys ^ positions.to(tl.uint64))


# Triton compiles a kernel again for sizes that are 1 or multiples of 16. Sizes that change from
# micro-batch to micro-batch must not cause that. The number of columns may: a multiple of 16 makes
# the loads of x wide.
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
def _dropout_kernel(
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
    NUM_OUTER_DIMS: tl.constexpr,
    IS_PACKED: tl.constexpr,
    WRITES_MASK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Triton kernel of keyed dropout: draw one block of rows and columns of a mask from the random
    keys of the samples. Store the mask, or apply it to X: x scaled by 1 / (1 - p) where it keeps, 0
    elsewhere.

    Args:
        X: Pointer to the input of dropout; not read if WRITES_MASK.
        OUT: Pointer to the output.
        SEEDS: Pointer to the keys of the samples XOR the key of the dropout site, int64.
        SAMPLES: Pointer to the index of each packed token's sample; read only if IS_PACKED.
        POSITIONS: Pointer to each packed token's position; read only if IS_PACKED.
        num_rows: Rows of the flattened mask.
        num_columns: Size of the last dim.
        rows_per_sample: Rows per sample of a padded micro-batch.
        size_0: size_0 to size_3 are the sizes of a sample's mask without the last dim.
        threshold: From `masks.keep_threshold`.
        scale: 1 / (1 - p).
        NUM_OUTER_DIMS: How many of size_0 to size_3 are real dims.
        IS_PACKED: The rows are packed tokens.
        WRITES_MASK: OUT is the mask, bool.
        BLOCK_ROWS: Rows per program.
        BLOCK_COLUMNS: Columns per program.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row = rows < num_rows
    if IS_PACKED:
        keys = _packed_row_keys(SEEDS, SAMPLES, POSITIONS, rows, is_row)
    else:
        keys = _padded_row_keys(
            SEEDS, rows, is_row, rows_per_sample, size_0, size_1, size_2, size_3, NUM_OUTER_DIMS
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
    """Draw a keyed dropout mask with the Triton kernel, equal to that of `masks.keep_mask`: True
    where dropout keeps an element.

    Args:
        seeds: Random keys of the samples, XOR the key of the dropout site: int64, shape (samples,).
        sizes: Shape of one sample's mask: at least 1 and at most `MAX_OUTER_DIMS` + 1 dims.
        threshold: From `masks.keep_threshold`.

    Returns:
        bool, shape (samples, *sizes).
    """
    kept = torch.empty((len(seeds), *sizes), dtype=torch.bool, device=seeds.device)
    tokens = None  # not packed
    _launch(kept, kept, seeds, sizes, tokens, threshold, 0.0)  # x and scale are not read
    return kept


def dropped(
    x: Tensor,
    seeds: Tensor,
    sizes: Sequence[int],
    tokens: tuple[Tensor, Tensor] | None,
    threshold: int,
    scale: float,
) -> Tensor:
    """Apply keyed dropout with the Triton kernel, which draws the mask from the random keys of the
    samples: x * scale where the mask keeps, 0 elsewhere.

    No mask is stored, neither here nor for the backward, which draws it again.

    Args:
        x: The input of dropout: contiguous, float16, bfloat16 or float32, with the elements of
            (samples, *sizes) in any shape; or packed tokens, shape (1, tokens, features).
        seeds: Keys of the samples, XOR the key of the dropout site: int64, shape (samples,).
        sizes: Shape of one sample's mask; not read for packed tokens.
        tokens: For packed tokens, the index of each token's sample and the token's position in its
            sample; both int64, shape (tokens,).
        threshold: From `masks.keep_threshold`.
        scale: 1 / (1 - drop probability).
    """
    return _Dropped.apply(x, seeds, sizes, tokens, threshold, scale)


class _Dropped(torch.autograd.Function):
    """Dropout whose backward draws the same mask again and applies it to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        """Apply keyed dropout to x, and save the settings for the backward.

        Args:
            ctx: The autograd context.
            x: The input of dropout.
            *settings: The other arguments of `dropped`: seeds, sizes, tokens, threshold, scale.
        """
        ctx.settings = settings
        return _launch(x, torch.empty_like(x), *settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Backward of keyed dropout: draw the same mask from the random keys of the samples again,
        and apply it to the gradient of the output.

        It calls this autograd function again, so that second derivatives work. The other arguments
        of `dropped` have no gradient.
        """
        x_gradient = _Dropped.apply(gradient.contiguous(), *ctx.settings)
        return x_gradient, None, None, None, None, None


def _launch(
    x: Tensor,
    out: Tensor,
    seeds: Tensor,
    sizes: Sequence[int],
    tokens: tuple[Tensor, Tensor] | None,
    threshold: int,
    scale: float,
) -> Tensor:
    """Launch the Triton kernel that draws a dropout mask from the random keys of samples (keyed
    dropout), or applies it, and return `out`.

    Args:
        x: The input of dropout; not read if `out` is bool.
        out: Filled in place: with the mask if it is bool, otherwise with x after dropout.
        seeds: This and the other arguments are those of `dropped`.
    """
    if out.numel() == 0:
        return out
    if tokens is not None:
        num_columns = out.shape[-1]
        outer_sizes = ()
        samples, positions = tokens
    else:
        num_columns = sizes[-1]
        outer_sizes = tuple(sizes[:-1])
        samples, positions = seeds, seeds  # not read
    num_rows = out.numel() // num_columns
    block_columns = min(BLOCK, triton.next_power_of_2(num_columns))
    block_rows = BLOCK // block_columns
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_columns, block_columns))
    _dropout_kernel[grid](
        x,
        out,
        seeds,
        samples,
        positions,
        num_rows,
        num_columns,
        num_rows // len(seeds),  # not read for packed tokens
        *outer_sizes,
        *[1] * (MAX_OUTER_DIMS - len(outer_sizes)),
        threshold,
        scale,
        NUM_OUTER_DIMS=len(outer_sizes),
        IS_PACKED=tokens is not None,
        WRITES_MASK=out.dtype == torch.bool,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        enable_fp_fusion=True,  # the default; Triton 3.9 warns if it is not passed
    )
    return out
