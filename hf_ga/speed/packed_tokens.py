"""The real tokens of a padded micro-batch, concatenated, and their dropout masks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.dropout import DropoutSite, SampleMasks
from hf_ga.exact.hashing import mixed, signed
from hf_ga.exact.masks import drop, keep_columns, keyed_dropout, over_axes, row_keys


@dataclass(frozen=True)
class PackedTokens:
    """Maps between the T real tokens of n samples and their padded batch of shape (n, S).

    Attributes:
        num_samples: n. width: S.
        index: int64, shape (T,): index of each token in the flattened batch.
    """

    num_samples: int
    width: int
    index: Tensor

    @staticmethod
    def of(attention_mask: Tensor, device: torch.device) -> "PackedTokens | None":
        """From a mask of shape (n, S) on the host, without device synchronization. None if packing
        is impossible: a mask with values other than 0 and 1, or a sample without tokens.
        """
        real = attention_mask != 0
        if not bool(((attention_mask == 1) == real).all()) or not bool(real.any(1).all()):
            return None
        return PackedTokens(
            *attention_mask.shape, real.flatten().nonzero().flatten().to(device, non_blocking=True)
        )

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(n, S)."""
        return self.num_samples, self.width

    @property
    def packed_shape(self) -> tuple[int, int]:
        """(1, T)."""
        return 1, len(self.index)

    @cached_property
    def samples(self) -> Tensor:
        """The sample of each token: int64, shape (T,)."""
        return self.index // self.width

    @cached_property
    def columns(self) -> Tensor:
        """The column of each token in the padded batch: int64, shape (T,)."""
        return self.index % self.width

    def pack(self, padded: Tensor) -> Tensor:
        """(n, S, ...), or (1, S, ...) if shared by all samples -> (1, T, ...)."""
        shared = len(padded) == 1 and self.num_samples > 1
        rows = (
            padded[0].index_select(0, self.columns)
            if shared
            else padded.flatten(0, 1).index_select(0, self.index)
        )
        return rows.unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """(1, T, ...) -> (n, S, ...), zeros at the padding."""
        rows = packed.new_zeros(self.num_samples * self.width, *packed.shape[2:]).index_copy_(
            0, self.index, packed[0]
        )
        return rows.unflatten(0, self.padded_shape)


@dataclass(frozen=True)
class PackedMasks:
    """Draws dropout masks at real tokens, equal bit for bit to those of padded samples.

    Attributes:
        tokens: of the micro-batch. padded: source of the masks of its padded samples.
    """

    tokens: PackedTokens
    padded: SampleMasks

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """bool, of shape (1, T, ...): the rows of a padded mask (n, S, ...) that belong to real
        tokens.

        Raises:
            UnkeyedRandomness: the shape is not one of packed tokens.
        """
        self._check(site, shape)
        rows = row_keys(
            self.padded.keys ^ signed(site.key), [1]
        )  # as for padded samples: the sample, then its single row
        rows = over_axes(mixed(rows[self.tokens.samples, 0] ^ self.tokens.columns), shape[2:-1])
        return keep_columns(rows, shape[-1], drop_probability).view(shape)

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """The input, of shape (1, T, ...), with dropout of all its elements.

        Raises:
            UnkeyedRandomness: the shape is not one of packed tokens.
        """
        self._check(site, input.shape)
        if input.dim() == 3:
            tokens = (self.tokens.samples, self.tokens.columns)
            keys = self.padded.keys
            dropped = drop(input, keys, site.key, 0, drop_probability, tokens)
            if dropped is not None:
                return dropped
        kept = self.mask(site, input.shape, drop_probability)
        return keyed_dropout(input, drop_probability, kept)

    def _check(self, site: DropoutSite, shape: torch.Size) -> None:
        if (
            site.axis != 0
            or len(shape) < 3
            or shape[:2] != self.tokens.packed_shape
            or len(shape) != len(site.shapes[0])
        ):
            raise UnkeyedRandomness(
                f"{site.name} draws a mask of shape {list(shape)} for packed tokens, but "
                f"{list(site.shapes[0])} for padded "
                "samples, so its draws cannot be tied to tokens. Omit packing, or set this "
                "dropout to 0."
            )
