"""The real tokens of a padded micro-batch, concatenated, and their dropout masks.

Shapes: a padded micro-batch has `num_samples` samples of `width` tokens, padding included; the
packed one has its `num_tokens` real tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_ga.draws.dropout.dropout_site import DropoutSite
from hf_ga.draws.dropout.masks import (
    apply_dropout_mask,
    drop,
    fold_in_coordinates,
    keep_columns,
    row_keys,
)
from hf_ga.draws.hashing import mixed, signed
from hf_ga.errors import UnkeyedRandomness


@dataclass(frozen=True)
class PackedTokens:
    """Converts tensors between a padded micro-batch and its real tokens, concatenated.

    Attributes:
        num_samples: Number of samples of the micro-batch.
        width: Padded length of each sample.
        index: For each real token, its index in the flattened padded batch: int64, of shape
            (num_tokens,).
    """

    num_samples: int
    width: int
    index: Tensor

    @staticmethod
    def of(attention_mask: Tensor, device: torch.device) -> "PackedTokens | None":
        """Find the real tokens of a micro-batch, to pack them, without waiting for the device.

        Args:
            attention_mask: 1 for each real token and 0 for padding, of shape (samples, width), on
                the CPU.
            device: The device of the index.

        Returns:
            The real tokens. None if the micro-batch cannot be packed: the mask has values other
            than 0 and 1, or a sample has no real token.
        """
        is_real = attention_mask != 0
        is_binary = bool(((attention_mask == 1) == is_real).all())
        all_samples_have_tokens = bool(is_real.any(1).all())
        if not is_binary or not all_samples_have_tokens:
            return None
        num_samples, width = attention_mask.shape
        index = is_real.flatten().nonzero().flatten()
        return PackedTokens(num_samples, width, index.to(device, non_blocking=True))

    @property
    def padded_shape(self) -> tuple[int, int]:
        """The first two sizes of a padded micro-batch's tensors: (num_samples, width)."""
        return self.num_samples, self.width

    @property
    def packed_shape(self) -> tuple[int, int]:
        """The first two sizes of tensors of packed tokens (all real tokens): (1, num_tokens)."""
        return 1, len(self.index)

    @cached_property
    def samples(self) -> Tensor:
        """For each packed (real) token, the row of its sample: int64, of shape (num_tokens,)."""
        return self.index // self.width

    @cached_property
    def columns(self) -> Tensor:
        """For each packed (real) token, its column in the padded batch: int64, (num_tokens,)."""
        return self.index % self.width

    def pack(self, padded: Tensor) -> Tensor:
        """Pack a padded tensor of a micro-batch: select its real tokens, and concatenate them.

        Args:
            padded: Of shape (num_samples, width, ...), or (1, width, ...) if all samples share it
                (position ids, for example).

        Returns:
            A tensor of shape (1, num_tokens, ...).
        """
        is_shared = len(padded) == 1 and self.num_samples > 1
        if is_shared:
            tokens = padded[0].index_select(0, self.columns)
        else:
            tokens = padded.flatten(0, 1).index_select(0, self.index)
        return tokens.unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """Copy packed tokens back into a padded tensor, with zeros at the padding.

        Args:
            packed: Of shape (1, num_tokens, ...).

        Returns:
            A tensor of shape (num_samples, width, ...).
        """
        padded = packed.new_zeros(self.num_samples * self.width, *packed.shape[2:])
        padded.index_copy_(0, self.index, packed[0])
        return padded.unflatten(0, self.padded_shape)


@dataclass(frozen=True)
class PackedMasks:
    """Draws dropout masks for packed tokens, with the same bits as for padded samples.

    Attributes:
        tokens: The packed tokens of the micro-batch.
        keys: One key per sample of the micro-batch: int64, shape (samples,).
    """

    tokens: PackedTokens
    keys: Tensor

    def mask(self, site: DropoutSite, shape: torch.Size, drop_probability: float) -> Tensor:
        """Draw the dropout mask of packed tokens.

        Its rows are those of the padded batch's mask, of shape (num_samples, width, ...), that
        belong to real tokens.

        Args:
            site: The dropout site.
            shape: Shape of the mask, (1, num_tokens, ...).
            drop_probability: Probability that an element is dropped.

        Returns:
            bool, of the given shape: True where an element is kept.

        Raises:
            UnkeyedRandomness: If the shape is not one of packed tokens.
        """
        self._check_shape(site, shape)
        # Hash the same coordinates as for padded samples: sample, row 0, column, then the rest.
        sample_keys = row_keys(self.keys ^ signed(site.key), [1])[:, 0]
        token_keys = mixed(sample_keys[self.tokens.samples] ^ self.tokens.columns)
        keys = fold_in_coordinates(token_keys, shape[2:-1])
        return keep_columns(keys, shape[-1], drop_probability).view(shape)

    def drop(self, site: DropoutSite, input: Tensor, drop_probability: float) -> Tensor:
        """Apply dropout to all elements of packed tokens, with the mask that `mask` draws.

        If a GPU kernel supports the input, it draws and applies the mask without storing it.

        Args:
            site: The dropout site.
            input: Of shape (1, num_tokens, ...).
            drop_probability: Probability that an element is dropped.

        Raises:
            UnkeyedRandomness: If the shape is not one of packed tokens.
        """
        self._check_shape(site, input.shape)
        if input.dim() == 3:
            tokens = (self.tokens.samples, self.tokens.columns)
            dropped = drop(input, self.keys, site.key, 0, drop_probability, tokens)
            if dropped is not None:
                return dropped
        kept = self.mask(site, input.shape, drop_probability)
        return apply_dropout_mask(input, drop_probability, kept)

    def _check_shape(self, site: DropoutSite, shape: torch.Size) -> None:
        """Check that a dropout mask to draw is for packed tokens, and that padded samples have a
        mask with the same number of dims at this dropout site.

        Args:
            site: The dropout site, with the shape of the mask of padded samples.
            shape: Shape of the mask to draw.

        Raises:
            UnkeyedRandomness: If one of these does not hold, so that the mask cannot be tied to
                tokens.
        """
        is_packed = len(shape) >= 3 and shape[:2] == self.tokens.packed_shape
        matches_padded_mask = site.sample_dim == 0 and len(shape) == len(site.shape)
        if not is_packed or not matches_padded_mask:
            raise UnkeyedRandomness(
                f"{site.name} draws a mask of shape {list(shape)} for packed tokens, but "
                f"{list(site.shape)} for padded samples, so its draws cannot be tied to "
                "tokens. Omit packing, or set this dropout to 0."
            )
