"""Attention of packed samples of different lengths, with keyed dropout, as Triton kernels.

FlashAttention-2 (Dao 2023) over the concatenated tokens of several samples. Dropout masks are those
of `masks.keep_mask`, bit for bit, drawn in registers: nothing of size length x length is stored.
The backward uses no atomics, so the same inputs give the same gradients.

Imported on first use, because Triton is only on machines with a GPU. A CPU runs the same kernels in
Triton's interpreter (`TRITON_INTERPRET=1`), which is how the tests compare them with plain PyTorch.

The kernels share these names. A program computes a block of ROWS queries or of COLUMNS keys of one
head of one sample. `rows` and `columns` count within the sample. Scores are in base 2: the natural
score times log2(e), so that exp2 of them is the weight. LSE is log2 of the sum of a row's weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_ga.exact.mask_kernel import is_kept, mixed
from hf_ga.exact.masks import keep_threshold

LARGEST_SIZE = 256  # of a head
SMALLEST_BLOCK = 16  # tl.dot multiplies no smaller matrices
LOG2_E = math.log2(math.e)
# Interpreted bfloat16 products would multiply the bits as integers.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The maximum of a row without a visible key yet: finite, because inf - inf is NaN.
NO_MAXIMUM = tl.constexpr(-1.0e30)
# Arguments that change from call to call: no kernel is compiled for special values of them.
UNSPECIALIZED = ["num_tokens", "threshold", "window"]


@triton.jit
def product(a, b):
    """Compute the matrix product a @ b, accumulated in float32, never rounded to TF32."""
    if IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def tanh(x):
    """Compute the hyperbolic tangent, accurate also near 0, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near_zero = x + x * square * series
    magnitude = tl.minimum(tl.abs(x), 10.0)  # where tanh is 1 in float32
    elsewhere = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    elsewhere = tl.where(x < 0, -elsewhere, elsewhere)
    return tl.where(square < 0.0625, near_zero, elsewhere)


@triton.jit
def base_2_scores(products, inner_scale, outer_scale, HAS_SOFTCAP: tl.constexpr):
    """Compute scores from the products of queries and keys, for exp2.

    Without soft cap, inner_scale is scale * log2(e). With a cap, the scores are capped as
    cap * tanh(products * scale / cap): inner_scale is scale / cap, outer_scale cap * log2(e).
    """
    scores = products * inner_scale
    if HAS_SOFTCAP:
        scores = outer_scale * tanh(scores)
    return scores


@triton.jit
def is_visible(rows, columns, length, window, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Which keys a query attends to. `rows` and `columns` are broadcast against each other.

    Rows beyond the length do no harm: they are not stored, and gradients of zeros add nothing.
    """
    last = length - 1
    if IS_CAUSAL:
        last = tl.minimum(rows, last)
    visible = columns <= last
    if HAS_WINDOW:
        visible = visible & (columns > rows - window)
    return visible


@triton.jit
def head_key(SEEDS, sample, head):
    """Return the dropout key of one head of a sample: uint64."""
    seed = tl.load(SEEDS + sample).to(tl.uint64, bitcast=True)
    key = mixed(mixed(seed))  # the sample, then its single row: index 0
    return mixed(key ^ head.to(tl.uint64))


@triton.jit
def load_tokens(first, stride, tokens, length, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The vectors of some tokens of a sample, shape (tokens, PADDED); 0 beyond length and SIZE.

    first: pointer to the vector of the sample's first token.
    stride: elements between the vectors of two tokens.
    """
    sizes = tl.arange(0, PADDED)
    exists = (tokens < length)[:, None]
    if SIZE != PADDED:
        exists = exists & (sizes < SIZE)[None, :]
    return tl.load(first + tokens[:, None] * stride + sizes[None, :], mask=exists, other=0.0)


@triton.jit
def store_tokens(first, stride, tokens, length, values, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Store what `load_tokens` loads."""
    sizes = tl.arange(0, PADDED)
    exists = (tokens < length)[:, None]
    if SIZE != PADDED:
        exists = exists & (sizes < SIZE)[None, :]
    pointers = first + tokens[:, None] * stride + sizes[None, :]
    tl.store(pointers, values.to(first.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    OFFSETS,
    SEEDS,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    num_tokens,
    inner_scale,
    outer_scale,
    rescale,
    threshold,
    window,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute output and log-sum-exp of a block of rows. Grid: (blocks of rows, heads, samples)."""
    # With causal attention the last blocks take longest: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start = tl.load(OFFSETS + sample).to(tl.int64)
    length = (tl.load(OFFSETS + sample + 1) - start).to(tl.int32)
    if first_row >= length:
        return
    num_heads = tl.num_programs(1)
    rows = first_row + tl.arange(0, ROWS)
    q = load_tokens(Q + start * q_token + head * q_head, q_token, rows, length, SIZE, PADDED)
    k_first = K + start * k_token + (head // GROUP) * k_head
    v_first = V + start * v_token + (head // GROUP) * v_head
    if HAS_DROPOUT:
        row_keys = mixed(head_key(SEEDS, sample, head) ^ rows.to(tl.uint64))[:, None]

    first_column = 0
    last_column = length
    if IS_CAUSAL:
        last_column = tl.minimum(length, first_row + ROWS)
    if HAS_WINDOW:
        first_column = tl.maximum(0, first_row - window + 1) // COLUMNS * COLUMNS
    maximum = tl.full([ROWS], NO_MAXIMUM, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    for column in range(first_column, last_column, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        k = load_tokens(k_first, k_token, columns, length, SIZE, PADDED)
        scores = base_2_scores(product(q, tl.trans(k)), inner_scale, outer_scale, HAS_SOFTCAP)
        visible = is_visible(rows[:, None], columns[None, :], length, window, IS_CAUSAL, HAS_WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if HAS_DROPOUT:
            weights = tl.where(is_kept(row_keys, columns[None, :], threshold), weights, 0.0)
        v = load_tokens(v_first, v_token, columns, length, SIZE, PADDED)
        result = result * shrink[:, None] + product(weights.to(v.dtype), v)
        maximum = new_maximum

    total = tl.where(rows < length, total, 1.0)
    result = result * (rescale / total)[:, None]
    out_first = OUT + (start * num_heads + head) * SIZE
    store_tokens(out_first, num_heads * SIZE, rows, length, result, SIZE, PADDED)
    lse_first = LSE + head * num_tokens + start
    tl.store(lse_first + rows, maximum + tl.log2(total), mask=rows < length)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    OUT,
    OUT_GRAD,
    DELTA,
    num_tokens,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum output * its gradient over each vector. Grid: (blocks of tokens, heads)."""
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    first_token = tl.program_id(0).to(tl.int64) * ROWS
    tokens = tl.arange(0, ROWS)
    length = num_tokens - first_token
    first = (first_token * num_heads + head) * SIZE
    out = load_tokens(OUT + first, num_heads * SIZE, tokens, length, SIZE, PADDED)
    grad = load_tokens(OUT_GRAD + first, num_heads * SIZE, tokens, length, SIZE, PADDED)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    delta_first = DELTA + head * num_tokens + first_token
    tl.store(delta_first + tokens, delta, mask=tokens < length)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_gradient_kernel(
    Q,
    K,
    V,
    OUT_GRAD,
    LSE,
    DELTA,
    Q_GRAD,
    ROW_KEYS,
    OFFSETS,
    SEEDS,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    num_tokens,
    scale,
    inner_scale,
    outer_scale,
    rescale,
    threshold,
    window,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """The gradient of a block of queries. Grid: (blocks of rows, heads, samples).

    Also stores the dropout keys of the rows, which the next kernel would compute several times.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start = tl.load(OFFSETS + sample).to(tl.int64)
    length = (tl.load(OFFSETS + sample + 1) - start).to(tl.int32)
    if first_row >= length:
        return
    num_heads = tl.num_programs(1)
    rows = first_row + tl.arange(0, ROWS)
    token = num_heads * SIZE
    out_first = (start * num_heads + head) * SIZE
    q = load_tokens(Q + start * q_token + head * q_head, q_token, rows, length, SIZE, PADDED)
    grad = load_tokens(OUT_GRAD + out_first, token, rows, length, SIZE, PADDED)
    k_first = K + start * k_token + (head // GROUP) * k_head
    v_first = V + start * v_token + (head // GROUP) * v_head
    row_first = head * num_tokens + start
    lse = tl.load(LSE + row_first + rows, mask=rows < length, other=0.0)[:, None]
    delta = tl.load(DELTA + row_first + rows, mask=rows < length, other=0.0)[:, None]
    if HAS_DROPOUT:
        row_keys = mixed(head_key(SEEDS, sample, head) ^ rows.to(tl.uint64))
        stored = row_keys.to(tl.int64, bitcast=True)
        tl.store(ROW_KEYS + row_first + rows, stored, mask=rows < length)
        row_keys = row_keys[:, None]

    first_column = 0
    last_column = length
    if IS_CAUSAL:
        last_column = tl.minimum(length, first_row + ROWS)
    if HAS_WINDOW:
        first_column = tl.maximum(0, first_row - window + 1) // COLUMNS * COLUMNS
    result = tl.zeros([ROWS, PADDED], tl.float32)
    for column in range(first_column, last_column, COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        k = load_tokens(k_first, k_token, columns, length, SIZE, PADDED)
        v = load_tokens(v_first, v_token, columns, length, SIZE, PADDED)
        scores = base_2_scores(product(q, tl.trans(k)), inner_scale, outer_scale, HAS_SOFTCAP)
        visible = is_visible(rows[:, None], columns[None, :], length, window, IS_CAUSAL, HAS_WINDOW)
        weights = tl.exp2(tl.where(visible, scores - lse, -float("inf")))
        of_weights = product(grad, tl.trans(v))
        if HAS_DROPOUT:
            kept = is_kept(row_keys, columns[None, :], threshold)
            of_weights = tl.where(kept, of_weights * rescale, 0.0)
        of_scores = weights * (of_weights - delta)
        if HAS_SOFTCAP:
            capped = scores / outer_scale
            of_scores = of_scores * (1.0 - capped * capped)
        result += product(of_scores.to(k.dtype), k)

    store_tokens(Q_GRAD + out_first, token, rows, length, result * scale, SIZE, PADDED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_value_gradient_kernel(
    Q,
    K,
    V,
    OUT_GRAD,
    LSE,
    DELTA,
    K_GRAD,
    V_GRAD,
    ROW_KEYS,
    OFFSETS,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    num_tokens,
    scale,
    inner_scale,
    outer_scale,
    rescale,
    threshold,
    window,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """The gradients of a block of keys and values. Grid: (blocks of columns, key heads, samples).

    Matrices of scores are transposed: keys x queries. The heads of a group are summed here, one
    after the other.
    """
    first_column = tl.program_id(0) * COLUMNS
    key_head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start = tl.load(OFFSETS + sample).to(tl.int64)
    length = (tl.load(OFFSETS + sample + 1) - start).to(tl.int32)
    if first_column >= length:
        return
    num_key_heads = tl.num_programs(1)
    num_heads = num_key_heads * GROUP
    columns = first_column + tl.arange(0, COLUMNS)
    k = load_tokens(K + start * k_token + key_head * k_head, k_token, columns, length, SIZE, PADDED)
    v = load_tokens(V + start * v_token + key_head * v_head, v_token, columns, length, SIZE, PADDED)

    first_row = 0
    last_row = length
    if IS_CAUSAL:
        first_row = first_column // ROWS * ROWS
    if HAS_WINDOW:
        last_row = tl.minimum(length, first_column + COLUMNS + window - 1)
    k_grad = tl.zeros([COLUMNS, PADDED], tl.float32)
    v_grad = tl.zeros([COLUMNS, PADDED], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_first = Q + start * q_token + head * q_head
        grad_first = OUT_GRAD + (start * num_heads + head) * SIZE
        row_first = head * num_tokens + start
        for row in range(first_row, last_row, ROWS):
            rows = row + tl.arange(0, ROWS)
            q = load_tokens(q_first, q_token, rows, length, SIZE, PADDED)
            grad = load_tokens(grad_first, num_heads * SIZE, rows, length, SIZE, PADDED)
            lse = tl.load(LSE + row_first + rows, mask=rows < length, other=0.0)[None, :]
            delta = tl.load(DELTA + row_first + rows, mask=rows < length, other=0.0)[None, :]
            scores = base_2_scores(product(k, tl.trans(q)), inner_scale, outer_scale, HAS_SOFTCAP)
            visible = is_visible(
                rows[None, :], columns[:, None], length, window, IS_CAUSAL, HAS_WINDOW
            )
            weights = tl.exp2(tl.where(visible, scores - lse, -float("inf")))
            of_weights = product(v, tl.trans(grad))
            if HAS_DROPOUT:
                row_keys = tl.load(ROW_KEYS + row_first + rows, mask=rows < length, other=0)
                row_keys = row_keys.to(tl.uint64, bitcast=True)[None, :]
                kept = is_kept(row_keys, columns[:, None], threshold)
                dropped = tl.where(kept, weights * rescale, 0.0)
                of_weights = tl.where(kept, of_weights * rescale, 0.0)
            else:
                dropped = weights
            v_grad += product(dropped.to(grad.dtype), grad)
            of_scores = weights * (of_weights - delta)
            if HAS_SOFTCAP:
                capped = scores / outer_scale
                of_scores = of_scores * (1.0 - capped * capped)
            k_grad += product(of_scores.to(q.dtype), q)

    first = (start * num_key_heads + key_head) * SIZE
    token = num_key_heads * SIZE
    store_tokens(K_GRAD + first, token, columns, length, k_grad * scale, SIZE, PADDED)
    store_tokens(V_GRAD + first, token, columns, length, v_grad, SIZE, PADDED)


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Attributes:
        rows: queries of a block.
        columns: keys of a block.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Launches:
    """The launches of the three large kernels for one head size and element size."""

    forward: Launch
    query_gradient: Launch
    key_value_gradient: Launch


# By the padded head size; smaller heads are launched as those of 64. Fixed, so that results do not
# depend on timings, and chosen so that no registers are spilled (scripts/compile_kernels.py).
HALF_PRECISION = {
    64: Launches(
        forward=Launch(64, 64, num_warps=4, num_stages=3),
        query_gradient=Launch(64, 64, num_warps=4, num_stages=3),
        key_value_gradient=Launch(32, 128, num_warps=8, num_stages=2),
    ),
    128: Launches(
        forward=Launch(128, 64, num_warps=8, num_stages=2),
        query_gradient=Launch(64, 64, num_warps=4, num_stages=2),
        key_value_gradient=Launch(32, 64, num_warps=8, num_stages=2),
    ),
    256: Launches(
        forward=Launch(64, 32, num_warps=8, num_stages=2),
        query_gradient=Launch(64, 32, num_warps=8, num_stages=2),
        key_value_gradient=Launch(32, 32, num_warps=8, num_stages=2),
    ),
}
# From compute capability 9.0 on, four warps multiply 64 keys together: eight need 128 keys.
HALF_PRECISION_90 = HALF_PRECISION | {
    128: replace(
        HALF_PRECISION[128],
        key_value_gradient=Launch(32, 128, num_warps=8, num_stages=2),
    ),
}
# Products in full precision need the operands' whole rows in registers: small blocks.
FULL_PRECISION = {
    64: Launches(
        forward=Launch(64, 32, num_warps=8, num_stages=2),
        query_gradient=Launch(32, 32, num_warps=4, num_stages=2),
        key_value_gradient=Launch(16, 64, num_warps=8, num_stages=2),
    ),
    128: Launches(
        forward=Launch(16, 16, num_warps=4, num_stages=2),
        query_gradient=Launch(32, 16, num_warps=4, num_stages=2),
        key_value_gradient=Launch(16, 32, num_warps=8, num_stages=1),
    ),
    256: Launches(
        forward=Launch(16, 16, num_warps=8, num_stages=1),
        query_gradient=Launch(16, 16, num_warps=4, num_stages=1),
        key_value_gradient=Launch(16, 32, num_warps=8, num_stages=1),
    ),
}
DELTA_ROWS = 64


def padded_size(size: int) -> int:
    """Return the head size within the kernels: the next power of two."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size))


def launches(size: int, dtype: torch.dtype, capability: int) -> Launches:
    """Return the launches for a head size, the type of the elements and a compute capability (80,
    90).
    """
    table = HALF_PRECISION
    if dtype == torch.float32:
        table = FULL_PRECISION
    elif capability >= 90:
        table = HALF_PRECISION_90
    return table[max(64, padded_size(size))]


@dataclass(frozen=True)
class Problem:
    """What one call of `attention` computes; see there."""

    max_length: int
    drop_probability: float
    scale: float
    is_causal: bool
    window: int | None
    softcap: float | None

    def scalars(self) -> dict[str, Any]:
        """Return the scalars and switches that all large kernels take."""
        has_softcap = self.softcap is not None
        return {
            "inner_scale": self.scale / self.softcap if has_softcap else self.scale * LOG2_E,
            "outer_scale": self.softcap * LOG2_E if has_softcap else 1.0,
            "rescale": 1.0 / (1.0 - self.drop_probability),
            "threshold": keep_threshold(self.drop_probability),
            "window": 0 if self.window is None else self.window,
            "IS_CAUSAL": self.is_causal,
            "HAS_WINDOW": self.window is not None,
            "HAS_SOFTCAP": has_softcap,
            "HAS_DROPOUT": self.drop_probability > 0,
        }


class Attention(torch.autograd.Function):
    """Attention of packed samples. `apply` takes the tensors of `attention`, then a `Problem`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        seeds: Tensor,
        problem: Problem,
    ) -> Tensor:
        q = _with_contiguous_vectors(q)
        k = _with_contiguous_vectors(k)
        v = _with_contiguous_vectors(v)
        num_tokens, num_heads = q.shape[:2]
        launch = _launches(q).forward
        out = q.new_empty(q.shape)
        lse = q.new_empty((num_heads, num_tokens), dtype=torch.float32)
        grid = (triton.cdiv(problem.max_length, launch.rows), num_heads, len(cu_seqlens) - 1)
        with torch.cuda.device_of(q):
            forward_kernel[grid](
                q,
                k,
                v,
                out,
                lse,
                cu_seqlens,
                seeds,
                **_sizes(q, k, v),
                **problem.scalars(),
                **_blocks(launch),
            )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, seeds)
        ctx.problem = problem
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu_seqlens, seeds = ctx.saved_tensors
        problem = ctx.problem
        out_grad = out_grad.contiguous()
        num_tokens, num_heads, size = q.shape
        num_key_heads = k.shape[1]
        num_samples = len(cu_seqlens) - 1
        delta = torch.empty_like(lse)
        row_keys = torch.empty_like(lse, dtype=torch.int64)
        q_grad = q.new_empty(q.shape)
        k_grad = k.new_empty(k.shape)
        v_grad = v.new_empty(v.shape)
        sizes = _sizes(q, k, v)
        scalars = {"scale": problem.scale, **problem.scalars()}
        given = (q, k, v, out_grad, lse, delta)
        of_query = _launches(q).query_gradient
        of_key = _launches(q).key_value_gradient
        query_blocks = triton.cdiv(problem.max_length, of_query.rows)
        key_blocks = triton.cdiv(problem.max_length, of_key.columns)
        with torch.cuda.device_of(q):
            delta_kernel[(triton.cdiv(num_tokens, DELTA_ROWS), num_heads)](
                out,
                out_grad,
                delta,
                num_tokens,
                SIZE=size,
                PADDED=padded_size(size),
                ROWS=DELTA_ROWS,
                num_warps=4,
                enable_fp_fusion=True,
            )
            query_gradient_kernel[(query_blocks, num_heads, num_samples)](
                *given,
                q_grad,
                row_keys,
                cu_seqlens,
                seeds,
                **sizes,
                **scalars,
                **_blocks(of_query),
            )
            key_value_gradient_kernel[(key_blocks, num_key_heads, num_samples)](
                *given,
                k_grad,
                v_grad,
                row_keys,
                cu_seqlens,
                **sizes,
                **scalars,
                **_blocks(of_key),
            )
        return q_grad, k_grad, v_grad, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_length: int,
    *,
    seeds: Tensor | None,
    drop_probability: float,
    scale: float,
    is_causal: bool,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute dropout(softmax(q k^T * scale)) v within each of the packed samples.

    Args:
        q: Queries of shape (T, heads, size), float32, float16 or bfloat16, size <= 256.
        k: Keys of shape (T, key heads, size); heads is a multiple of key heads.
        v: Values of shape (T, key heads, size).
        cu_seqlens: Where each sample starts, and T: int32, shape (samples + 1,).
        max_length: The most tokens of a sample.
        seeds: The sample's key XOR the key of the dropout site: int64, shape (samples,). None
            without dropout.
        drop_probability: p, with 0 <= p < 1.
        scale: Factor of the products of queries and keys.
        is_causal: Whether a query attends to no later tokens.
        window: The most tokens that a query attends to, itself and those before it. None: no limit.
            Causal attention only.
        softcap: Scores are capped to softcap * tanh(score / softcap). None: not capped.

    Returns:
        A contiguous tensor of shape (T, heads, size).

    Raises:
        ValueError: If the arguments do not fit together.

    Example:
        seeds = keys ^ signed(site)
        out = attention(
            q, k, v, cu_seqlens, 512, seeds=seeds, drop_probability=0.1, scale=0.125, is_causal=True
        )
    """
    if window is not None and not is_causal:
        raise ValueError("a window needs causal attention: pass is_causal=True or window=None.")
    if q.shape[-1] > LARGEST_SIZE:
        raise ValueError(f"head size {q.shape[-1]} > {LARGEST_SIZE} is not supported.")
    if seeds is None and drop_probability > 0:
        raise ValueError(f"seeds are needed for dropout {drop_probability}.")
    problem = Problem(max_length, drop_probability, scale, is_causal, window, softcap)
    seeds = cu_seqlens if seeds is None else seeds  # not read without dropout
    return Attention.apply(q, k, v, cu_seqlens, seeds, problem)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the strides and sizes that all large kernels take."""
    num_tokens, num_heads, size = q.shape
    return {
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "k_token": k.stride(0),
        "k_head": k.stride(1),
        "v_token": v.stride(0),
        "v_head": v.stride(1),
        "num_tokens": num_tokens,
        "GROUP": num_heads // k.shape[1],
        "SIZE": size,
        "PADDED": padded_size(size),
    }


def _launches(q: Tensor) -> Launches:
    """Return the launches for queries of shape (T, heads, size) where they are."""
    capability = 80
    if q.is_cuda:
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    return launches(q.shape[-1], q.dtype, capability)


def _blocks(launch: Launch) -> dict[str, int]:
    """Return the keyword arguments of a launch."""
    return {
        "ROWS": launch.rows,
        "COLUMNS": launch.columns,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,  # the default, of which Triton 3.9 warns if it is not given
    }


def _with_contiguous_vectors(x: Tensor) -> Tensor:
    """Return x, copied if the elements of a vector are not beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()
