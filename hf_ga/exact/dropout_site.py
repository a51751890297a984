"""Where a model draws a dropout mask."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class DropoutSite:
    """One place in a model's forward where a dropout mask is drawn: a path of module calls and the
    index of the draw within the innermost module. Found by two forwards of the proof, on a batch of
    2 and a batch of 3 samples.

    Attributes:
        name: Qualified name of the innermost module that runs.
        module: The innermost module that runs.
        key: 64-bit hash of the path and the index of the draw.
        shapes: The shapes of the mask in the two forwards.
        sample_dim: The dim of the mask that grows with the number of samples. None if none does, so
            that all samples of a window share the mask.
        is_keyed: Whether the mask is drawn from the keys of the samples. False if no single sample
            dim was found, and the user allowed masks that depend on the split.
        path: 64-bit hash of the path without the index of the draw; equal for all draws of one
            call of the module.
    """

    name: str
    module: nn.Module
    key: int
    shapes: list[torch.Size] = field(default_factory=list)
    sample_dim: int | None = None
    is_keyed: bool = True
    path: int = 0

    @property
    def rows_per_sample(self) -> int:
        """How many consecutive rows of the dropout mask's sample dim belong to one sample, such as
        its attention heads: the size of this dim in the proof's batch of 2 samples, over 2. 1 if
        all samples of a window share the mask.
        """
        return 1 if self.sample_dim is None else self.shapes[0][self.sample_dim] // 2
