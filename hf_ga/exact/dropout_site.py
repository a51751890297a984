"""Where a model draws a dropout mask."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class DropoutSite:
    """Where a model draws a mask, as two probing forwards with 2 and 3 samples found it.

    Attributes:
        name: Of the innermost module that runs.
        module: The innermost module that runs.
        key: Of the path and the draw, 64 bits.
        shapes: Of the masks in the two forwards.
        axis: The sample axis. None: the window shares the mask.
        is_keyed: False where no sample axis was found and the user allowed that.
        path: Key of the call of the module, 64 bits: the draws of one call share it.
    """

    name: str
    module: nn.Module
    key: int
    shapes: list[torch.Size] = field(default_factory=list)
    axis: int | None = None
    is_keyed: bool = True
    path: int = 0

    @property
    def rows_per_sample(self) -> int:
        """Rows of its masks for each sample; 1 where the window shares the mask."""
        return 1 if self.axis is None else self.shapes[0][self.axis] // 2
