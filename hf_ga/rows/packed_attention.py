"""Attention of packed tokens without padding, by the Triton kernels of `attention_kernel.py` or by
torch (`varlen_attention.py`).

transformers' function of `sdpa` describes what it computes by its arguments and a mask for padded
samples. If these are understood, and the mask hides only padding, later tokens and tokens
beyond a sliding window, the kernels compute the same from packed tokens. Everything else is left to
the function itself.

Shapes: `num_tokens` is the number of real tokens of a micro-batch; keys and values have
`num_kv_heads` heads, which divide the `num_heads` of queries (grouped-query attention).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from hf_ga.draws.dropout.dropout_site import DropoutSite
from hf_ga.draws.hashing import signed
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.rows.options import MAX_HEAD_DIM, AttentionOptions
from hf_ga.rows.varlen_attention import kernel_for

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_OFFSET = 2**31  # elements between the first and the last token of a sample: int32 in the kernel
# Arguments of the attention function that are understood. Position ids add nothing to the mask.
KNOWN_ARGUMENTS = ("scaling", "dropout", "sliding_window", "is_causal", "position_ids")


@dataclass(frozen=True)
class PackedSamples:
    """Where the samples of a packed micro-batch start, how long they are, and their dropout keys.

    The padded micro-batch is padded on the right.

    Attributes:
        lengths: Number of tokens of each sample: int64, of shape (samples,), on the device.
        cu_seqlens: Where each sample starts, then num_tokens: int32, of shape (samples + 1,), on
            the device.
        max_length: Number of tokens of the longest sample.
        is_padded: Whether the padded micro-batch has any padding.
        keys: Keys of the samples' dropout masks: int64, of shape (samples,), on the device.
    """

    lengths: Tensor
    cu_seqlens: Tensor
    max_length: int
    is_padded: bool
    keys: Tensor

    @staticmethod
    def of(attention_mask: Tensor, keys: Tensor) -> "PackedSamples":
        """Compute lengths and starts of packed samples, without waiting for the device.

        Args:
            attention_mask: 1 for each real token and 0 for padding on the right, of shape (samples,
                padded length), on the CPU.
            keys: Keys of the samples' dropout masks, on the device.
        """
        lengths = attention_mask.sum(1)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cpu")
        starts[1:] = lengths.cumsum(0)
        return PackedSamples(
            lengths=lengths.to(keys.device, non_blocking=True),
            cu_seqlens=starts.to(keys.device, non_blocking=True),
            max_length=int(lengths.max()),
            is_padded=int(lengths.min()) < attention_mask.shape[1],
            keys=keys,
        )


class PackedAttention:
    """Computes attention of the packed tokens of one model by the Triton kernels, where possible.

    Args:
        dropout: The model's keyed dropout.
        use_kernel: Whether to use the kernels. None: on a GPU if Triton is installed.

    Attributes:
        num_calls: Number of attention calls that the kernels have computed.
    """

    def __init__(self, dropout: KeyedDraws, use_kernel: bool | None) -> None:
        """Start without a packed micro-batch; `start_micro_batch` sets its samples."""
        self.num_calls = 0
        self._dropout = dropout
        self._use_kernel = use_kernel
        # The samples of this micro-batch. None if its attention must be computed padded.
        self._samples: PackedSamples | None = None
        # (module, is_causal, sliding_window) -> lengths of the longest sample for which its
        # mask was plain, and of the shortest one for which it was not.
        self._plain_lengths: dict[tuple[nn.Module, bool, int | None], tuple[float, float]] = {}

    def can_run(self, device: torch.device) -> bool:
        """Whether the Triton kernels compute attention of packed tokens on a device.

        By default, on a GPU with Triton; otherwise as the user requested.
        """
        if self._use_kernel is None:
            return device.type == "cuda" and has_triton()
        return self._use_kernel

    def start_micro_batch(self, samples: PackedSamples | None) -> None:
        """Set the samples of the next packed micro-batch, whose attention the kernels compute.

        None if its attention must be computed padded.
        """
        self._samples = samples

    def attend(
        self,
        original: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor | None:
        """Compute attention of packed tokens by a kernel, if it supports this call.

        The result equals what an attention function of transformers computes from padded samples.
        With dropout, the draw counts as the next one of the running module.

        Args:
            original: The attention function of transformers that the model would call.
            module: The model's attention module.
            query: Queries, of shape (1, num_heads, num_tokens, head_dim).
            key: Keys, of shape (1, num_kv_heads, num_tokens, head_dim).
            value: Values, of the shape of the keys.
            attention_mask: The mask of the padded samples, or None.
            options: The other arguments of `original`.

        Returns:
            A tensor of shape (1, num_tokens, num_heads, head_dim). None if the kernel does not
            support this call; then no dropout was drawn.
        """
        if self._samples is None or not is_sdpa(original):
            return None
        computed = attention_options(module, query, options)
        if computed is None:
            return None
        if attention_mask is None:  # then the function reads no window either
            computed = replace(computed, sliding_window=None)
        query, key, value = autocast_tensors(query, key, value)
        if not are_supported(query, key, value, self._samples):
            return None
        if not self.matches_mask(module, attention_mask, computed):
            return None
        seeds = None
        if computed.drop_probability > 0:
            site = self._dropout_site(computed.drop_probability, query.shape[1])
            if site is None:
                return None
            self._dropout.skip_draw()  # the kernel draws the mask
            seeds = self._samples.keys ^ signed(site.key)
        self.num_calls += 1
        samples = self._samples
        tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
        kernel = kernel_for(*tokens[:2], samples.max_length, computed)
        output = kernel.apply(*tokens, samples.cu_seqlens, samples.max_length, seeds, computed)
        return output.unsqueeze(0)

    def _dropout_site(self, drop_probability: float, num_heads: int) -> DropoutSite | None:
        """Return the next dropout site of the running module, if the kernel can draw its mask.

        Its mask must be keyed by sample and have the shape (samples, num_heads, queries, keys).
        Otherwise, or if the site is not known, returns None.
        """
        if not self._dropout.needs_mask(drop_probability):
            return None
        site = self._dropout.next_site()
        if site is None or site.sample_dim != 0:
            return None
        shape = site.shape
        return site if len(shape) == 4 and shape[1] == num_heads else None

    def matches_mask(
        self, module: nn.Module, attention_mask: Tensor | None, options: AttentionOptions
    ) -> bool:
        """Whether a mask of padded samples hides exactly what a kernel hides without the mask.

        Such a mask is called plain. Checking it waits for the device. If a module's mask is plain
        for a long sample, it is plain for shorter ones, so it is checked only for lengths between
        those that are known. Without a mask there must be no padding.
        """
        if options.sliding_window is not None and not options.is_causal:
            return False  # the window of a kernel is causal
        samples = self._samples
        if attention_mask is None:
            return not samples.is_padded
        length = samples.max_length
        kind = (options.is_causal, options.sliding_window)
        longest_plain, shortest_other = self._plain_lengths.get((module, *kind), (0, math.inf))
        if length <= longest_plain or length >= shortest_other:
            return length <= longest_plain
        is_plain = is_plain_mask(attention_mask, samples.lengths, *kind)
        known = (length, shortest_other) if is_plain else (longest_plain, length)
        self._plain_lengths[module, *kind] = known
        return is_plain


def is_sdpa(function: Callable | None) -> bool:
    """Whether an attention function is transformers' `sdpa_attention_forward`."""
    # Here: a script without transformers would wait for it when it imports hf_ga.
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return function is sdpa_attention_forward


def attention_options(
    module: nn.Module,
    query: Tensor,
    arguments: dict[str, Any],
) -> AttentionOptions | None:
    """Find out what a call of transformers' `sdpa_attention_forward` computes, to let a kernel do
    it.

    Args:
        module: The model's attention module. Its attribute `is_causal` is the default of that
            argument.
        query: Queries, of shape (..., head_dim).
        arguments: The other arguments of the call.

    Returns:
        What it computes. None if one of its arguments is not known or not supported, or if it is
        unknown whether attention is causal.
    """
    for name, value in arguments.items():
        is_switch = value is None or isinstance(value, bool)
        if name not in KNOWN_ARGUMENTS and not is_switch:
            return None
    drop_probability = arguments.get("dropout", 0.0)
    if drop_probability >= 1:
        return None
    scale = arguments.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if not isinstance(is_causal, bool):
        return None
    sliding_window = arguments.get("sliding_window")
    return AttentionOptions(drop_probability, scale, is_causal, sliding_window)


def autocast_tensors(*tensors: Tensor) -> list[Tensor]:
    """Convert query, key and value to autocast's dtype, as autocast does for a matrix product.

    Autocast does not see the attention kernel, so it would not convert them itself. Without
    autocast, and for float64 tensors, they are unchanged.
    """
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.dtype in DTYPES else x for x in tensors]


def are_supported(query: Tensor, key: Tensor, value: Tensor, samples: PackedSamples) -> bool:
    """Whether the kernels for packed attention support dtype and shape of tensors.

    Args:
        query: Queries, of shape (1, num_heads, num_tokens, head_dim).
        key: Keys, of shape (1, num_kv_heads, num_tokens, head_dim).
        value: Values, of the shape of the keys.
        samples: The packed samples.
    """
    num_tokens, head_dim = query.shape[2:]
    token_stride = max(x.stride(2) for x in (query, key, value))
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape == value.shape
        and key.shape[2:] == (num_tokens, head_dim)
        and head_dim <= MAX_HEAD_DIM
        and samples.max_length * token_stride < MAX_OFFSET
    )


def is_plain_mask(
    mask: Tensor, lengths: Tensor, is_causal: bool, sliding_window: int | None
) -> bool:
    """Whether an attention mask hides padding, later tokens, tokens beyond a sliding window, and
    nothing else, so that a kernel can compute attention of packed tokens without it.

    Rows of the mask that belong to queries in the padding are ignored.

    Args:
        mask: Of shape (samples or 1, 1, width or 1, width), where width is the padded length: bool,
            True where a query attends to a key; or floating-point numbers that are added to the
            scores, 0 or about the lowest one of the dtype.
        lengths: Number of tokens of each sample, padded on the right: int64, of shape (samples,).
        is_causal: Whether later tokens should be hidden.
        sliding_window: How many tokens should be visible, the query itself and those before it.
            None: all.

    >>> mask = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
    >>> is_plain_mask(
    ...     mask.view(1, 1, 3, 3), torch.tensor([2]), is_causal=False, sliding_window=None
    ... )
    True
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        return False
    columns = torch.arange(mask.shape[-1], device=mask.device)
    rows = columns[:, None]
    lengths = lengths.to(mask.device)[:, None, None]
    should_be_visible = columns < lengths
    if is_causal:
        should_be_visible = should_be_visible & (columns <= rows)
    if sliding_window is not None:
        should_be_visible = should_be_visible & (columns > rows - sliding_window)
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        is_visible = mask
        is_hidden = ~mask
    else:
        is_visible = mask == 0
        is_hidden = mask < torch.finfo(mask.dtype).min / 2
    is_as_expected = torch.where(should_be_visible, is_visible, is_hidden)
    is_padding_row = rows >= lengths
    return bool((is_as_expected | is_padding_row).all())
