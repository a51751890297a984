"""Attention of the samples in a row of fixed length, as an operator that torch.compile calls.

The operator is computed by the kernels of packed tokens where they can, else on padded samples. Its
backward computes the forward again, from query, key and value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_ga.draws.dropout.dropout_functions import mask_to_bias
from hf_ga.draws.dropout.masks import keep_mask
from hf_ga.draws.hashing import signed
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.rows.fused_attention import DroppedAttention
from hf_ga.rows.options import AttentionOptions
from hf_ga.rows.packed_attention import (
    PackedAttention,
    PackedSamples,
    are_supported,
)
from hf_ga.rows.packed_tokens import PackedTokens
from hf_ga.rows.varlen_attention import direct_context, kernel_for

# Operators take tensors and numbers only: those of a call begin with the id of its object.
_ATTENTIONS: WeakValueDictionary[int, "RowAttention"] = WeakValueDictionary()


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer in a micro-batch.

    Attributes:
        layer: The layer.
        mask: The mask of padded samples that the model made for it, or None.
        draw: The number of its first draw in the micro-batch; for the operator, that of its own.
    """

    layer: nn.Module
    mask: Tensor | None
    draw: int


class RowAttention:
    """Computes attention of the rows of one model.

    Args:
        draws: Keys the random draws of the model.
        kernels: Decides where the kernels can compute attention of packed tokens.

    Attributes:
        calls: The calls of layers in the current micro-batch.
    """

    def __init__(self, draws: KeyedDraws, kernels: PackedAttention) -> None:
        """Start without a row."""
        self.calls: list[LayerCall] = []
        self._draws = draws
        self._kernels = kernels
        self._tokens: PackedTokens | None = None
        self._length = 0
        self._keys = torch.empty(0, dtype=torch.int64)
        self._samples: PackedSamples | None = None
        _ATTENTIONS[id(self)] = self

    def begin(
        self, tokens: PackedTokens, length: int, keys: Tensor, samples: PackedSamples | None
    ) -> None:
        """Begin a micro-batch.

        Args:
            tokens: Its real tokens.
            length: Number of tokens of its row.
            keys: One key per sample: int64, shape (samples,).
            samples: The samples for the kernels. None: these cannot compute them.
        """
        self.calls = []
        self._tokens = tokens
        self._length = length
        self._keys = keys
        self._samples = samples

    def name_call(self) -> Tensor:
        """Return what tells the operator which layer calls it: int64, shape (2,), on the CPU."""
        return torch.tensor([id(self), len(self.calls) - 1])

    def forward(self, call: LayerCall, options: AttentionOptions, *inputs: Tensor) -> Tensor:
        """Compute attention.

        Args:
            call: The call of a layer.
            options: What attention computes.
            inputs: Query, key and value, of shape (1, heads, length, dim).

        Returns:
            A tensor of shape (1, length, heads, value dim), with zeros in its tail.
        """
        if self._runs_kernels(call, options, inputs):
            output, _ = self._in_kernels(call, options, inputs)
            return self._filled(output)
        output, _ = self._padded(call, options, inputs)
        return self._filled(self._packed(output)).to(inputs[2].dtype)

    def backward(
        self, call: LayerCall, options: AttentionOptions, gradient: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute the gradients of query, key and value; see `forward`.

        Args:
            call: The call of a layer.
            options: What attention computes.
            gradient: Of the output.
            inputs: Query, key and value.
        """
        real = gradient[:, : len(self._tokens.index)]
        if self._runs_kernels(call, options, inputs):
            _, context = self._in_kernels(call, options, inputs)
            packed = context.kernel.backward(context, real[0])[:3]
        else:
            _, context = self._padded(call, options, inputs)
            packed = self._padded_gradients(context, real, inputs)
        filled = [self._filled(of_input).transpose(1, 2) for of_input in packed]
        return tuple(
            of_input.to(x.dtype).contiguous() for of_input, x in zip(filled, inputs, strict=True)
        )

    # By the kernels

    def _runs_kernels(self, call: LayerCall, options: AttentionOptions, inputs: tuple) -> bool:
        """Whether the kernels compute this call."""
        if self._samples is None or not are_supported(*inputs, self._samples):
            return False
        return self._kernels.matches_mask(call.layer, call.mask, options)

    def _in_kernels(
        self, call: LayerCall, options: AttentionOptions, inputs: tuple
    ) -> tuple[Tensor, SimpleNamespace]:
        """Compute attention of packed tokens, shape (tokens, heads, dim), by the kernels.

        Returns:
            (output, context for the backward).
        """
        seeds = self._keys ^ signed(self._draws.site_key(call.draw))
        packed = [x[0].transpose(0, 1)[: len(self._tokens.index)] for x in inputs]
        context = direct_context()
        samples = self._samples
        context.kernel = kernel_for(*packed[:2], samples.max_length, options)
        output = context.kernel.forward(
            context, *packed, samples.cu_seqlens, samples.max_length, seeds, options
        )
        return output, context

    # On padded samples

    def _padded(
        self, call: LayerCall, options: AttentionOptions, inputs: tuple
    ) -> tuple[Tensor, SimpleNamespace]:
        """Compute attention of padded samples, shape (samples, heads, width, value dim).

        Returns:
            (output, context for the backward).
        """
        num_heads = inputs[0].shape[1]
        padded = [self._unpacked(x, num_heads) for x in inputs]
        query, key, value = (x if x.dtype == torch.float64 else x.float() for x in padded)
        width = self._tokens.width
        shape = torch.Size((self._tokens.num_samples, num_heads, width, width))
        kept = torch.ones(shape, dtype=torch.bool, device=query.device)
        if options.drop_probability > 0:
            kept = keep_mask(
                self._keys,
                site=self._draws.site_key(call.draw),
                shape=shape,
                sample_dim=0,
                drop_probability=options.drop_probability,
            )
        bias = None
        if call.mask is not None:
            bias, has_keys = mask_to_bias(call.mask, query.dtype)
            kept = kept & has_keys
        elif options.is_causal:
            bias = torch.full((width, width), -torch.inf, dtype=query.dtype, device=query.device)
            bias = bias.triu_(1)
        context = direct_context()
        output = DroppedAttention.forward(
            context, query, key, value, kept, bias, options.scale, options.drop_probability
        )
        return output.view(*shape[:3], -1), context

    def _padded_gradients(
        self, context: SimpleNamespace, gradient: Tensor, inputs: tuple
    ) -> list[Tensor]:
        """Return the gradients of packed query, key and value, shape (tokens, heads, dim)."""
        of_output = self._tokens.unpack(gradient).transpose(1, 2)
        of_output = of_output.reshape(-1, *of_output.shape[-2:]).to(context.saved_tensors[0].dtype)
        gradients = DroppedAttention.backward(context, of_output)[:3]
        packed = []
        for of_input, x in zip(gradients, inputs, strict=True):
            heads = of_input.view(self._tokens.num_samples, x.shape[1], -1, *of_input.shape[-2:])
            packed.append(self._packed(heads.sum(2)))  # over the heads that share a key
        return packed

    def _unpacked(self, row: Tensor, num_heads: int) -> Tensor:
        """Return query, key or value of padded samples, shape (samples x heads, width, dim)."""
        real = row.transpose(1, 2)[:, : len(self._tokens.index)]
        padded = self._tokens.unpack(real).transpose(1, 2)
        padded = padded.repeat_interleave(num_heads // padded.shape[1], 1)
        return padded.reshape(-1, *padded.shape[-2:])

    def _packed(self, padded: Tensor) -> Tensor:
        """Return the real tokens of padded samples, shape (tokens, heads, dim)."""
        return self._tokens.pack(padded.transpose(1, 2))[0]

    def _filled(self, packed: Tensor) -> Tensor:
        """Return real tokens as a row, shape (1, length, heads, dim), with zeros in its tail."""
        return F.pad(packed, (0, 0, 0, 0, 0, self._length - len(packed)))[None]


def _resolved(
    call: Tensor, numbers: Sequence[float]
) -> tuple[RowAttention, LayerCall, AttentionOptions]:
    """Return what computes a call of an operator, the call of a layer, and what is computed."""
    attention_id, index = call.tolist()
    attention = _ATTENTIONS[attention_id]
    draw, drop_probability, scale, is_causal, sliding_window = numbers
    of_layer = attention.calls[index]
    of_layer = replace(of_layer, draw=of_layer.draw + int(draw))
    window = None if sliding_window < 0 or of_layer.mask is None else int(sliding_window)
    return attention, of_layer, AttentionOptions(drop_probability, scale, bool(is_causal), window)


@torch.library.custom_op("hf_ga::row_attention", mutates_args=())
def row_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Tensor, numbers: Sequence[float]
) -> Tensor:
    """Attention of a row: see `RowAttention.forward`.

    Args:
        query: Of shape (1, heads, length, dim).
        key: Like the query, with fewer heads if several share one.
        value: Like the key.
        call: Which layer calls it: see `RowAttention.name_call`.
        numbers: The number of its draw within the layer (0 if it draws none), dropout probability,
            factor of the scores, whether a query attends to no later tokens if the layer has no
            mask, and the maximum number of tokens that it attends to (-1: no limit).
    """
    attention, of_layer, options = _resolved(call, numbers)
    return attention.forward(of_layer, options, query, key, value)


@torch.library.custom_op("hf_ga::row_attention_backward", mutates_args=())
def row_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Tensor,
    numbers: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `row_attention`: see `RowAttention.backward`."""
    attention, of_layer, options = _resolved(call, numbers)
    return attention.backward(of_layer, options, gradient, query, key, value)


@row_attention.register_fake
def _output(query: Tensor, key: Tensor, value: Tensor, *call: Any) -> Tensor:
    """Return a tensor like the output."""
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


@row_attention_backward.register_fake
def _gradients(gradient: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like the gradients."""
    query, key, value = (x.new_empty(x.shape) for x in inputs[:3])
    return query, key, value


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep the inputs of `row_attention` for its backward."""
    *tensors, ctx.numbers = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs of `row_attention`."""
    gradients = row_attention_backward(gradient, *ctx.saved_tensors, ctx.numbers)
    return *gradients, None, None


row_attention.register_autograd(_backward, setup_context=_save)
