"""Attention with dropped weights: torch's own attention and the definition are the oracles, finite differences check the gradients.

Negative controls: dropout without its factor, a bias that is left out, samples that see one another, columns of another sample.
"""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hf_ga.exact.dropped_attention import (
    DroppedAttention,
    DroppedAttentionBySample,
    LastBias,
    attention_weights,
    bias_of,
    causal_bias,
    dropped_attention,
)
from hf_ga.exact.packed_tokens import PackedTokens
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_ga.exact import draws
from hf_ga.exact.hashing import name_key
from hf_ga.exact.masks import keep_mask, keyed_dropout, sample_keys

P = 0.3
LENGTH, WIDTH = 5, 7


ADDED = {"added": (2, 1, WIDTH, WIDTH), "of all": (1, 1, WIDTH, WIDTH), "of heads": (1, 4, WIDTH, WIDTH), "flat": (WIDTH, WIDTH)}


def mask(shape, p=P):
    return keep_mask(sample_keys(0, 0, np.arange(shape[0])), name_key("attention"), shape, 0, p)


def float_mask(kind, length=LENGTH):
    """An attention mask; the third query sees nothing in "nothing seen"; "of all" is shared by the samples."""
    allowed = torch.rand(2, 1, length, WIDTH) > 0.3
    allowed[..., 0] = True
    if kind == "nothing seen":
        allowed[:, :, 2] = False
    if kind == "bool" or kind == "nothing seen":
        return allowed
    if kind in ADDED:
        return torch.randn(ADDED[kind], dtype=torch.float64)[..., :length, :]
    lowest = -torch.inf if kind == "-inf" else torch.finfo(torch.float64).min
    return torch.zeros(2, 1, length, WIDTH, dtype=torch.float64).masked_fill(~allowed, lowest)


def heads(dtype=torch.float64, key_heads=4, length=LENGTH):
    key, value = torch.randn(2, key_heads, WIDTH, 8), torch.randn(2, key_heads, WIDTH, 6)
    return [x.to(dtype).requires_grad_() for x in (torch.randn(2, 4, length, 8), key, value)]


def results(attention, inputs, upstream):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def is_one_function(output):
    """Whether the backward is ours, not one of written-out operations."""
    return "DroppedAttention" in str(output.grad_fn.next_functions) + str(output.grad_fn)


@pytest.mark.parametrize("scale", [8**-0.5, 0.37])
@pytest.mark.parametrize("kind", [None, "causal", "bool", "nothing seen", "added", "-inf", "lowest"])
@pytest.mark.parametrize("written_out", [False, True])
def test_without_dropout_it_is_torchs(written_out, kind, scale):
    """Catches a scale in the wrong place, masks added as 0/1, NaN in fully masked rows."""
    causal, inputs = kind == "causal", heads()
    attn_mask = None if kind in (None, "causal") else float_mask(kind)
    upstream = torch.randn(2, 4, LENGTH, 6, dtype=torch.float64)

    def ours(query, key, value):
        if written_out:
            return attention_weights(query, key, attn_mask, causal, scale) @ value
        kept = torch.ones(2, 4, LENGTH, WIDTH, dtype=torch.bool)
        output = dropped_attention(LastBias(), query, key, value, attn_mask, causal, scale, kept, 0.0)
        assert is_one_function(output)
        return output

    def torchs(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, causal, scale=scale)

    for got, wanted in zip(results(ours, inputs, upstream), results(torchs, inputs, upstream), strict=True):
        assert torch.isfinite(wanted).all()
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("kind", [None, "causal", "nothing seen", *ADDED])
def test_dropout_is_that_of_the_definition(kind, by_sample, monkeypatch):
    """Catches dropout before the softmax or on the output: only the weights are dropped, and not renormalised."""
    length, calls = WIDTH if by_sample else LENGTH, []
    kept, inputs = mask((2, 4, length, WIDTH)), heads(length=length)
    attn_mask = None if kind in (None, "causal") else float_mask(kind, length)
    upstream = torch.randn(2, 4, length, 6, dtype=torch.float64)
    monkeypatch.setattr("hf_ga.exact.dropped_attention.WEIGHTS_OF_SAMPLE", 0)  # queries and keys of one number tell the way

    def ours(query, key, value):
        output = dropped_attention(LastBias(), query, key, value, attn_mask, kind == "causal", 0.4, kept, P)
        calls.append(output.transpose(1, 2).is_contiguous())
        return output

    def by_hand(query, key, value, factor=1 / (1 - P), scale=0.4):
        scores = torch.einsum("bhle,bhse->bhls", query, key) * scale
        allowed = torch.ones(length, WIDTH, dtype=torch.bool).tril() if kind == "causal" else torch.tensor(True)
        if kind == "nothing seen":
            allowed = attn_mask
        scores = scores + attn_mask if kind in ADDED else scores
        shares = scores.exp() * allowed / (scores.exp() * allowed).sum(-1, keepdim=True).clamp_min(1e-30)
        return torch.einsum("bhls,bhse->bhle", shares * kept * factor, value)

    wanted = results(by_hand, inputs, upstream)
    for got, true in zip(results(ours, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-11, atol=1e-13)
    assert calls == [by_sample]
    for wrong in ({"factor": 1.0}, {"scale": 0.5}):
        naive = results(lambda *x, wrong=wrong: by_hand(*x, **wrong), inputs, upstream)
        assert all((n - true).norm() > 0.01 * true.norm() for n, true in zip(naive, wanted, strict=True)), "controls"


@pytest.mark.parametrize("spans", [None, [(0, 3, 0), (3, 7, 2)]], ids=["one", "spans"])
@pytest.mark.parametrize("trained", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=str)
def test_first_and_second_gradients(trained, spans):
    """By finite differences, of query, key, value and bias, also where only one of them is trained."""
    tokens = 7 if spans else WIDTH
    bias = torch.randn(6, 6) if spans else torch.randn(2, 1, LENGTH, WIDTH)
    inputs = [torch.randn(4, 7 if spans else LENGTH, 3), torch.randn(4, tokens, 3), torch.randn(4, tokens, 2), bias]
    inputs = [
        x.double().requires_grad_(bool(t) and not (i == 3 and spans)) for i, (x, t) in enumerate(zip(inputs, trained, strict=True))
    ]
    kept = mask((2, 4, 6, 6)) if spans else mask((2, 2, LENGTH, WIDTH))
    if not any(x.requires_grad for x in inputs):
        inputs[0].requires_grad_()

    def attention(query, key, value, bias):
        if spans:
            return DroppedAttentionBySample.apply(query, key, value, kept, bias, spans, 0.4, P)
        return DroppedAttention.apply(query, key, value, kept, bias, 0.4, P)

    assert torch.autograd.gradcheck(attention, inputs)
    assert torch.autograd.gradgradcheck(attention, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_samples_one_after_the_other_are_padded_samples(left, causal):
    """The same numbers from packed tokens and the same mask, whose columns are those of the padded batch."""
    lengths, width, size = [4, 6, 1], 6, 8
    real = torch.stack([F.pad(torch.ones(n), (width - n, 0) if left else (0, width - n)) for n in lengths]).long()
    tokens, kept = PackedTokens.of(real, torch.device("cpu")), mask((3, 2, width, width))
    inputs, upstream = [torch.randn(3, width, 2, size, dtype=torch.float64) for _ in range(3)], torch.randn(1, 11, 2, size).double()
    bias = tokens.causal_bias if causal else None

    def packed(*inputs, spans=tokens.spans):
        rows = (tokens.pack(x)[0].transpose(0, 1) for x in inputs)
        return DroppedAttentionBySample.apply(*rows, kept, bias, spans, 0.4, P).transpose(0, 1)[None]

    def padded(*inputs):
        allowed = real.bool()[:, None, None, :].expand(3, 1, width, width)
        allowed = allowed & torch.ones(width, width, dtype=torch.bool).tril() if causal else allowed
        query, key, value = (x.transpose(1, 2) for x in inputs)
        weights = attention_weights(query, key, allowed, False, 0.4)
        return tokens.pack((keyed_dropout(weights, P, kept) @ value).transpose(1, 2))

    wanted = results(padded, inputs, upstream)
    for got, true in zip(results(packed, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-14)
    other_columns = [(begin, end, 0 if left else width - end + begin) for begin, end, _ in tokens.spans]
    naive = results(lambda *x: packed(*x, spans=other_columns), inputs, upstream)
    assert (naive[0] - wanted[0]).norm() > 0.01 * wanted[0].norm(), "control"


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_what_torchs_function_is_replaced_by(key_heads):
    """Its default scale, and groups of heads that share a key (each repeated, not tiled)."""
    kept, inputs = mask((2, 4, LENGTH, WIDTH)), heads(key_heads=key_heads)
    upstream = torch.randn(2, 4, LENGTH, 6, dtype=torch.float64)
    places = SimpleNamespace(is_keyed=lambda p: True, mask=lambda shape, p: kept, last_bias=LastBias())

    def ours(query, key, value):
        return draws.attention(places, None, query, key, value, None, P, enable_gqa=True)

    def by_hand(query, key, value):
        group = 4 // key_heads
        outputs = []
        for head in range(4):
            scores = query[:, head] @ key[:, head // group].mT / math.sqrt(8)
            outputs.append((scores.softmax(-1) * kept[:, head] / (1 - P)) @ value[:, head // group])
        return torch.stack(outputs, dim=1)

    for got, wanted in zip(results(ours, inputs, upstream), results(by_hand, inputs, upstream), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_where_samples_lie():
    holes = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]])
    assert PackedTokens.of(holes, torch.device("cpu")).spans == [(0, 2, 0), (2, 5, 1), (5, 6, 1), (6, 10, 0)]
    holes[3, 1] = 0
    assert PackedTokens.of(holes, torch.device("cpu")).spans is None


def test_neither_dropped_weights_nor_copies_are_kept():
    """Of what is saved for the backward: the bytes beside inputs and mask are those of the weights."""
    tokens = 12
    given = [torch.randn(4, tokens, 8, requires_grad=True) for _ in range(3)]
    kept, spans = mask((2, 4, 6, 6)), [(0, 6, 0), (6, 12, 0)]

    def own_bytes(function, *inputs):
        saved, known = {}, {x.data_ptr() for x in (*given, kept, *inputs)}
        with saved_tensors_hooks(lambda x: saved.setdefault(x.data_ptr(), x) if x.data_ptr() not in known else x, lambda x: x):
            function()
        return sum(x.nbytes for x in saved.values())

    weights = 2 * 4 * 6 * 6 * 4
    assert own_bytes(lambda: DroppedAttentionBySample.apply(*given, kept, None, spans, 0.4, P)) == weights
    at_once = [torch.randn(8, 6, 8, requires_grad=True) for _ in range(3)]
    assert own_bytes(lambda: DroppedAttention.apply(*at_once, kept, None, 0.4, P), *at_once) == weights
    query, key, value = (x.unflatten(1, (2, 6)).transpose(0, 1) for x in given)
    plain = own_bytes(lambda: keyed_dropout(attention_weights(query, key, None, False, 0.4), P, kept) @ value)
    assert plain > 2 * weights, "control"


@pytest.mark.parametrize("case", ["float64 value", "shared keys", "autocast", "bfloat16"])
def test_other_inputs_are_computed_as_written(case):
    query, key, value = (x.detach() for x in heads(torch.float32))
    kept = mask((2, 4, LENGTH, WIDTH))
    if case == "float64 value":
        value = value.double()
        query, key = query.double(), key.double()
    if case == "shared keys":
        key, value = key[:1], value[:1]
    if case == "bfloat16":
        query, key, value = (x.bfloat16() for x in (query, key, value))
    query.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        got = dropped_attention(LastBias(), query, key, value, None, False, 0.4, kept, P)
        wanted = keyed_dropout(attention_weights(query, key, None, False, 0.4), P, kept) @ value
    assert is_one_function(got) == (case == "float64 value") and got.dtype == wanted.dtype
    torch.testing.assert_close(
        got, wanted, rtol=0 if case != "float64 value" else 1e-12, atol=0 if case != "float64 value" else 1e-14
    )


def test_a_bias_is_made_once_for_the_layers_of_a_forward():
    last, allowed = LastBias(), float_mask("bool")
    bias, has_keys = last.of(allowed, torch.float32)
    assert last.of(allowed, torch.float32)[0] is bias and has_keys is None
    assert torch.equal(bias, bias_of(allowed, torch.float32)[0])
    assert last.of(allowed, torch.float64)[0].dtype == torch.float64
    assert last.of(allowed.clone(), torch.float64)[0] is not bias
    last.of(allowed, torch.float32)
    allowed[:, :, 2] = False  # changed in place
    bias, has_keys = last.of(allowed, torch.float32)
    assert not has_keys[:, :, 2].any() and torch.equal(bias[:, :, 2], torch.zeros(2, 1, WIDTH))
    trained = float_mask("added").requires_grad_()
    with torch.no_grad():
        assert not last.of(trained, torch.float64)[0].requires_grad
    assert last.of(trained, torch.float64)[0].requires_grad, (
        "as activation checkpointing computes a layer: without a graph, then with"
    )
    last.of(allowed, torch.float32)
    last.forget()
    assert last.of(allowed, torch.float32)[0] is not bias


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 2, 5, 8)], ids=str)
def test_any_number_of_axes(shape):
    inputs, kept = [torch.randn(shape, dtype=torch.float64) for _ in range(3)], mask((*shape[:-1], 5))
    ours = results(lambda *x: dropped_attention(LastBias(), *x, None, True, 0.4, kept, P), inputs, torch.ones(shape).double())
    defined = results(
        lambda q, k, v: keyed_dropout(attention_weights(q, k, None, True, 0.4), P, kept) @ v, inputs, torch.ones(shape)
    )
    for got, true in zip(ours, defined, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-14)


def test_what_causal_attention_adds_is_made_once_for_its_layers():
    last, like = LastBias(), torch.zeros((), dtype=torch.float64)
    first = last.causal(4, 4, like)
    assert torch.equal(first.exp(), torch.ones(4, 4, dtype=torch.float64).tril()) and last.causal(4, 4, like) is first
    for shape, of in (((5, 5), like), ((5, 5), like.float()), ((2, 5), like.float())):
        other = last.causal(*shape, of)
        assert other.dtype == of.dtype and torch.equal(other, causal_bias(*shape, of))
    first = last.causal(4, 4, like)
    last.forget()
    assert last.causal(4, 4, like) is not first


@pytest.mark.parametrize("threads", [1, 2])
def test_one_sample_after_the_other_where_it_is_large(threads, monkeypatch):
    """As large as the constant for each thread, and not where a bias is trained, whose gradient is taken as a whole."""
    before = torch.get_num_threads()
    query, key, value = heads(length=WIDTH)
    bias = torch.randn(2, 1, WIDTH, WIDTH, dtype=torch.float64)

    def by_sample(weights, bias):
        monkeypatch.setattr("hf_ga.exact.dropped_attention.WEIGHTS_OF_SAMPLE", weights)
        output = dropped_attention(LastBias(), query, key, value, bias, False, 0.4, mask((2, 4, WIDTH, WIDTH)), P)
        return output.transpose(1, 2).is_contiguous()

    torch.set_num_threads(threads)
    try:
        each = 4 * WIDTH * WIDTH / threads
        assert by_sample(each, bias) and not by_sample(each * 1.01, bias)
        assert not by_sample(each, bias.requires_grad_())
    finally:
        torch.set_num_threads(before)


def test_the_factor_of_dropout_keeps_the_mean():
    """Over many masks the output is that without dropout: catches a factor that is applied twice, or to the wrong product."""
    query, key, value = (torch.randn(400, 2, 8, 4).double() for _ in range(3))
    query, key, value = (x[:1].expand(400, -1, -1, -1) for x in (query, key, value))
    output = dropped_attention(LastBias(), query, key, value, None, False, 0.4, mask((400, 2, 8, 8)), P)
    exact = F.scaled_dot_product_attention(query[0], key[0], value[0], scale=0.4)
    sigma = output.std(0) / math.sqrt(400)
    assert ((output.mean(0) - exact).abs() < 5 * sigma).all()


def test_checkpointed_layers_share_a_trained_bias():
    """Two layers with one bias, a third with another: run again, the last layer first, each has as many operations as before."""
    last, kept = LastBias(), mask((2, 2, 8, 8))
    biases = [torch.zeros(1, 2, 8, 8, requires_grad=True) for _ in range(2)]

    def layer(x, bias):
        return dropped_attention(last, x, x, x, bias, False, 0.4, kept, P)

    def gradients(call):
        x = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        shared, other = (bias.abs() + bias for bias in biases)
        y = x
        for bias in (shared, shared, other):
            y = call(layer, y, bias)
        return torch.autograd.grad(y.square().sum(), [x, *biases])

    plain = gradients(lambda function, *arguments: function(*arguments))
    again = gradients(partial(checkpoint, use_reentrant=False))
    assert all(map(torch.equal, plain, again))
