"""The real tokens of a padded micro-batch, one after the other, and their dropout masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hf_ga.exact.dropped_attention import Span
from hf_ga.exact.keyed import along_next_axis, kept_columns, mixed, seeds_of


@dataclass(frozen=True)
class PackedTokens:
    """Where the T real tokens of n samples lie in a batch of shape (n, S), and how to go there and back.

    Attributes:
        num_samples: n. width: S. longest: most real tokens of one sample.
        index: int64, shape (T,): the token's place in the batch read row by row.
        boundaries: int32, shape (n + 1,): where each sample begins among the packed tokens, and T.
    """

    num_samples: int
    width: int
    longest: int
    index: Tensor
    boundaries: Tensor

    @staticmethod
    def of(attention_mask: Tensor, device: torch.device) -> "PackedTokens | None":
        """From a mask of shape (n, S) on the host, so that no device is asked. None where packing is not possible: a mask of other
        values than 0 and 1, or a sample without tokens.
        """
        real = attention_mask != 0
        lengths = real.sum(1)
        if not bool(((attention_mask == 1) == real).all()) or not int(lengths.min()):
            return None
        index = real.flatten().nonzero().flatten()
        boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return PackedTokens(
            *attention_mask.shape,
            int(lengths.max()),
            index.to(device, non_blocking=True),
            boundaries.to(device, non_blocking=True),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.index)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(n, S)."""
        return self.num_samples, self.width

    @property
    def packed_shape(self) -> tuple[int, int]:
        """(1, T)."""
        return 1, self.num_tokens

    @cached_property
    def samples(self) -> Tensor:
        """Of each token, which sample it belongs to: int64, shape (T,)."""
        return self.index // self.width

    @cached_property
    def columns(self) -> Tensor:
        """Of each token, its column in the padded batch: int64, shape (T,)."""
        return self.index % self.width

    @cached_property
    def spans(self) -> list[Span] | None:
        """Where each sample lies; None where one has padding between its tokens."""
        begins, ends = self.boundaries[:-1].long(), self.boundaries[1:].long()
        first, last = self.columns[begins], self.columns[ends - 1]
        if bool((last - first != ends - begins - 1).any()):
            return None
        return list(zip(begins.tolist(), ends.tolist(), first.tolist(), strict=True))

    @cached_property
    def causal_bias(self) -> Tensor:
        """What keeps a token of the longest sample from attending to later ones: shape (longest, longest)."""
        return torch.full((self.longest, self.longest), -torch.inf, device=self.index.device).triu_(1)

    def pack(self, padded: Tensor) -> Tensor:
        """(n, S, ...), or (1, S, ...) for what all samples share -> (1, T, ...)."""
        shared = len(padded) == 1 and self.num_samples > 1
        rows = padded[0].index_select(0, self.columns) if shared else padded.flatten(0, 1).index_select(0, self.index)
        return rows.unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """(1, T, ...) -> (n, S, ...), zeros at the padding."""
        rows = packed.new_zeros(self.num_samples * self.width, *packed.shape[2:]).index_copy_(0, self.index, packed[0])
        return rows.unflatten(0, self.padded_shape)


def packed_keep_masks(
    keys: Tensor, places: Sequence[int], tokens: PackedTokens, shape: torch.Size, drop_probability: float
) -> Tensor:
    """The rows of `keyed.keep_masks(keys, places, (n, S, ...), 0, drop_probability)` that belong to real tokens, bit for bit.

    Args:
        keys: int64, shape (n,). shape: of one packed mask, (1, T, ...) with at least 3 axes.

    Returns:
        bool tensor of shape (places, *shape).
    """
    rows = mixed(mixed(seeds_of(keys, places)))  # as there: the sample, then its single row
    samples, columns = tokens.samples, tokens.columns
    if isinstance(rows, np.ndarray):
        samples, columns = samples.numpy(), columns.numpy().view(np.uint64)
    rows = mixed(rows[:, samples] ^ columns)
    for size in shape[2:-1]:
        rows = mixed(along_next_axis(rows, size))
    return kept_columns(rows, shape[-1], drop_probability).view(len(places), *shape)
