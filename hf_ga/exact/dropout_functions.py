"""The functions through which torch draws dropout, each with its keyed replacement.

A replacement gets the keyed dropout of the model that is running and the original function, then
the original's own arguments. It calls the original where nothing is drawn, or where the call is not
the model's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.exact.masks import apply_dropout_mask


class MaskDrawer(Protocol):
    """What the replacements need of `dropout.KeyedDropout`; see there."""

    attend: Callable[..., Tensor]

    @property
    def running(self) -> nn.Module | None: ...
    def is_keyed(self, drop_probability: float, training: bool = True) -> bool: ...
    def mask(self, shape: torch.Size, drop_probability: float) -> Tensor: ...
    def drop(self, input: Tensor, drop_probability: float) -> Tensor: ...


def dropout(
    drawn_axes: Callable[[Tensor], int],
    masks: MaskDrawer,
    original: Callable,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Replace `F.dropout`, which `nn.Dropout` calls, and its kin that drop whole channels.

    Args:
        drawn_axes: How many of the input's first axes have separate draws; each draw is for all
            elements of the other axes.
        masks: Draws the masks.
        original: The function of torch.
        input: See `F.dropout`, as the other arguments.
    """
    if not masks.is_keyed(p, training):
        return original(input, p, training, inplace)
    num_drawn = drawn_axes(input)
    if num_drawn == input.dim() and not inplace:
        return masks.drop(input, p)
    shape = [*input.shape[:num_drawn], *[1] * (input.dim() - num_drawn)]
    kept = masks.mask(torch.Size(shape), p)
    if inplace:
        return input.mul_(kept.view(torch.uint8)).mul_(1 / (1 - p))
    return apply_dropout_mask(input, p, kept)


def torch_dropout(
    masks: MaskDrawer, original: Callable, input: Tensor, p: float, train: bool
) -> Tensor:
    """Replace `torch.dropout`, which cannot work in place."""
    if not masks.is_keyed(p, train):
        return original(input, p, train)
    return masks.drop(input, p)


def attention(
    masks: MaskDrawer,
    original: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replace `F.scaled_dot_product_attention`: with dropout, the attention weights are computed
    and dropped here.
    """
    if not masks.is_keyed(dropout_p):
        return original(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    kept = masks.mask(torch.Size((*query.shape[:-1], key.shape[-2])), dropout_p)
    if enable_gqa:
        num_heads = query.shape[-3]
        key = key.repeat_interleave(num_heads // key.shape[-3], dim=-3)
        value = value.repeat_interleave(num_heads // value.shape[-3], dim=-3)
    bias = None
    if is_causal:
        bias = torch.full(
            kept.shape[-2:], -torch.inf, dtype=_dtype_of_scores(query), device=query.device
        ).triu_(1)
    elif attn_mask is not None:
        bias, has_keys = _bias_of(attn_mask, _dtype_of_scores(query))
        kept = kept & has_keys  # a row without keys has weight 0
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return masks.attend(query, key, value, kept, bias, scale, dropout_p)


def _dtype_of_scores(query: Tensor) -> torch.dtype:
    """Return the type in which query and key are multiplied."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return query.dtype


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Tensor,
    bias: Tensor | None,
    scale: float,
    drop_probability: float,
) -> Tensor:
    """Compute attention with a given dropout mask: dropout(softmax(query key^T * scale + bias))
    value.

    Args:
        query: Of shape (..., heads, L, E).
        key: Of shape (..., heads, S, E).
        value: Of shape (..., heads, S, V).
        kept: Which weights dropout keeps: bool, of shape (..., heads, L, S).
        bias: What is added to the scores. None: nothing.
        scale: What the scores are multiplied by.
        drop_probability: p, with 0 < p < 1.

    Returns:
        A tensor of shape (..., heads, L, V).
    """
    scores = (query * scale) @ key.mT
    if bias is not None:
        scores = scores + bias
    return apply_dropout_mask(scores.softmax(-1), drop_probability, kept) @ value


def stochastic_depth(masks: MaskDrawer, original: Callable, *size: Any, **kwargs: Any) -> Tensor:
    """Replace `torch.rand` where a module of stochastic depth drops a sample's whole branch (Huang
    et al. 2016), as transformers writes it: floor(rand + 1 - p) is 0 or 1.

    Also where a module draws whether to skip a layer (`rand < layerdrop`) although layerdrop is 0,
    as transformers did before 5.23. All other calls go to torch.
    """
    module = masks.running
    shape = torch.Size(size[0] if size and isinstance(size[0], Sequence) else size)
    if not shape and getattr(module, "layerdrop", None) == 0:
        masks.mask(shape, 0.0)  # a dropout site, so that this module's calls are followed
        return torch.ones(shape, **kwargs)
    p = 0.0
    if type(module).__name__.endswith("DropPath"):
        p = getattr(module, "drop_prob", 0.0)
    if not masks.is_keyed(p):
        return original(*size, **kwargs)
    # A number of the middle of [p, 1) keeps a branch, and is far enough from both ends in bf16 too.
    return torch.full(shape, (1 + p) / 2, **kwargs) * masks.mask(shape, p)


# (where the function lives, its name, its replacement). Draws by other functions are found by the
# generators that they move.
DRAWING_FUNCTIONS: list[tuple[object, str, Callable]] = [
    (F, "dropout", partial(dropout, Tensor.dim)),
    # One draw for each (sample, channel), or for each channel where torch takes the input for a
    # single sample.
    (F, "dropout1d", partial(dropout, lambda input: 1 if input.dim() == 2 else 2)),
    (F, "dropout2d", partial(dropout, lambda input: 2)),
    (F, "dropout3d", partial(dropout, lambda input: 1 if input.dim() == 4 else 2)),
    (F, "scaled_dot_product_attention", attention),
    (torch, "dropout", torch_dropout),
    (torch, "rand", stochastic_depth),
]


def _bias_of(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Convert a mask to what is added to the scores.

    Nothing is masked in a row without keys, so that its softmax is not NaN.

    Returns:
        What is added, and which rows have keys: bool, of shape (..., L, 1).
    """
    if attn_mask.dtype == torch.bool:
        has_keys = attn_mask.any(-1, keepdim=True)
        is_open = attn_mask | ~has_keys
        # 1 - 1/1 is 0 and 1 - 1/0 is -inf: faster than masked_fill.
        return 1 - is_open.to(dtype).reciprocal_(), has_keys
    has_keys = (attn_mask != -torch.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~has_keys, 0.0), has_keys
