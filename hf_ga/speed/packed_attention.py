"""Attention of packed tokens without padding, by the Triton kernels of `attention_kernel.py`.

An attention function of transformers describes what it computes by its arguments and a mask for
padded samples. Where these are understood, and the mask says no more than "causal", "the last so
many tokens" and "no padding", the kernels compute the same from packed tokens. Everything else is
left to the function itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_ga.exact.dropout import DropoutSite, KeyedDropout
from hf_ga.exact.hashing import signed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_SIZE = 256
MOST_ELEMENTS = 2**31  # between the first and the last token of a sample
# Arguments of attention functions that are understood. Position ids say nothing that the mask does
# not say.
UNDERSTOOD = ("scaling", "dropout", "sliding_window", "softcap", "is_causal", "position_ids")


@dataclass(frozen=True)
class PackedSamples:
    """The samples of a packed micro-batch that is padded on the right.

    Attributes:
        lengths: int64, shape (n,), on the device.
        cu_seqlens: int32, shape (n + 1,), on the device: where each sample starts, and T.
        max_length: the most tokens of a sample.
        is_padded: whether the padded micro-batch has padding at all.
        keys: int64, shape (n,), on the device: keys of the samples' dropout masks.
    """

    lengths: Tensor
    cu_seqlens: Tensor
    max_length: int
    is_padded: bool
    keys: Tensor

    @staticmethod
    def of(attention_mask: Tensor, keys: Tensor) -> "PackedSamples":
        """Make it from a mask of shape (n, S) on the host, without device synchronization."""
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


@dataclass(frozen=True)
class Arguments:
    """What a call of an attention function computes; see `attention_kernel.attention`."""

    drop_probability: float
    scale: float
    is_causal: bool
    window: int | None
    softcap: float | None


class PackedAttention:
    """Computes attention of the packed tokens of one model by the kernels, where it can.

    Attributes:
        num_calls: calls that the kernels have computed.
    """

    def __init__(self, dropout: KeyedDropout, use_kernel: bool | None) -> None:
        self.num_calls = 0
        self._dropout = dropout
        self._use_kernel = use_kernel
        self._samples: PackedSamples | None = None  # of this micro-batch
        # Masks of this micro-batch that were compared, for what, and whether they are plain.
        self._compared: list[tuple[Tensor, tuple[bool, int | None], bool]] = []
        # The most tokens of a sample for which a module's mask was seen to be plain.
        self._plain_up_to: dict[tuple[nn.Module, bool, int | None], int] = {}

    def can_run(self, device: torch.device) -> bool:
        """Whether the kernels run on this device."""
        if self._use_kernel is None:
            return device.type == "cuda" and has_triton()
        return self._use_kernel

    def start(self, samples: PackedSamples | None) -> None:
        """Begin a micro-batch. samples: None if its attention needs padded samples."""
        self._samples = samples
        self._compared.clear()

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
        """Compute what an attention function of transformers computes from padded samples.

        Args:
            original: the attention function.
            module: whose attention it is.
            query: shape (1, heads, T, size).
            key: shape (1, key heads, T, size).
            value: shape (1, key heads, T, size).
            attention_mask: for the padded samples.
            options: the other arguments of `original`.

        Returns:
            shape (1, T, heads, size); None if the kernels cannot compute it, and no dropout was
            drawn.
        """
        if self._samples is None:
            return None
        arguments = arguments_of(original, module, query, attention_mask, options)
        if arguments is None:
            return None
        tensors = autocast_tensors(query, key, value)
        if not are_supported(*tensors, self._samples):
            return None
        if not self._is_plain(module, attention_mask, arguments):
            return None
        seeds = None
        if arguments.drop_probability > 0:
            site = self._site(arguments.drop_probability, query.shape[1])
            if site is None:
                return None
            self._dropout.skip_draw()
            seeds = self._samples.keys ^ signed(site.key)

        from hf_ga.speed.attention_kernel import attention  # here: it needs Triton

        self.num_calls += 1
        out = attention(
            *(x[0].transpose(0, 1) for x in tensors),
            self._samples.cu_seqlens,
            self._samples.max_length,
            seeds=seeds,
            drop_probability=arguments.drop_probability,
            scale=arguments.scale,
            is_causal=arguments.is_causal,
            window=arguments.window,
            softcap=arguments.softcap,
        )
        return out.unsqueeze(0)

    def _site(self, drop_probability: float, num_heads: int) -> DropoutSite | None:
        """Return the site of the next draw, if it drops attention weights sample by sample."""
        if not self._dropout.needs_mask(drop_probability):
            return None
        site = self._dropout.next_site()
        if site is None or site.sample_dim != 0:
            return None
        shape = site.shapes[0]
        return site if len(shape) == 4 and shape[1] == num_heads else None

    def _is_plain(
        self, module: nn.Module, attention_mask: Tensor | None, arguments: Arguments
    ) -> bool:
        """Whether a mask says what the arguments say.

        Comparing them waits for the device. A mask that is plain for a long sample is so for
        shorter ones, so that a module's masks are compared only where a sample is longer than all
        before.
        """
        samples = self._samples
        if attention_mask is None:
            return not samples.is_padded
        kind = (arguments.is_causal, arguments.window)
        if samples.max_length <= self._plain_up_to.get((module, *kind), 0):
            return True
        is_plain = self._compare(attention_mask, kind)
        if is_plain:
            self._plain_up_to[module, *kind] = samples.max_length
        return is_plain

    def _compare(self, attention_mask: Tensor, kind: tuple[bool, int | None]) -> bool:
        """Call `is_plain_mask` once for all layers that share a mask."""
        for mask, compared_kind, is_plain in self._compared:
            if mask is attention_mask and compared_kind == kind:
                return is_plain
        is_plain = is_plain_mask(attention_mask, self._samples.lengths, *kind)
        self._compared.append((attention_mask, kind, is_plain))
        return is_plain


def arguments_of(
    original: Callable,
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Arguments | None:
    """Find out what a call of an attention function computes; None if that is not understood.

    Known functions are transformers' `sdpa` and the models' own `eager_attention_forward`. A
    model's function may do more than its arguments say: the proof compares loss and gradient.
    """
    is_sdpa = original is sdpa_attention_forward
    if not is_sdpa and getattr(original, "__name__", "") != "eager_attention_forward":
        return None
    for name, value in options.items():
        is_switch = value is None or isinstance(value, bool)
        if name not in UNDERSTOOD and not is_switch:
            return None
    softcap = options.get("softcap")
    if is_sdpa and softcap is not None:
        return None  # it raises an error
    drop_probability = options.get("dropout", 0.0)
    if not is_sdpa and not module.training:
        drop_probability = 0.0
    if drop_probability >= 1:
        return None
    scale = options.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if not isinstance(is_causal, bool):
        return None
    window = options.get("sliding_window")
    if attention_mask is None:
        # `sdpa` then goes by `is_causal`, the other functions attend to everything.
        is_causal = is_causal and is_sdpa
        window = None
    if window is not None and not is_causal:
        return None
    return Arguments(drop_probability, scale, is_causal, window, softcap)


def autocast_tensors(*tensors: Tensor) -> list[Tensor]:
    """Convert tensors to the precision of matrix products."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.dtype in DTYPES else x for x in tensors]


def are_supported(query: Tensor, key: Tensor, value: Tensor, samples: PackedSamples) -> bool:
    """Whether the kernels support these tensors, and the packed samples are on their device."""
    num_heads, num_tokens, size = query.shape[1:]
    device = samples.keys.device
    token_stride = max(x.stride(2) for x in (query, key, value))
    return (
        query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.device == key.device == value.device == device
        and key.shape == value.shape
        and key.shape[2:] == (num_tokens, size)
        and num_heads % key.shape[1] == 0
        and size <= LARGEST_HEAD_SIZE
        and samples.max_length * token_stride < MOST_ELEMENTS
    )


def is_plain_mask(mask: Tensor, lengths: Tensor, is_causal: bool, window: int | None) -> bool:
    """Whether a mask of padded samples hides padding, later tokens and those before the window, and
    nothing else. What it says about the rows of padding is ignored.

    Args:
        mask: shape (n or 1, 1, S or 1, S): bool, True where a query attends to a key; or numbers to
            add to the scores, 0 or about the lowest.
        lengths: int64, shape (n,): the tokens of each sample, which is padded on the right.
        is_causal: whether later tokens are hidden.
        window: how many tokens are visible, the query itself and those before it. None: all.

    >>> mask = torch.tensor([[True, True, False], [True, True, False], [True, True, True]])
    >>> is_plain_mask(mask.view(1, 1, 3, 3), torch.tensor([2]), is_causal=False, window=None)
    True
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        return False
    positions = torch.arange(mask.shape[-1], device=mask.device)
    rows = positions[:, None]
    lengths = lengths.to(mask.device)[:, None, None]
    expected = positions < lengths
    if is_causal:
        expected = expected & (positions <= rows)
    if window is not None:
        expected = expected & (positions > rows - window)
    mask = mask[:, 0]
    if mask.dtype == torch.bool:
        shown = mask
        hidden = ~mask
    else:
        shown = mask == 0
        hidden = mask < torch.finfo(mask.dtype).min / 2
    is_as_expected = torch.where(expected, shown, hidden)
    return bool((is_as_expected | (rows >= lengths)).all())
