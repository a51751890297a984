"""The real tokens of a padded micro-batch, concatenated, and their dropout masks."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_ga.errors import UnkeyedRandomness
from hf_ga.exact.dropout import DropoutSite, SampleMasks
from hf_ga.exact.hashing import mixed, signed
from hf_ga.exact.masks import apply_dropout_mask, drop, fold_in_coordinates, keep_columns, row_keys


@dataclass(frozen=True)
class PackedTokens:
    """Maps between the T real tokens of n samples and their padded batch of shape (n, S).

    Attributes:
        num_samples: n.
        width: S.
        index: Index of each token in the flattened batch: int64, of shape (T,).
    """

    num_samples: int
    width: int
    index: Tensor

    @staticmethod
    def of(attention_mask: Tensor, device: torch.device) -> "PackedTokens | None":
        """Find the real tokens of a micro-batch, without device synchronization.

        Args:
            attention_mask: Of shape (n, S), on the host.
            device: Where the index goes.

        Returns:
            None if packing is impossible: a mask with values other than 0 and 1, or a sample
            without tokens.
        """
        is_real = attention_mask != 0
        is_binary = bool(((attention_mask == 1) == is_real).all())
        all_have_tokens = bool(is_real.any(1).all())
        if not is_binary or not all_have_tokens:
            return None
        num_samples, width = attention_mask.shape
        index = is_real.flatten().nonzero().flatten()
        return PackedTokens(num_samples, width, index.to(device, non_blocking=True))

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
        """Take the rows of the real tokens.

        Args:
            padded: Of shape (n, S, ...), or (1, S, ...) if shared by all samples.

        Returns:
            A tensor of shape (1, T, ...).
        """
        is_shared = len(padded) == 1 and self.num_samples > 1
        if is_shared:
            rows = padded[0].index_select(0, self.columns)
        else:
            rows = padded.flatten(0, 1).index_select(0, self.index)
        return rows.unsqueeze(0)

    def spread(self, packed: Tensor) -> Tensor:
        """Put the rows of the real tokens into a padded batch, with zeros at the padding.

        Args:
            packed: Of shape (1, T, ...).

        Returns:
            A tensor of shape (n, S, ...).
        """
        rows = packed.new_zeros(self.num_samples * self.width, *packed.shape[2:])
        rows.index_copy_(0, self.index, packed[0])
        return rows.unflatten(0, self.padded_shape)


@dataclass(frozen=True)
class PackedMasks:
    """Draws dropout masks at real tokens, equal bit for bit to those of padded samples.

    Attributes:
        tokens: Of the micro-batch.
        padded: Draws the masks of its padded samples.
    """

    tokens: PackedTokens
    padded: SampleMasks

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw a mask: the rows of a padded mask (n, S, ...) that belong to real tokens.

        Args:
            site: Where it is drawn.
            shape: Of the mask, (1, T, ...).
            drop_probability: Of an element.

        Returns:
            bool, of the given shape.

        Raises:
            UnkeyedRandomness: If the shape is not one of packed tokens.
        """
        self._check(site, shape)
        # As for padded samples: keyed by the sample, its single row, then the column.
        of_samples = row_keys(self.padded.keys ^ signed(site.key), [1])[:, 0]
        of_tokens = mixed(of_samples[self.tokens.samples] ^ self.tokens.columns)
        rows = fold_in_coordinates(of_tokens, shape[2:-1])
        return keep_columns(rows, shape[-1], drop_probability).view(shape)

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of an input of shape (1, T, ...).

        Raises:
            UnkeyedRandomness: If the shape is not one of packed tokens.
        """
        self._check(site, input.shape)
        if input.dim() == 3:
            tokens = (self.tokens.samples, self.tokens.columns)
            keys = self.padded.keys
            dropped = drop(input, keys, site.key, 0, drop_probability, tokens)
            if dropped is not None:
                return dropped
        kept = self.mask(site, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _check(self, site: DropoutSite, shape: torch.Size) -> None:
        is_of_tokens = len(shape) >= 3 and shape[:2] == self.tokens.packed_shape
        is_like_padded = site.sample_dim == 0 and len(shape) == len(site.shapes[0])
        if not is_of_tokens or not is_like_padded:
            raise UnkeyedRandomness(
                f"{site.name} draws a mask of shape {list(shape)} for packed tokens, but "
                f"{list(site.shapes[0])} for padded samples, so its draws cannot be tied to "
                "tokens. Omit packing, or set this dropout to 0."
            )
