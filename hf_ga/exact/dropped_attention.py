"""Attention whose weights are dropped by a given mask: as it is defined, and for a CPU as one function with its own backward.

Written out as operations of autograd, attention passes over its tokens x tokens numbers twice as often, keeps copies of query and
key, and asks Python and autograd for some thirty small things a layer, for which the lanes of a CPU wait for one another.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_ga.exact.keyed import keyed_dropout

# Attention weights of a sample, on average and for each thread, from which one sample is computed after the other: what is worked
# on stays in a processor's cache. Below, the calls of so many small operations take longer, and threads have nothing to share.
WEIGHTS_OF_SAMPLE = 1 << 15

Span = tuple[int, int, int]  # of a sample: where its tokens begin and end among all, and its first column in the padded batch


class LastBias:
    """What a mask adds to the scores, kept as long as layer after layer comes with the same mask, and what causal attention adds.

    Not of a trained mask (T5's relative positions): its operations belong to the graph of each layer, and checkpointing, which runs
    the last layer again first, must find as many of them as before.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._of: tuple[Tensor, int, torch.dtype, bool] | None = None
        self._found: tuple[Tensor, Tensor | None] | None = None
        self._causal: Tensor | None = None

    def causal(self, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
        """See `causal_bias`."""
        if self._causal is None or self._causal.shape != (num_queries, num_keys) or self._causal.dtype != like.dtype:
            self._causal = causal_bias(num_queries, num_keys, like)
        return self._causal

    def of(self, attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """See `bias_of`; None in place of the rows with keys if all of them have some."""
        state = attn_mask._version, dtype, torch.is_grad_enabled()  # made without a graph, a trained bias would get no gradient
        if self._of is None or self._of[0] is not attn_mask or self._of[1:] != state or attn_mask.requires_grad:
            bias, has_keys = bias_of(attn_mask, dtype)
            self._of, self._found = (attn_mask, *state), (bias, None if has_keys.all() else has_keys)
        return self._found


def bias_of(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a mask adds to the scores, and which rows have keys at all (bool, (..., L, 1)). Of a row without keys nothing is masked,
    so that its softmax is no NaN: it is to be dropped as a whole.

    All that needs a look at every element is done on the mask, which has no axis of heads as a rule.
    """
    if attn_mask.dtype == torch.bool:
        has_keys = attn_mask.any(-1, keepdim=True)
        # 1 - 1/1 is 0, 1 - 1/0 is -inf: quicker than to fill
        return 1 - (attn_mask | ~has_keys).to(dtype).reciprocal_(), has_keys
    has_keys = (attn_mask != -torch.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~has_keys, 0.0), has_keys


def causal_bias(num_queries: int, num_keys: int, like: Tensor) -> Tensor:
    """What keeps a token from attending to later ones: shape (num_queries, num_keys)."""
    return torch.full((num_queries, num_keys), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)


def attention_weights(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """softmax(query key^T * scale + mask) as `torch.nn.functional.scaled_dot_product_attention` defines it.

    Shapes: query (..., heads, L, E), key (..., heads, S, E); returns (..., heads, L, S). A row in which everything is masked
    is zero, as there.
    """
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        return scores.add_(causal_bias(*scores.shape[-2:], scores)).softmax(-1)
    if attn_mask is None:
        return scores.softmax(-1)
    bias, has_keys = bias_of(attn_mask, scores.dtype)
    return (scores + bias).softmax(-1) * has_keys.to(scores.dtype)


def dropped_attention(
    last_bias: LastBias,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    kept: Tensor,
    drop_probability: float,
) -> Tensor:
    """keyed_dropout(attention_weights(...), drop_probability, kept) @ value: in one function where that is possible.

    Shapes: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, V), kept (..., heads, L, S), bool.
    """
    shape = kept.shape
    if not _is_one_function(query, key, value):
        return keyed_dropout(attention_weights(query, key, attn_mask, is_causal, scale), drop_probability, kept) @ value
    bias = last_bias.causal(*shape[-2:], query) if is_causal else None
    if attn_mask is not None:
        bias, has_keys = last_bias.of(attn_mask, query.dtype)
        kept = kept if has_keys is None else kept & has_keys  # a row without keys weighs nothing
    num_queries, num_keys = shape[-2:]
    if len(shape) == 4 and num_queries == num_keys and gains_by_sample(shape[1], num_keys) and not _is_trained(bias):
        spans = [(begin, begin + num_keys, 0) for begin in range(0, shape[0] * num_keys, num_keys)]
        rows = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (query, key, value))  # models lay them out so: no copy
        output = DroppedAttentionBySample.apply(*rows, kept, bias, spans, scale, drop_probability)
        return output.transpose(0, 1).unflatten(0, (shape[0], num_queries)).transpose(1, 2)
    query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    return DroppedAttention.apply(query, key, value, kept, bias, scale, drop_probability).view(*shape[:-1], value.shape[-1])


def _is_one_function(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ours computes these: in full precision on a CPU, as many heads of each."""
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.float64)
        and query.dtype == key.dtype == value.dtype
        and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        and not torch.is_autocast_enabled("cpu")
    )


def gains_by_sample(num_heads: int, length: float) -> bool:
    """Whether samples of this length, on average, are computed one after the other."""
    return num_heads * length**2 >= WEIGHTS_OF_SAMPLE * torch.get_num_threads()


def _is_trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


class DroppedAttention(torch.autograd.Function):
    """dropout(softmax(query key^T * scale + bias)) value, with a dropout mask that is given.

    For the backward it keeps its inputs and the weights before dropout, and makes the dropped ones again: of a micro-batch on a CPU
    they take as much as the weights. Both factors, the scale and 1 / (1 - p), are applied inside of the products.

    Args of `apply`:
        query, key, value: shape (N, L or S, size): the heads of all samples.
        kept: bool, of N x L x S elements in any shape: which weights are kept.
        bias: None, or added to the scores in the shape of `kept`.

    Returns:
        shape (N, L, size of a value).
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, bias: Tensor | None, scale: float, probability: float
    ) -> Tensor:
        scores = torch.baddbmm(nothing := query.new_empty(1, 1, 1), query, key.mT, beta=0, alpha=scale)
        if bias is not None:
            scores.view(kept.shape).add_(bias)
        weights = torch.softmax(scores, -1, out=scores)
        mask = kept.view(torch.uint8).reshape(weights.shape)
        ctx.save_for_backward(query, key, value, mask, bias, weights)
        ctx.shape, ctx.scale, ctx.drop_probability = kept.shape, scale, probability
        return torch.baddbmm(nothing, weights * mask, value, beta=0, alpha=1 / (1 - probability))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, bias, weights = ctx.saved_tensors
        rescale, nothing = 1 / (1 - ctx.drop_probability), query.new_empty(1, 1, 1)
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            scores = query * ctx.scale @ key.mT
            scores = scores if bias is None else (scores.view(ctx.shape) + bias).view(scores.shape)
            output = _dropped(scores, mask, ctx.drop_probability) @ value
            return *_with_graph(ctx, [output], query, key, value, bias, gradient), None
        mask, scale = mask.to(weights.dtype), ctx.scale * rescale
        of_weight = torch.bmm(gradient, value.mT).mul_(mask)
        of_score = torch._softmax_backward_data(of_weight, weights, -1, weights.dtype)  # divided by `rescale`
        of_query = torch.baddbmm(nothing, of_score, key, beta=0, alpha=scale)
        of_key = torch.baddbmm(nothing, of_score.mT, query, beta=0, alpha=scale)
        of_value = torch.baddbmm(nothing, mask.mul_(weights).mT, gradient, beta=0, alpha=rescale)
        of_bias = of_score.mul_(rescale).view(ctx.shape).sum_to_size(bias.shape) if ctx.needs_input_grad[4] else None
        return of_query, of_key, of_value, None, of_bias, None, None


class DroppedAttentionBySample(torch.autograd.Function):
    """`DroppedAttention`, sample by sample.

    Args of `apply`:
        query, key, value: shape (heads, T, size); those of all samples, one after the other.
        kept: bool, shape (samples, heads, S, S): which weights are kept, drawn for padded samples.
        bias: None, or added to the scores, not trained; its last two axes are cut to a sample's tokens, and of four axes the first
            is that of the samples, or 1.
        spans: where each sample lies.

    Returns:
        shape (heads, T, size); it lies in memory as (T, heads, size).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: Tensor,
        bias: Tensor | None,
        spans: Sequence[Span],
        scale: float,
        drop_probability: float,
    ) -> Tensor:
        output, weights, rescale = _rows(query, value.shape[-1]), [], 1 / (1 - drop_probability)
        for (q, k, v, o), mask, added in _samples((query, key, value, output), kept, bias, spans):
            scores = torch.baddbmm(query.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=scale)
            if added is not None:
                scores.add_(added)
            weights.append(torch.softmax(scores, -1, out=scores))
            torch.baddbmm(o, weights[-1] * mask.view(torch.uint8), v, beta=0, alpha=rescale, out=o)
        ctx.save_for_backward(query, key, value, kept, bias, *weights)
        ctx.spans, ctx.scale, ctx.drop_probability = spans, scale, drop_probability
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, kept, bias, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            outputs = []
            for (q, k, v), mask, added in _samples((query, key, value), kept, bias, ctx.spans):
                scores = q * ctx.scale @ k.mT
                outputs.append(_dropped(scores if added is None else scores + added, mask, ctx.drop_probability) @ v)
            return *_with_graph(ctx, outputs, query, key, value, None, gradient), None, None
        found, rescale = [_rows(x, x.shape[-1]) for x in (query, key, value)], 1 / (1 - ctx.drop_probability)
        scale = ctx.scale * rescale
        samples = _samples((query, key, value, gradient, *found), kept, None, ctx.spans)
        for weight, ((q, k, v, g, of_q, of_k, of_v), mask, _) in zip(weights, samples, strict=True):
            mask = mask.to(weight.dtype)
            of_weight = torch.bmm(g, v.mT).mul_(mask)
            of_score = torch._softmax_backward_data(of_weight, weight, -1, weight.dtype)  # divided by `rescale`
            torch.baddbmm(of_q, of_score, k, beta=0, alpha=scale, out=of_q)
            torch.baddbmm(of_k, of_score.mT, q, beta=0, alpha=scale, out=of_k)
            torch.baddbmm(of_v, mask.mul_(weight).mT, g, beta=0, alpha=rescale, out=of_v)
        return *found, None, None, None, None, None


def _dropped(scores: Tensor, kept: Tensor, drop_probability: float) -> Tensor:
    return keyed_dropout(scores.softmax(-1), drop_probability, kept)


def _with_graph(
    ctx: Any, outputs: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, gradient: Tensor
) -> list[Tensor | None]:
    """The gradients by `query`, `key`, `value`, the mask, `bias` and the next argument, computed by operations of autograd."""
    inputs = {i: x for i, x in enumerate((query, key, value, None, bias)) if ctx.needs_input_grad[i]}
    found = torch.autograd.grad(torch.cat(list(outputs), dim=1), list(inputs.values()), gradient, create_graph=True)
    return [dict(zip(inputs, found, strict=True)).get(i) for i in range(6)]


def _samples(
    tensors: Sequence[Tensor], kept: Tensor, bias: Tensor | None, spans: Sequence[Span]
) -> Iterator[tuple[Sequence[Tensor], Tensor, Tensor | None]]:
    """The parts of each sample, its mask as (heads, L, S), and its part of the bias."""
    lengths = [end - begin for begin, end, _ in spans]
    parts = zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)
    for i, (part, length, (*_, column)) in enumerate(zip(parts, lengths, spans, strict=True)):
        columns, added = slice(column, column + length), bias
        if bias is not None:
            added = (bias if bias.dim() < 4 else bias[i % len(bias)])[..., :length, :length]
        yield part, kept[i, :, columns, columns], added


def _rows(like: Tensor, size: int) -> Tensor:
    """Empty, shape (heads, T, size), laid out as what is computed next wants it."""
    return like.new_empty(like.shape[1], len(like), size).transpose(0, 1)
