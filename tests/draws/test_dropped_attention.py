"""Attention with dropped weights: torch's own attention and the definition are the oracles, finite
differences check the gradients.

Negative controls: dropout without its factor, another scale.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_ga.draws.dropout.dropout_functions import attention, dropped_attention
from hf_ga.draws.dropout.masks import keep_mask, sample_keys
from hf_ga.rows.fused_attention import DroppedAttention, FusedAttention

P = 0.3
LENGTH = 5
WIDTH = 7
ADDED = {
    "added": (2, 1),
    "of all": (1, 1),
    "of heads": (1, 4),
    "flat": (),
}  # leading axes of a mask that is added
KINDS = [None, "causal", "bool", "nothing seen", "-inf", "lowest", *ADDED]


def fused(*arguments):
    """As keyed dropout calls it in a scope."""
    return FusedAttention()._attend(*arguments)


WAYS = {"defined": dropped_attention, "fused": fused}


def attend(way, inputs, kept, *arguments, p=P, **more):
    """As torch's function is replaced in a scope; the arguments are those of torch behind query,
    key and value.
    """
    masks = SimpleNamespace(needs_mask=lambda p: True, mask=lambda shape, p: kept, attend=way)
    return attention(masks, None, *inputs, *arguments, dropout_p=p, **more)


def mask(shape, p=P):
    return keep_mask(sample_keys(0, 0, np.arange(shape[0])), 0x9E3779B97F4A7C15, shape, 0, p)


def mask_of(kind):
    """An attention mask; the third query sees nothing in "nothing seen"; "of all" is shared by the
    samples.
    """
    if kind in (None, "causal"):
        return None
    if kind in ADDED:
        return torch.randn(*ADDED[kind], LENGTH, WIDTH, dtype=torch.float64)
    allowed = torch.rand(2, 1, LENGTH, WIDTH) > 0.3
    allowed[..., 0] = True
    if kind == "nothing seen":
        allowed[:, :, 2] = False
    if kind in ("bool", "nothing seen"):
        return allowed
    lowest = -torch.inf if kind == "-inf" else torch.finfo(torch.float64).min
    return torch.zeros(2, 1, LENGTH, WIDTH, dtype=torch.float64).masked_fill(~allowed, lowest)


def heads(dtype=torch.float64, key_heads=4):
    key = torch.randn(2, key_heads, WIDTH, 8)
    value = torch.randn(2, key_heads, WIDTH, 6)
    return [x.to(dtype).requires_grad_() for x in (torch.randn(2, 4, LENGTH, 8), key, value)]


def results(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upstream)]


def torchs(query, key, value, kept, p=P, attn_mask=None, causal=False, scale=None):
    """torch's own, with dropped weights: it tells its weights where the values are the identity."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    identity = torch.eye(WIDTH, dtype=torch.float64).expand(*key.shape[:2], -1, -1)
    weights = F.scaled_dot_product_attention(
        query, key, identity, attn_mask, 0.0, causal, scale=scale
    )
    return weights * kept / (1 - p) @ value


def is_one_function(output):
    """Whether the backward is ours, not one of written-out operations."""
    return "DroppedAttention" in str(output.grad_fn.next_functions) + str(output.grad_fn)


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_torchs_with_dropped_weights(way, kind, p):
    """Catches a scale in the wrong place, masks added as 0/1, NaN in fully masked rows, and dropout
    before the softmax or on the
    output: only the weights are dropped, and not renormalised.
    """
    causal = kind == "causal"
    inputs = heads()
    attn_mask = mask_of(kind)
    kept = mask((2, 4, LENGTH, WIDTH), p)

    def ours(*inputs):
        output = attend(WAYS[way], inputs, kept, attn_mask, p=p, is_causal=causal, scale=0.37)
        assert is_one_function(output) == (way == "fused")
        return output

    by_torch = partial(torchs, kept=kept, p=p, attn_mask=attn_mask, causal=causal, scale=0.37)
    wanted = results(by_torch, inputs)
    for got, true in zip(results(ours, inputs), wanted, strict=True):
        assert torch.isfinite(true).all()
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-13)
    for wrong in ({"p": p + 0.1}, {"scale": 0.5}):
        naive = results(partial(by_torch, **wrong), inputs)
        assert all(
            (n - true).norm() > 0.01 * true.norm() for n, true in zip(naive, wanted, strict=True)
        ), "controls"


@pytest.mark.parametrize(
    "trained", [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)], ids=str
)
def test_gradients_by_finite_differences(trained):
    """Of query, key, value and bias, also where only one of them is trained."""
    shapes = (4, LENGTH, 3), (4, WIDTH, 3), (4, WIDTH, 2), (2, 1, LENGTH, WIDTH)
    inputs = [
        torch.randn(shape).double().requires_grad_(bool(t))
        for shape, t in zip(shapes, trained, strict=True)
    ]
    kept = mask((2, 2, LENGTH, WIDTH))

    assert torch.autograd.gradcheck(
        lambda q, k, v, bias: DroppedAttention.apply(q, k, v, kept, bias, 0.4, P), inputs
    )


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("way", WAYS)
def test_what_torchs_function_is_replaced_by(way, key_heads):
    """Its default scale, and groups of heads that share a key (each repeated, not tiled)."""
    kept = mask((2, 4, LENGTH, WIDTH))
    inputs = heads(key_heads=key_heads)
    ours = results(lambda *inputs: attend(WAYS[way], inputs, kept, enable_gqa=True), inputs)
    for got, wanted in zip(ours, results(partial(torchs, kept=kept), inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_neither_dropped_weights_nor_copies_are_kept():
    """Of what is saved for the backward: the bytes beside inputs and mask are those of the
    weights.
    """
    query, key, value = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))
    kept = mask((2, 4, 6, 6))
    weights = 2 * 4 * 6 * 6 * 4

    def own_bytes(way):
        saved = {}
        known = {x.data_ptr() for x in (query, key, value, kept)}
        with saved_tensors_hooks(
            lambda x: saved.setdefault(x.data_ptr(), x) if x.data_ptr() not in known else x,
            lambda x: x,
        ):
            way(query, key, value, kept, None, 0.4, P)
        return sum(x.nbytes for x in saved.values())

    assert own_bytes(fused) == weights
    assert own_bytes(dropped_attention) > 2 * weights, "control"


@pytest.mark.parametrize("case", ["float64", "shared keys", "autocast", "bfloat16"])
def test_other_inputs_are_computed_as_written(case):
    query, key, value = (x.detach() for x in heads(torch.float32))
    if case in ("float64", "bfloat16"):
        query, key, value = (x.to(getattr(torch, case)) for x in (query, key, value))
    if case == "shared keys":
        key = key[:1]
        value = value[:1]
    arguments = query.requires_grad_(), key, value, mask((2, 4, LENGTH, WIDTH)), None, 0.4, P
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        got = fused(*arguments)
        wanted = dropped_attention(*arguments)
    assert is_one_function(got) == (case == "float64")
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(
        got, wanted, rtol=1e-12 * (case == "float64"), atol=1e-14 * (case == "float64")
    )


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 2, 5, 8)], ids=str)
def test_any_number_of_axes(shape):
    inputs = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    kept = mask((*shape[:-1], 5))
    defined, ours = (
        results(lambda *x, w=w: attend(w, x, kept, is_causal=True, scale=0.4), inputs)
        for w in WAYS.values()
    )
    for got, true in zip(ours, defined, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-14)


def test_checkpointed_layers_share_a_trained_bias():
    """Two layers with one bias, a third with another: run again, the last layer first, each has as
    many operations as before.
    """
    kept = mask((2, 2, 8, 8))
    biases = [torch.zeros(1, 2, 8, 8, requires_grad=True) for _ in range(2)]

    def gradients(call):
        x = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
        shared, other = (bias.abs() + bias for bias in biases)
        y = x
        for bias in (shared, shared, other):
            y = call(lambda y, bias: fused(y, y, y, kept, bias, 0.4, P), y, bias)
        return torch.autograd.grad(y.square().sum(), [x, *biases])

    plain = gradients(lambda function, *arguments: function(*arguments))
    again = gradients(partial(checkpoint, use_reentrant=False))
    assert all(map(torch.equal, plain, again))
