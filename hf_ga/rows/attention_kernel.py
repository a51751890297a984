"""Attention of packed samples of different lengths, with keyed dropout, as Triton kernels.

FlashAttention-2 (Dao 2023) over the concatenated tokens of several samples. Dropout masks are those
of `masks.keep_mask`, bit for bit, drawn in registers: nothing of size length x length is stored.
The backward uses no atomics, so the same inputs give the same gradients.

Imported on first use, because Triton is only on machines with a GPU. A CPU runs the same kernels in
Triton's interpreter (`TRITON_INTERPRET=1`), which is how the tests compare them with plain PyTorch.

The kernels use one set of names. A program computes one block of one head of one sample: a block of
`BLOCK_ROWS` queries or of `BLOCK_COLUMNS` keys. Rows are queries and columns are keys, counted from
the start of the sample. Scores are in base 2: the score times log2(e), so that exp2 of it is what
exp is of the score.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_ga.draws.dropout.mask_kernel import is_kept, mixed
from hf_ga.draws.dropout.masks import keep_threshold
from hf_ga.rows.options import AttentionOptions

MIN_BLOCK = 16  # tl.dot multiplies no smaller matrices
LOG2_E = math.log2(math.e)
# Triton's interpreter would multiply the bits of bfloat16 matrices as integers.
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The maximum score of a row before its first visible key: finite, because inf - inf is NaN.
NO_MAXIMUM = tl.constexpr(-1.0e30)
# Arguments that change from call to call. Triton would compile a kernel again where one is 1, or a
# multiple of 16.
UNSPECIALIZED = ["num_tokens", "keep_threshold", "sliding_window"]


@triton.jit
def product(a, b):
    """Compute a matrix product a @ b in a Triton kernel of attention.

    It is accumulated in float32, and never rounded to TF32.
    """
    if IS_INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def is_visible(
    rows, columns, length, sliding_window, IS_CAUSAL: tl.constexpr, HAS_SLIDING_WINDOW: tl.constexpr
):
    """Compute the attention mask of a kernel's block: True where a query attends to a key.

    Rows beyond the length are not masked. That does no harm: their outputs are not stored, and
    their gradients are zero.

    Args:
        rows: Indices of queries in their sample, broadcast against `columns`.
        columns: Indices of keys in their sample, broadcast against `rows`.
        length: Number of tokens of the sample.
        sliding_window: Maximum number of tokens a query attends to, itself and those before it.
        IS_CAUSAL: Whether a query attends to no later tokens.
        HAS_SLIDING_WINDOW: Whether there is a sliding window.
    """
    last = length - 1
    if IS_CAUSAL:
        last = tl.minimum(rows, last)
    visible = columns <= last
    if HAS_SLIDING_WINDOW:
        visible = visible & (columns > rows - sliding_window)
    return visible


@triton.jit
def visible_columns(
    first_row,
    length,
    sliding_window,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SLIDING_WINDOW: tl.constexpr,
):
    """Find the range of keys to which at least one query of an attention kernel's block attends.

    Args:
        first_row: First query of the block.
        length: Number of tokens of the sample.
        sliding_window: Maximum number of tokens a query attends to, itself and those before it.
        BLOCK_ROWS: Queries of a block.
        BLOCK_COLUMNS: Keys of a block. The range starts at a multiple of it.
        IS_CAUSAL: Whether a query attends to no later tokens.
        HAS_SLIDING_WINDOW: Whether there is a sliding window.

    Returns:
        The first key, and the end of the range (exclusive).
    """
    first_column = 0
    end_column = length
    if IS_CAUSAL:
        end_column = tl.minimum(length, first_row + BLOCK_ROWS)
    if HAS_SLIDING_WINDOW:
        first_visible = tl.maximum(0, first_row - sliding_window + 1)
        first_column = first_visible // BLOCK_COLUMNS * BLOCK_COLUMNS
    return first_column, end_column


@triton.jit
def sample_range(CU_SEQLENS, sample):
    """Return where a sample starts in the packed tokens (int64), and its length (int32).

    Args:
        CU_SEQLENS: Pointer to the starts of all samples, then the number of all tokens: int32.
        sample: Index of the sample.
    """
    start = tl.load(CU_SEQLENS + sample).to(tl.int64)
    length = (tl.load(CU_SEQLENS + sample + 1) - start).to(tl.int32)
    return start, length


@triton.jit
def head_key(SEEDS, sample, head):
    """Return the key from which dropout masks of one attention head of a sample are drawn: uint64.

    Args:
        SEEDS: Pointer to one int64 seed per sample.
        sample: Index of the sample.
        head: Index of the head.
    """
    seed = tl.load(SEEDS + sample).to(tl.uint64, bitcast=True)
    key = mixed(mixed(seed))  # the sample, then its single row: index 0
    return mixed(key ^ head.to(tl.uint64))


@triton.jit
def load_tokens(
    first, stride, tokens, length, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr
):
    """Load a block of an attention kernel: vectors of tokens of one head, padded with zeros.

    Args:
        first: Pointer to the vector of the sample's first token.
        stride: Number of elements from the vector of one token to that of the next.
        tokens: Indices of the tokens in their sample.
        length: Number of tokens of the sample. Tokens beyond it are zeros.
        HEAD_DIM: Elements of a vector.
        PADDED_HEAD_DIM: Elements of a loaded vector. Those beyond `HEAD_DIM` are zeros.

    Returns:
        A block of shape (tokens, PADDED_HEAD_DIM).
    """
    dims = tl.arange(0, PADDED_HEAD_DIM)
    exists = (tokens < length)[:, None]
    if HEAD_DIM != PADDED_HEAD_DIM:
        exists = exists & (dims < HEAD_DIM)[None, :]
    return tl.load(first + tokens[:, None] * stride + dims[None, :], mask=exists, other=0.0)


@triton.jit
def store_tokens(
    first, stride, tokens, length, values, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr
):
    """Store a block of an attention kernel: vectors of tokens of one head, without padding.

    Args:
        first: Pointer to the vector of the sample's first token.
        stride: Number of elements from the vector of one token to that of the next.
        tokens: Indices of the tokens in their sample.
        length: Number of tokens of the sample. Tokens beyond it are not stored.
        values: The vectors, of shape (tokens, PADDED_HEAD_DIM), converted to the dtype of `first`.
        HEAD_DIM: Elements of a stored vector.
        PADDED_HEAD_DIM: Elements of a vector in `values`.
    """
    dims = tl.arange(0, PADDED_HEAD_DIM)
    exists = (tokens < length)[:, None]
    if HEAD_DIM != PADDED_HEAD_DIM:
        exists = exists & (dims < HEAD_DIM)[None, :]
    pointers = first + tokens[:, None] * stride + dims[None, :]
    tl.store(pointers, values.to(first.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    CU_SEQLENS,
    SEEDS,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_tokens,
    product_scale,
    dropout_scale,
    keep_threshold,
    sliding_window,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SLIDING_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute attention of a block of queries, as FlashAttention-2 does in its forward.

    Grid: (blocks of queries, num_heads, samples). A pass over the keys keeps the maximum score of
    each query, and rescales its sums where the maximum grows.

    Args:
        Q, K, V: Pointers to queries, keys and values of all tokens, of shape (num_tokens, heads,
            HEAD_DIM) with the strides below.
        OUT: Pointer to the output, contiguous, of shape (num_tokens, num_heads, HEAD_DIM).
        LSE: Pointer to the second result, log-sum-exp of each query's scores, in base 2: float32,
            of shape (num_heads, num_tokens).
        CU_SEQLENS: Pointer to where each sample starts, then num_tokens: int32.
        SEEDS: Pointer to the dropout seed of each sample: int64.
        product_scale: scale * log2(e), which makes scores of base 2.
        dropout_scale: 1 / (1 - drop probability).
        keep_threshold: An attention weight is kept if its draw (int32) is at least this.
        sliding_window: See `is_visible`.
        HEADS_PER_KV_HEAD: Query heads that share one head of keys and values.
        PADDED_HEAD_DIM: HEAD_DIM, rounded up to a power of two.
        BLOCK_ROWS, BLOCK_COLUMNS: Queries and keys of a block.
    """
    # With causal attention the last blocks take longest: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start, length = sample_range(CU_SEQLENS, sample)
    if first_row >= length:
        return
    num_heads = tl.num_programs(1)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    q_first = Q + start * q_token_stride + head * q_head_stride
    q = load_tokens(q_first, q_token_stride, rows, length, HEAD_DIM, PADDED_HEAD_DIM)
    kv_head = head // HEADS_PER_KV_HEAD
    k_first = K + start * k_token_stride + kv_head * k_head_stride
    v_first = V + start * v_token_stride + kv_head * v_head_stride
    if HAS_DROPOUT:
        row_keys = mixed(head_key(SEEDS, sample, head) ^ rows.to(tl.uint64))[:, None]

    first_column, end_column = visible_columns(
        first_row, length, sliding_window, BLOCK_ROWS, BLOCK_COLUMNS, IS_CAUSAL, HAS_SLIDING_WINDOW
    )
    maximum = tl.full([BLOCK_ROWS], NO_MAXIMUM, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)  # sum of exp2(score - maximum)
    result = tl.zeros([BLOCK_ROWS, PADDED_HEAD_DIM], tl.float32)
    for column in range(first_column, end_column, BLOCK_COLUMNS):
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        k = load_tokens(k_first, k_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)
        scores = product(q, tl.trans(k)) * product_scale
        visible = is_visible(
            rows[:, None], columns[None, :], length, sliding_window, IS_CAUSAL, HAS_SLIDING_WINDOW
        )
        scores = tl.where(visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if HAS_DROPOUT:
            kept = is_kept(row_keys, columns[None, :], keep_threshold)
            weights = tl.where(kept, weights, 0.0)
        v = load_tokens(v_first, v_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)
        result = result * shrink[:, None] + product(weights.to(v.dtype), v)
        maximum = new_maximum

    total = tl.where(rows < length, total, 1.0)
    result = result * (dropout_scale / total)[:, None]
    out_token_stride = num_heads * HEAD_DIM
    out_first = OUT + (start * num_heads + head) * HEAD_DIM
    store_tokens(out_first, out_token_stride, rows, length, result, HEAD_DIM, PADDED_HEAD_DIM)
    lse_first = LSE + head * num_tokens + start
    tl.store(lse_first + rows, maximum + tl.log2(total), mask=rows < length)


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
    CU_SEQLENS,
    SEEDS,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_tokens,
    scale,
    product_scale,
    dropout_scale,
    keep_threshold,
    sliding_window,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SLIDING_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute the gradient of a block of queries in the attention backward.

    Grid: (blocks of queries, num_heads, samples). Recomputes the attention weights from the scores
    and LSE. Also stores the dropout keys of the queries for `key_value_gradient_kernel`, which
    would otherwise compute each of them several times.

    Args:
        Q, K, V: Pointers to queries, keys and values of all tokens, of shape (num_tokens, heads,
            HEAD_DIM) with the strides below.
        OUT_GRAD: Pointer to the gradient of the output, contiguous, of shape (num_tokens,
            num_heads, HEAD_DIM).
        LSE: Pointer to log-sum-exp of each query's scores, in base 2: float32, of shape (num_heads,
            num_tokens).
        DELTA: Pointer to the dot product of each query's output and its gradient, of the shape of
            LSE.
        Q_GRAD: Pointer to the result, like OUT_GRAD.
        ROW_KEYS: Pointer to the dropout keys to store: int64, of the shape of LSE.
        CU_SEQLENS: Pointer to where each sample starts, then num_tokens: int32.
        SEEDS: Pointer to the dropout seed of each sample: int64.
        scale: Factor of the scores.
        product_scale: scale * log2(e), which makes scores of base 2.
        dropout_scale: 1 / (1 - drop probability).
        keep_threshold: An attention weight is kept if its draw (int32) is at least this.
        sliding_window: See `is_visible`.
        HEADS_PER_KV_HEAD: Query heads that share one head of keys and values.
        PADDED_HEAD_DIM: HEAD_DIM, rounded up to a power of two.
        BLOCK_ROWS, BLOCK_COLUMNS: Queries and keys of a block.
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_ROWS
    head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start, length = sample_range(CU_SEQLENS, sample)
    if first_row >= length:
        return
    num_heads = tl.num_programs(1)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    out_token_stride = num_heads * HEAD_DIM
    out_first = (start * num_heads + head) * HEAD_DIM
    q_first = Q + start * q_token_stride + head * q_head_stride
    q = load_tokens(q_first, q_token_stride, rows, length, HEAD_DIM, PADDED_HEAD_DIM)
    out_grad = load_tokens(
        OUT_GRAD + out_first, out_token_stride, rows, length, HEAD_DIM, PADDED_HEAD_DIM
    )
    kv_head = head // HEADS_PER_KV_HEAD
    k_first = K + start * k_token_stride + kv_head * k_head_stride
    v_first = V + start * v_token_stride + kv_head * v_head_stride
    row_first = head * num_tokens + start
    lse = tl.load(LSE + row_first + rows, mask=rows < length, other=0.0)[:, None]
    delta = tl.load(DELTA + row_first + rows, mask=rows < length, other=0.0)[:, None]
    if HAS_DROPOUT:
        row_keys = mixed(head_key(SEEDS, sample, head) ^ rows.to(tl.uint64))
        stored_keys = row_keys.to(tl.int64, bitcast=True)
        tl.store(ROW_KEYS + row_first + rows, stored_keys, mask=rows < length)
        row_keys = row_keys[:, None]

    first_column, end_column = visible_columns(
        first_row, length, sliding_window, BLOCK_ROWS, BLOCK_COLUMNS, IS_CAUSAL, HAS_SLIDING_WINDOW
    )
    q_grad = tl.zeros([BLOCK_ROWS, PADDED_HEAD_DIM], tl.float32)
    for column in range(first_column, end_column, BLOCK_COLUMNS):
        columns = column + tl.arange(0, BLOCK_COLUMNS)
        k = load_tokens(k_first, k_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)
        v = load_tokens(v_first, v_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)
        scores = product(q, tl.trans(k)) * product_scale
        visible = is_visible(
            rows[:, None], columns[None, :], length, sliding_window, IS_CAUSAL, HAS_SLIDING_WINDOW
        )
        weights = tl.exp2(tl.where(visible, scores - lse, -float("inf")))
        weight_grad = product(out_grad, tl.trans(v))
        if HAS_DROPOUT:
            kept = is_kept(row_keys, columns[None, :], keep_threshold)
            weight_grad = tl.where(kept, weight_grad * dropout_scale, 0.0)
        score_grad = weights * (weight_grad - delta)  # softmax backward
        q_grad += product(score_grad.to(k.dtype), k)

    store_tokens(
        Q_GRAD + out_first,
        out_token_stride,
        rows,
        length,
        q_grad * scale,
        HEAD_DIM,
        PADDED_HEAD_DIM,
    )


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
    CU_SEQLENS,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_tokens,
    scale,
    product_scale,
    dropout_scale,
    keep_threshold,
    sliding_window,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_SLIDING_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Compute the gradients of a block of keys and values in the attention backward.

    Grid: (blocks of keys, num_kv_heads, samples). Recomputes the attention weights from the scores
    and LSE; matrices of scores are transposed, keys x queries. The gradients of all query heads
    that share a key head are added here, one head after the other, without atomics.

    Args:
        Q, K, V: Pointers to queries, keys and values of all tokens, of shape (num_tokens, heads,
            HEAD_DIM) with the strides below.
        OUT_GRAD: Pointer to the gradient of the output, contiguous, of shape (num_tokens,
            num_heads, HEAD_DIM).
        LSE: Pointer to log-sum-exp of each query's scores, in base 2: float32, of shape (num_heads,
            num_tokens).
        DELTA: Pointer to the dot product of each query's output and its gradient, of the shape of
            LSE.
        K_GRAD, V_GRAD: Pointers to the results, contiguous, of shape (num_tokens, num_kv_heads,
            HEAD_DIM).
        ROW_KEYS: Pointer to the dropout keys of the queries, from `query_gradient_kernel`: int64,
            of the shape of LSE.
        CU_SEQLENS: Pointer to where each sample starts, then num_tokens: int32.
        scale: Factor of the scores.
        product_scale: scale * log2(e), which makes scores of base 2.
        dropout_scale: 1 / (1 - drop probability).
        keep_threshold: An attention weight is kept if its draw (int32) is at least this.
        sliding_window: See `is_visible`.
        HEADS_PER_KV_HEAD: Query heads that share one head of keys and values.
        PADDED_HEAD_DIM: HEAD_DIM, rounded up to a power of two.
        BLOCK_ROWS, BLOCK_COLUMNS: Queries and keys of a block.
    """
    first_column = tl.program_id(0) * BLOCK_COLUMNS
    kv_head = tl.program_id(1).to(tl.int64)
    sample = tl.program_id(2)
    start, length = sample_range(CU_SEQLENS, sample)
    if first_column >= length:
        return
    num_kv_heads = tl.num_programs(1)
    num_heads = num_kv_heads * HEADS_PER_KV_HEAD
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    k_first = K + start * k_token_stride + kv_head * k_head_stride
    k = load_tokens(k_first, k_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)
    v_first = V + start * v_token_stride + kv_head * v_head_stride
    v = load_tokens(v_first, v_token_stride, columns, length, HEAD_DIM, PADDED_HEAD_DIM)

    # The queries that attend to at least one key of this block.
    first_row = 0
    end_row = length
    if IS_CAUSAL:
        first_row = first_column // BLOCK_ROWS * BLOCK_ROWS
    if HAS_SLIDING_WINDOW:
        end_row = tl.minimum(length, first_column + BLOCK_COLUMNS + sliding_window - 1)
    k_grad = tl.zeros([BLOCK_COLUMNS, PADDED_HEAD_DIM], tl.float32)
    v_grad = tl.zeros([BLOCK_COLUMNS, PADDED_HEAD_DIM], tl.float32)
    for head_in_group in range(HEADS_PER_KV_HEAD):
        head = kv_head * HEADS_PER_KV_HEAD + head_in_group
        q_first = Q + start * q_token_stride + head * q_head_stride
        grad_first = OUT_GRAD + (start * num_heads + head) * HEAD_DIM
        row_first = head * num_tokens + start
        for row in range(first_row, end_row, BLOCK_ROWS):
            rows = row + tl.arange(0, BLOCK_ROWS)
            q = load_tokens(q_first, q_token_stride, rows, length, HEAD_DIM, PADDED_HEAD_DIM)
            out_grad = load_tokens(
                grad_first, num_heads * HEAD_DIM, rows, length, HEAD_DIM, PADDED_HEAD_DIM
            )
            lse = tl.load(LSE + row_first + rows, mask=rows < length, other=0.0)[None, :]
            delta = tl.load(DELTA + row_first + rows, mask=rows < length, other=0.0)[None, :]
            scores = product(k, tl.trans(q)) * product_scale
            visible = is_visible(
                rows[None, :],
                columns[:, None],
                length,
                sliding_window,
                IS_CAUSAL,
                HAS_SLIDING_WINDOW,
            )
            weights = tl.exp2(tl.where(visible, scores - lse, -float("inf")))
            weight_grad = product(v, tl.trans(out_grad))
            if HAS_DROPOUT:
                row_keys = tl.load(ROW_KEYS + row_first + rows, mask=rows < length, other=0)
                row_keys = row_keys.to(tl.uint64, bitcast=True)[None, :]
                kept = is_kept(row_keys, columns[:, None], keep_threshold)
                dropped_weights = tl.where(kept, weights * dropout_scale, 0.0)
                weight_grad = tl.where(kept, weight_grad * dropout_scale, 0.0)
            else:
                dropped_weights = weights
            v_grad += product(dropped_weights.to(out_grad.dtype), out_grad)
            score_grad = weights * (weight_grad - delta)  # softmax backward
            k_grad += product(score_grad.to(q.dtype), q)

    first = (start * num_kv_heads + kv_head) * HEAD_DIM
    stride = num_kv_heads * HEAD_DIM
    store_tokens(K_GRAD + first, stride, columns, length, k_grad * scale, HEAD_DIM, PADDED_HEAD_DIM)
    store_tokens(V_GRAD + first, stride, columns, length, v_grad, HEAD_DIM, PADDED_HEAD_DIM)


class Launch(NamedTuple):
    """The block sizes and launch options of one attention kernel.

    Attributes:
        rows: Queries of a block.
        columns: Keys of a block.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


# Launch settings of forward, gradient of the queries, gradients of keys and values, by padded
# head_dim; a smaller head_dim uses those of 64. They are fixed, not autotuned, so that results do
# not depend on timings, and chosen so that no registers are spilled (scripts/compile_kernels.py).
HALF_PRECISION = {
    64: (Launch(64, 64, 4, 3), Launch(64, 64, 4, 3), Launch(32, 128, 8, 2)),
    128: (Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(32, 64, 8, 2)),
    256: (Launch(64, 32, 8, 2), Launch(64, 32, 8, 2), Launch(32, 32, 8, 2)),
}
# From compute capability 9.0 on, four warps multiply 64 keys together: eight need 128 keys.
HALF_PRECISION_90 = HALF_PRECISION | {
    128: (Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(32, 128, 8, 2)),
}
# Products in full precision need the operands' whole rows in registers: small blocks.
FULL_PRECISION = {
    64: (Launch(64, 32, 8, 2), Launch(32, 32, 4, 2), Launch(16, 64, 8, 2)),
    128: (Launch(16, 16, 4, 2), Launch(32, 16, 4, 2), Launch(16, 32, 8, 1)),
    256: (Launch(16, 16, 8, 1), Launch(16, 16, 4, 1), Launch(16, 32, 8, 1)),
}


def padded_head_dim(head_dim: int) -> int:
    """Return the head_dim within the attention kernels: the next power of two, at least 16."""
    return max(MIN_BLOCK, triton.next_power_of_2(head_dim))


def launch_settings(
    head_dim: int, dtype: torch.dtype, capability: int
) -> tuple[Launch, Launch, Launch]:
    """Look up the launch settings of the three attention kernels.

    Args:
        head_dim: Elements of a head's vector, at most `MAX_HEAD_DIM`.
        dtype: The dtype of queries, keys and values.
        capability: Compute capability of the GPU times 10 (80 for an A100, 90 for an H100).
    """
    table = HALF_PRECISION
    if dtype == torch.float32:
        table = FULL_PRECISION
    elif capability >= 90:
        table = HALF_PRECISION_90
    return table[max(64, padded_head_dim(head_dim))]


def _kernel_arguments(options: AttentionOptions) -> dict[str, Any]:
    """Return options as keyword arguments of the three attention kernels."""
    has_window = options.sliding_window is not None
    return {
        "product_scale": options.scale * LOG2_E,
        "dropout_scale": 1.0 / (1.0 - options.drop_probability),
        "keep_threshold": keep_threshold(options.drop_probability),
        "sliding_window": options.sliding_window if has_window else 0,  # then not read
        "IS_CAUSAL": options.is_causal,
        "HAS_SLIDING_WINDOW": has_window,
        "HAS_DROPOUT": options.drop_probability > 0,
    }


class Attention(torch.autograd.Function):
    """Compute dropout(softmax(q k^T * scale)) v within each of the packed samples.

    `apply` takes the arguments of `forward` but the context.

    Example:
        seeds = keys ^ signed(site)
        options = AttentionOptions(drop_probability=0.1, scale=0.125, is_causal=True)
        out = Attention.apply(q, k, v, cu_seqlens, 512, seeds, options)
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        seeds: Tensor | None,
        options: AttentionOptions,
    ) -> Tensor:
        """Launch the forward kernel of attention, and save what the backward needs.

        Args:
            ctx: Context of the autograd function.
            q: Queries of shape (num_tokens, num_heads, head_dim), float32, float16 or bfloat16,
                with head_dim <= 256. num_tokens is the number of tokens of all samples.
            k: Keys of shape (num_tokens, num_kv_heads, head_dim). num_heads is a multiple of
                num_kv_heads (grouped-query attention).
            v: Values, of the shape of k.
            cu_seqlens: Where each sample starts, then num_tokens: int32, of shape (samples + 1,).
            max_length: Number of tokens of the longest sample.
            seeds: The sample's key XOR the key of the dropout site: int64, of shape (samples,).
                None without dropout.
            options: What is computed. A sliding window needs causal attention.

        Returns:
            A contiguous tensor of the shape of q.
        """
        seeds = cu_seqlens if seeds is None else seeds  # not read without dropout
        q = _with_contiguous_vectors(q)
        k = _with_contiguous_vectors(k)
        v = _with_contiguous_vectors(v)
        num_tokens, num_heads = q.shape[:2]
        num_samples = len(cu_seqlens) - 1
        launch, _, _ = _launch_settings_for(q)
        out = q.new_empty(q.shape)
        lse = q.new_empty((num_heads, num_tokens), dtype=torch.float32)
        grid = (triton.cdiv(max_length, launch.rows), num_heads, num_samples)
        with torch.cuda.device_of(q):
            forward_kernel[grid](
                q,
                k,
                v,
                out,
                lse,
                cu_seqlens,
                seeds,
                **_shape_arguments(q, k, v),
                **_kernel_arguments(options),
                **_launch_arguments(launch),
            )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, seeds)
        ctx.max_length = max_length
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Launch the two backward kernels of attention.

        Args:
            ctx: Context of the autograd function.
            out_grad: Gradient of the output, of shape (num_tokens, num_heads, head_dim).

        Returns:
            The gradients of q, k and v, and None for the other arguments of `forward`.
        """
        q, k, v, out, lse, cu_seqlens, seeds = ctx.saved_tensors
        options = ctx.options
        out_grad = out_grad.contiguous()
        num_heads = q.shape[1]
        num_kv_heads = k.shape[1]
        num_samples = len(cu_seqlens) - 1
        # What the softmax backward subtracts (FlashAttention-2), of shape (num_heads, num_tokens).
        delta = (out * out_grad.float()).sum(-1).mT.contiguous()
        row_keys = torch.empty_like(lse, dtype=torch.int64)
        q_grad = q.new_empty(q.shape)
        k_grad = k.new_empty(k.shape)
        v_grad = v.new_empty(v.shape)
        shape_arguments = _shape_arguments(q, k, v)
        settings = {"scale": options.scale, **_kernel_arguments(options)}
        _, query_launch, key_launch = _launch_settings_for(q)
        query_blocks = triton.cdiv(ctx.max_length, query_launch.rows)
        key_blocks = triton.cdiv(ctx.max_length, key_launch.columns)
        with torch.cuda.device_of(q):
            # Also fills row_keys, which the last kernel reads.
            query_gradient_kernel[(query_blocks, num_heads, num_samples)](
                q,
                k,
                v,
                out_grad,
                lse,
                delta,
                q_grad,
                row_keys,
                cu_seqlens,
                seeds,
                **shape_arguments,
                **settings,
                **_launch_arguments(query_launch),
            )
            key_value_gradient_kernel[(key_blocks, num_kv_heads, num_samples)](
                q,
                k,
                v,
                out_grad,
                lse,
                delta,
                k_grad,
                v_grad,
                row_keys,
                cu_seqlens,
                **shape_arguments,
                **settings,
                **_launch_arguments(key_launch),
            )
        return q_grad, k_grad, v_grad, None, None, None, None


def _shape_arguments(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    """Return strides and sizes of q, k and v as keyword arguments of the attention kernels.

    Args:
        q: Queries, of shape (num_tokens, num_heads, head_dim).
        k: Keys, of shape (num_tokens, num_kv_heads, head_dim).
        v: Values, of the shape of k.
    """
    num_tokens, num_heads, head_dim = q.shape
    return {
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "k_token_stride": k.stride(0),
        "k_head_stride": k.stride(1),
        "v_token_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "num_tokens": num_tokens,
        "HEADS_PER_KV_HEAD": num_heads // k.shape[1],
        "HEAD_DIM": head_dim,
        "PADDED_HEAD_DIM": padded_head_dim(head_dim),
    }


def _launch_settings_for(q: Tensor) -> tuple[Launch, Launch, Launch]:
    """Return the attention kernels' launch settings for queries, of shape (..., head_dim).

    They depend on the GPU that holds the queries. On a CPU (Triton's interpreter) they are those of
    compute capability 8.0.
    """
    capability = 80
    if q.is_cuda:
        major, minor = torch.cuda.get_device_capability(q.device)
        capability = 10 * major + minor
    return launch_settings(q.shape[-1], q.dtype, capability)


def _launch_arguments(launch: Launch) -> dict[str, int]:
    """Return launch settings as keyword arguments of the launch of an attention kernel."""
    return {
        "BLOCK_ROWS": launch.rows,
        "BLOCK_COLUMNS": launch.columns,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,  # the default; Triton 3.9 warns if it is not passed
    }


def _with_contiguous_vectors(x: Tensor) -> Tensor:
    """Return a tensor whose last dim has stride 1, as the attention kernels need: x or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
