"""Where a model draws a dropout mask."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DropoutSite:
    """A draw of a dropout mask in the forward of a micro-batch, by its number.

    Attributes:
        name: It in words.
        key: 64-bit hash of the number of the draw.
        shape: The shape of the mask in an earlier micro-batch of padded samples.
        sample_dim: The dim of the mask that holds the samples. None if all samples of a window
            share the mask, or it has several rows for each.
    """

    name: str
    key: int
    shape: torch.Size
    sample_dim: int | None
