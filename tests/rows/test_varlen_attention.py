"""Attention of packed samples by torch, of which a CPU has no kernel: a padded reference stands in
for it, right or wrong. Torch's own kernel has a test that needs a GPU.
"""

import logging
from types import SimpleNamespace

import helpers as h
import pytest
import test_packed_attention as packed
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_ga.rows import varlen_attention as varlen
from hf_ga.rows.compiling import compile_layers
from hf_ga.rows.fused_attention import DroppedAttention
from hf_ga.rows.options import AttentionOptions
from hf_ga.rows.varlen_attention import VarlenAttention, direct_context, kernel_for

CPU = torch.device("cpu")
KINDS = [(1, True, False), (3, True, False), (1, False, False), (2, True, True)]
BFLOAT16_GPU = SimpleNamespace(
    dtype=torch.bfloat16, shape=(9, 2, 64), is_cuda=True, device=torch.device("cuda")
)


def pad(x, lengths, group=1):
    """Packed tokens as padded samples, of shape (samples x heads, width, dim)."""
    padded = pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2)
    return padded.repeat_interleave(group, 1).flatten(0, 1)


def pack(padded, lengths):
    samples = padded.unflatten(0, (len(lengths), -1)).transpose(1, 2)
    return torch.cat([sample[:length] for sample, length in zip(samples, lengths, strict=True)])


def reference(later=0, factor=1.0, error=None):
    """A function like `VarlenAttention`, on padded samples in its inputs' precision.

    later: how many later tokens a query of causal attention sees. factor: of the gradients.
    """

    class Reference(torch.autograd.Function):
        num_calls = 0

        @staticmethod
        def forward(ctx, q, k, v, cu_seqlens, max_length, seeds, options):
            Reference.num_calls += 1
            if error is not None:
                raise error
            ctx.lengths = cu_seqlens.diff().tolist()
            ctx.group = q.shape[1] // k.shape[1]
            columns = torch.arange(max_length)
            rows = columns[:, None]
            lengths = cu_seqlens.diff()[:, None, None]
            hidden = columns >= lengths
            if options.is_causal:
                hidden = hidden | (columns > rows + later)
            if options.sliding_window is not None:
                hidden = hidden | (columns <= rows - options.sliding_window)
            hidden = (hidden & (rows < lengths))[:, None]
            kept = torch.ones(len(lengths), q.shape[1], max_length, max_length, dtype=torch.bool)
            bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
            of_keys = (pad(x, ctx.lengths, ctx.group) for x in (k, v))
            ctx.inner = direct_context()
            output = DroppedAttention.forward(
                ctx.inner, pad(q, ctx.lengths), *of_keys, kept, bias, options.scale, 0.0
            )
            return pack(output, ctx.lengths)

        @staticmethod
        def backward(ctx, out_grad):
            found = DroppedAttention.backward(ctx.inner, pad(out_grad, ctx.lengths))[:3]
            of_q, *of_keys = (factor * pack(x, ctx.lengths) for x in found)
            of_keys = [x.unflatten(1, (-1, ctx.group)).sum(2) for x in of_keys]
            return of_q, *of_keys, None, None, None, None

    return Reference


@pytest.fixture
def replaced(monkeypatch):
    """Replace torch's kernel by one that a CPU has."""
    is_right = varlen.is_right

    def replace(**mistakes):
        kernel = reference(**mistakes)
        monkeypatch.setattr(varlen, "VarlenAttention", kernel)
        monkeypatch.setattr(
            varlen, "is_supported", lambda q, n, options: not options.drop_probability
        )
        is_right.cache_clear()
        return kernel

    yield replace
    is_right.cache_clear()


@pytest.mark.parametrize("name", packed.MODELS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_loss_and_gradient_are_those_of_padded_samples(name, is_compiled, replaced):
    build, make = packed.MODELS[name]
    model = build(0.0, **packed.ONE_LAYER)
    samples = packed.samples_of(make)
    truth, value, full = packed.padded_gradients(model, samples)
    kernel = replaced()
    if is_compiled:
        compile_layers(model, backend="eager")
    gradients, loss = packed.Windows(model, samples).gradient()
    # The test, and micro-batches with padding; rows are computed again in the backward.
    assert kernel.num_calls == (1 + 3 * 2 if is_compiled else 1 + 2)
    h.assert_promise_1(gradients, full, truth)
    assert loss == pytest.approx(value, rel=1e-6)
    torch._dynamo.reset()


MISTAKES = [{"later": 1}, {"factor": 1.01}, {"error": RuntimeError("no kernel image")}]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_leaves_attention_to_our_kernels(mistake, replaced, caplog, monkeypatch):
    model = h.gpt2(0.0)
    samples = packed.samples_of(h.token_samples)
    truth, _, full = packed.padded_gradients(model, samples)
    kernel = replaced(**mistake)
    windows = packed.Windows(model, samples)
    with caplog.at_level(logging.WARNING):
        gradients, _ = windows.gradient()
    h.assert_promise_1(gradients, full, truth)
    assert kernel.num_calls == 1, "the test's only"
    (message,) = caplog.messages
    assert "varlen_attn fails with torch.float32" in message
    assert ("no kernel image" if "error" in mistake else "relative errors") in message
    monkeypatch.setattr(varlen, "is_right", lambda *kind: True)
    with pytest.raises((AssertionError, RuntimeError), match=r"all parameters|no kernel image"):
        h.assert_promise_1(windows.gradient()[0], full, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "is_causal", "has_window"), KINDS)
def test_all_kinds_are_tested(dtype, group, is_causal, has_window, replaced):
    """Without a draw, and in full precision within autocast."""
    kind = (CPU, dtype, 16, group, is_causal, has_window)
    state = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        replaced()
        assert varlen.is_right(*kind)
        replaced(factor=1.05 if dtype == torch.bfloat16 else 1.01)
        assert not varlen.is_right(*kind)
        replaced(factor=torch.nan)
        assert not varlen.is_right(*kind)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize(
    ("options", "window"),
    [
        (AttentionOptions(0.0, 0.1, True), (-1, 0)),
        (AttentionOptions(0.0, 0.1, False), (-1, -1)),
        (AttentionOptions(0.0, 0.1, True, 4), (3, 0)),
    ],
)
def test_torch_has_the_functions_that_are_called(options, window, mode, monkeypatch):
    """Meta tensors have shapes only. The backward is deterministic, whatever the user's setting."""
    q, k, v, out_grad = (
        torch.empty(20, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2, 4)
    )
    cu_seqlens = torch.empty(4, dtype=torch.int32, device="meta")
    context = direct_context()
    out = VarlenAttention.forward(context, q, k, v, cu_seqlens, 10, None, options)
    assert out.shape == q.shape
    original = torch.ops.aten._flash_attention_backward
    modes = []

    def backward(*args, window_size_left, window_size_right, **more):
        modes.append(torch.get_deterministic_debug_mode())
        assert (window_size_left, window_size_right) == window
        assert args[11] == (window == (-1, 0))
        windows = {"window_size_left": window_size_left, "window_size_right": window_size_right}
        return original(*args, **windows, **more)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    torch.set_deterministic_debug_mode(mode)
    try:
        gradients = VarlenAttention.backward(context, out_grad)
        assert torch.get_deterministic_debug_mode() == mode
        context.saved_tensors = [torch.empty(x.shape) for x in context.saved_tensors]
        with pytest.raises(NotImplementedError):
            VarlenAttention.backward(context, torch.empty(out_grad.shape))  # on a CPU
        assert torch.get_deterministic_debug_mode() == mode
    finally:
        torch.set_deterministic_debug_mode(0)
    assert modes == [2, 2]
    assert [x.shape for x in gradients[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("change", "is_supported"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"shape": (9, 2, 60)}, False),
        ({"is_cuda": False}, False),
        ({"capability": (7, 5)}, False),
        ({"max_length": 1}, False),
        ({"dropout": 0.1}, False),
    ],
)
def test_what_torch_supports(change, is_supported, monkeypatch):
    values = {"capability": (9, 0), "max_length": 5, "dropout": 0.0, **vars(BFLOAT16_GPU), **change}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: values["capability"])
    options = AttentionOptions(values["dropout"], 0.1, True)
    query = SimpleNamespace(**values)
    assert varlen.is_supported(query, values["max_length"], options) == is_supported


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "is_causal", "has_window"), KINDS)
def test_torchs_own_kernel_is_right_and_gives_the_same_bits(dtype, group, is_causal, has_window):
    """Of long samples, whose gradients are sums over many blocks of keys."""
    from hf_ga.rows.attention_kernel import Attention

    options = AttentionOptions(0.0, 0.125, is_causal, 300 if has_window else None)
    cu_seqlens = torch.tensor([0, 1500, 1507, 3548], dtype=torch.int32, device="cuda")
    max_length = 2041
    q, k, v, out_grad = (
        torch.randn(3548, heads, 64, dtype=dtype, device="cuda")
        for heads in (2 * group, 2, 2, 2 * group)
    )

    def compute(kernel):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = kernel.apply(*leaves, cu_seqlens, max_length, None, options)
        return [out.detach(), *torch.autograd.grad(out, leaves, out_grad)]

    kernel = kernel_for(q, k, max_length, options)
    assert kernel is VarlenAttention
    first = compute(kernel)
    for _ in range(20):
        assert all(map(torch.equal, first, compute(kernel)))
    for found, ours in zip(first, compute(Attention), strict=True):
        assert float((found - ours).norm() / ours.norm()) < 4 * torch.finfo(dtype).eps
