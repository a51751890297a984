"""Attention of packed samples without dropout by torch's FlashAttention, where it passes a test.

Its backward adds the gradient of the queries over blocks of keys, in any order unless deterministic
algorithms are on. Here they are, as a run that was stopped must go on with the same bits: the sum
is made in ceil(multiprocessors / (samples x heads)) float32 copies, each in order.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_ga.logs import get_logger
from hf_ga.rows.options import AttentionOptions

logger = get_logger(__name__)

MIN_CAPABILITY = (8, 0)  # of a GPU
# Of the test: lengths of the samples, the sliding window, and the errors that are always allowed.
LENGTHS = (1, 17, 130)
WINDOW = 40
NUM_ROUNDINGS = 1 / 16


class VarlenAttention(torch.autograd.Function):
    """Attention by torch; `apply` takes the arguments of `attention_kernel.Attention`."""

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
        """Compute attention, and save what the backward needs; the seeds are not read."""
        from torch.nn.attention.varlen import AuxRequest  # here: importing it takes a second

        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = varlen_function()(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            max_length,
            max_length,
            return_aux=AuxRequest(lse=True),
            scale=options.scale,
            window_size=window_size(options),
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens)
        ctx.max_length = max_length
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, and None for the other arguments of `forward`.

        Calls the operator of torch's own backward: within an operator, autograd records nothing.
        """
        q, k, v, out, lse, cu_seqlens = ctx.saved_tensors
        left, right = window_size(ctx.options)
        random_state = q.new_empty(0)  # of dropout
        mode = torch.get_deterministic_debug_mode()
        torch.set_deterministic_debug_mode("error")  # deterministic algorithms
        try:
            gradients = torch.ops.aten._flash_attention_backward(
                out_grad.contiguous(),
                q,
                k,
                v,
                out,
                lse,
                cu_seqlens,
                cu_seqlens,
                ctx.max_length,
                ctx.max_length,
                0.0,
                (left, right) == (-1, 0),  # causal
                random_state,
                random_state,
                scale=ctx.options.scale,
                window_size_left=left,
                window_size_right=right,
            )
        finally:
            torch.set_deterministic_debug_mode(mode)
        return *gradients, None, None, None, None


@cache
def varlen_function() -> Callable:
    """Return torch's `varlen_attn`, in which heads may share keys: since torch 2.12, if told so."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" in signature(varlen_attn).parameters:
        return partial(varlen_attn, enable_gqa=True)
    return varlen_attn


def window_size(options: AttentionOptions) -> tuple[int, int]:
    """Return how many tokens before and after itself a query attends to; -1: all."""
    left = -1 if options.sliding_window is None else options.sliding_window - 1
    right = 0 if options.is_causal else -1
    return left, right


def kernel_for(
    q: Tensor, k: Tensor, max_length: int, options: AttentionOptions
) -> type[torch.autograd.Function]:
    """Return the function that computes attention: torch's, where it can, else hf_ga's kernels.

    Args:
        q: Queries, of shape (tokens, heads, head_dim).
        k: Keys, of shape (tokens, key heads, head_dim).
        max_length: Number of tokens of the longest sample.
        options: What is computed.
    """
    if is_supported(q, max_length, options):
        group = q.shape[1] // k.shape[1]
        has_window = options.sliding_window is not None
        if is_right(q.device, q.dtype, q.shape[-1], group, options.is_causal, has_window):
            return VarlenAttention
    from hf_ga.rows.attention_kernel import Attention  # here: it needs Triton

    return Attention


def is_supported(q: Tensor, max_length: int, options: AttentionOptions) -> bool:
    """Whether torch has a kernel. Samples of one token are left out: their lse is laid out anew."""
    return (
        options.drop_probability == 0
        and max_length > 1
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.shape[-1] % 8 == 0
        and q.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(q.device) >= MIN_CAPABILITY
    )


@cache
def is_right(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    is_causal: bool,
    has_window: bool,
) -> bool:
    """Whether torch's output and gradients have at most twice the errors of plain attention; if
    not, a warning says so.

    Args:
        device: The GPU.
        dtype: Of queries, keys and values.
        head_dim: Size of a head.
        group: Number of heads that share a key.
        is_causal: Whether a query attends to no later tokens.
        has_window: Whether it attends to a limited number of tokens only.

    Raises:
        OutOfMemoryError: If there is no memory for the test, which says nothing about torch.
    """
    sliding_window = WINDOW if has_window else None
    scale = 1.5 * head_dim**-0.5  # not the default
    options = AttentionOptions(0.0, scale, is_causal, sliding_window)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            errors, plain_errors = _errors(device, dtype, head_dim, group, options)
    except torch.OutOfMemoryError:  # says nothing about the kernel, and is not cached
        raise
    except Exception as error:  # whatever it is: there are other kernels
        failure = repr(error)
    else:
        floor = NUM_ROUNDINGS * torch.finfo(dtype).eps
        pairs = zip(errors, plain_errors, strict=True)
        if all(error <= 2 * plain_error + floor for error, plain_error in pairs):
            return True
        failure = f"relative errors {errors}, those of plain attention are {plain_errors}"
    logger.warning(
        "hf_ga's kernels compute attention, as torch's varlen_attn fails with %s, heads of %d, "
        "%d of them sharing a key, and %s: %s",
        dtype,
        head_dim,
        group,
        options,
        failure,
    )
    return False


def _errors(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, options: AttentionOptions
) -> tuple[list[float], list[float]]:
    """Return relative errors of output and gradients: of torch's, and of plain attention."""
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    numbers = []
    for num_heads in (2 * group, 2, 2, 2 * group):
        shape = (sum(LENGTHS), num_heads, head_dim)
        # They look random, without a draw: between -2 and 2.
        places = torch.arange(shape[0] * shape[1] * shape[2], dtype=torch.float64, device=device)
        uniform = (1e4 * (places + len(numbers) / 4).sin()) % 1
        numbers.append((4 * uniform - 2).view(shape).to(dtype))
    q, k, v, out_grad = numbers
    context = direct_context()
    out = VarlenAttention.forward(context, q, k, v, starts, max(LENGTHS), None, options)
    found = [out, *VarlenAttention.backward(context, out_grad)[:3]]
    plain = _plain_attention(*numbers, options)
    truth = _plain_attention(*(x.double() for x in numbers), options)
    return tuple(
        [float((x - y).norm() / y.norm()) for x, y in zip(way, truth, strict=True)]
        for way in (found, plain)
    )


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, out_grad: Tensor, options: AttentionOptions
) -> list[Tensor]:
    """Return output and gradients of q, k and v of the test's samples, by their equations."""
    lengths = torch.tensor(LENGTHS, device=q.device)
    samples = torch.arange(len(LENGTHS), device=q.device).repeat_interleave(lengths)
    tokens = torch.arange(len(samples), device=q.device)
    visible = samples == samples[:, None]
    if options.is_causal:
        visible &= tokens <= tokens[:, None]
    if options.sliding_window is not None:
        visible &= tokens > tokens[:, None] - options.sliding_window
    group = q.shape[1] // k.shape[1]
    q, out_grad = (x.transpose(0, 1) for x in (q, out_grad))
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.mT * options.scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    weight_grad = out_grad @ v.mT
    mean = (weights * weight_grad).sum(-1, keepdim=True)
    score_grad = weights * (weight_grad - mean) * options.scale
    of_keys = [score_grad.mT @ q, weights.mT @ out_grad]
    of_keys = [x.unflatten(0, (-1, group)).sum(1) for x in of_keys]
    return [x.transpose(0, 1) for x in (weights @ v, score_grad @ k, *of_keys)]


def direct_context() -> SimpleNamespace:
    """Return what stands for the context of an autograd function that is called directly."""
    context = SimpleNamespace(needs_input_grad=[False] * 7)
    context.save_for_backward = lambda *saved: setattr(context, "saved_tensors", saved)
    return context
