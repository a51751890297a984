"""Attention whose weights are dropped by a given mask: as it is defined, and for a CPU as one function with its own backward.

Written out as operations of autograd, attention passes over its tokens x tokens numbers twice as often, keeps copies of query and
key, and asks Python and autograd for some thirty small things a layer, for which the lanes of a CPU wait for one another.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_ga.keyed import keyed_dropout

# Attention weights of a sample, on average and for each thread, from which one sample is computed after the other: what is worked
# on stays in a processor's cache. Below, the calls of so many small operations take longer, and threads have nothing to share.
WEIGHTS_OF_SAMPLE = 1 << 15

Span = tuple[int, int, int]  # of a sample: where its tokens begin and end among all, and its first column in the padded batch


class LastBias:
    """What a mask adds to the scores, kept as long as layer after layer comes with the same mask.

    Not of a trained one (T5's relative positions): its operations belong to the graph of each layer, and checkpointing, which runs
    the last layer again first, must find as many of them as before.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._of: tuple[Tensor, int, torch.dtype, bool] | None = None
        self._found: tuple[Tensor, Tensor | None] | None = None

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
    shapes, in_full = {x.shape[:-2] for x in (query, key, value)}, {x.dtype for x in (query, key, value)}
    cast = torch.is_autocast_enabled(query.device.type)
    if query.device.type != "cpu" or cast or len(shapes) > 1 or not in_full <= {torch.float32, torch.float64} or len(in_full) > 1:
        return keyed_dropout(attention_weights(query, key, attn_mask, is_causal, scale), drop_probability, kept) @ value
    bias = causal_bias(*kept.shape[-2:], query) if is_causal else None
    if attn_mask is not None:
        bias, has_keys = last_bias.of(attn_mask, query.dtype)
        kept = kept if has_keys is None else kept & has_keys  # a row without keys weighs nothing
    num_queries, num_keys = kept.shape[-2:]
    if kept.dim() == 4 and num_queries == num_keys and gains_by_sample(kept.shape[1], num_keys) and not _is_trained(bias):
        spans = [(begin, begin + num_keys, 0) for begin in range(0, len(kept) * num_keys, num_keys)]
        rows = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1) for x in (query, key, value))  # models lay them out so: no copy
        output = DroppedAttention.apply(*rows, kept, bias, spans, scale, drop_probability)
        return output.transpose(0, 1).unflatten(0, (len(kept), num_queries)).transpose(1, 2)
    flat = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
    output = DroppedAttention.apply(*flat, kept, bias, None, scale, drop_probability)
    return output.view(*query.shape[:-1], value.shape[-1])


def gains_by_sample(num_heads: int, length: float) -> bool:
    """Whether samples of this length, on average, are computed one after the other."""
    return num_heads * length**2 >= WEIGHTS_OF_SAMPLE * torch.get_num_threads()


def _is_trained(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


class DroppedAttention(torch.autograd.Function):
    """dropout(softmax(query key^T * scale + bias)) value, sample by sample, with a dropout mask that is given.

    For the backward it keeps its inputs and the weights before dropout, and makes the dropped ones again: of a micro-batch on a CPU
    they take as much as the weights. Both factors, the scale and 1 / (1 - p), are applied inside of the products.

    Args of `apply`:
        query, key, value: shape (heads, T, size); those of all samples, one after the other.
        kept: bool, shape (samples, heads, S, S): which weights are kept, drawn for padded samples.
        bias: None, or added to the scores; its last two axes are cut to a sample's tokens, and of four axes the first is that of
            the samples, or 1.
        spans: where each sample lies. None: there is one, of its own numbers of queries and keys; `kept` and `bias` are whole, and
            `kept` may have more axes in place of the heads.

    Returns:
        shape (heads, T, size); of spans, it lies in memory as (T, heads, size).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: Tensor,
        bias: Tensor | None,
        spans: Sequence[Span] | None,
        scale: float,
        drop_probability: float,
    ) -> Tensor:
        output, weights, rescale = _rows(query, value.shape[-1], spans), [], 1 / (1 - drop_probability)
        for (q, k, v, o), mask, added in _samples((query, key, value, output), kept, bias, spans):
            scores = torch.baddbmm(query.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=scale)
            if added is not None:
                (scores if spans is not None else scores.view(kept.shape)).add_(added)
            weights.append(torch.softmax(scores, -1, out=scores))
            dropped = weights[-1] * mask.view(torch.uint8)
            torch.baddbmm(o, dropped, v, beta=0, alpha=rescale, out=o)
        ctx.save_for_backward(query, key, value, kept, bias, *weights)
        ctx.spans, ctx.scale, ctx.drop_probability = spans, scale, drop_probability
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, kept, bias, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            return _with_graph(ctx, query, key, value, kept, bias, gradient)
        found, rescale = [_rows(x, x.shape[-1], ctx.spans) for x in (query, key, value)], 1 / (1 - ctx.drop_probability)
        scale, of_bias = ctx.scale * rescale, None
        samples = _samples((query, key, value, gradient, *found), kept, None, ctx.spans)
        for weight, ((q, k, v, g, of_q, of_k, of_v), mask, _) in zip(weights, samples, strict=True):
            mask = mask.to(weight.dtype)
            of_weight = torch.bmm(g, v.mT).mul_(mask)
            of_score = torch.ops.aten._softmax_backward_data(of_weight, weight, -1, weight.dtype)  # divided by `rescale`
            torch.baddbmm(of_q, of_score, k, beta=0, alpha=scale, out=of_q)
            torch.baddbmm(of_k, of_score.mT, q, beta=0, alpha=scale, out=of_k)
            torch.baddbmm(of_v, mask.mul_(weight).mT, g, beta=0, alpha=rescale, out=of_v)
            if ctx.needs_input_grad[4]:
                of_bias = of_score.mul_(rescale).view(kept.shape).sum_to_size(bias.shape)
        return *found, None, of_bias, None, None, None


def _with_graph(
    ctx: Any, query: Tensor, key: Tensor, value: Tensor, kept: Tensor, bias: Tensor | None, gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients, computed by operations of autograd."""
    outputs = []
    for (q, k, v), mask, added in _samples((query, key, value), kept, bias, ctx.spans):
        scores = q * ctx.scale @ k.mT
        if added is not None:
            scores = scores + added if ctx.spans is not None else (scores.view(kept.shape) + added).view(scores.shape)
        outputs.append(keyed_dropout(scores.softmax(-1), ctx.drop_probability, mask) @ v)
    inputs = {i: x for i, x in enumerate((query, key, value, None, bias)) if ctx.needs_input_grad[i]}
    found = torch.autograd.grad(torch.cat(outputs, dim=1), list(inputs.values()), gradient, create_graph=True)
    return tuple(dict(zip(inputs, found, strict=True)).get(i) for i in range(8))


def _samples(
    tensors: Sequence[Tensor], kept: Tensor, bias: Tensor | None, spans: Sequence[Span] | None
) -> Iterator[tuple[Sequence[Tensor], Tensor, Tensor | None]]:
    """The parts of each sample, its mask as (heads, L, S), and its part of the bias."""
    if spans is None:
        yield tensors, kept.reshape(-1, *kept.shape[-2:]), bias
        return
    lengths = [end - begin for begin, end, _ in spans]
    parts = zip(*(tensor.split(lengths, dim=1) for tensor in tensors), strict=True)
    for i, (part, length, (*_, column)) in enumerate(zip(parts, lengths, spans, strict=True)):
        columns, added = slice(column, column + length), bias
        if bias is not None:
            added = (bias if bias.dim() < 4 else bias[i % len(bias)])[..., :length, :length]
        yield part, kept[i, :, columns, columns], added


def _rows(like: Tensor, size: int, spans: Sequence[Span] | None) -> Tensor:
    """Empty, shape (heads, T, size), laid out as what is computed next wants it."""
    if spans is None:
        return like.new_empty(*like.shape[:2], size)
    return like.new_empty(like.shape[1], len(like), size).transpose(0, 1)
