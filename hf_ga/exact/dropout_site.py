"""Where a model draws a dropout mask."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class DropoutSite:
    """Where a model draws a mask, as two probing forwards with 2 and 3 samples found it.

    Attributes:
        name, module: of the innermost module. key: 64 bits, of the path and the draw.
        shapes: of the masks in the two forwards. axis: the sample axis; None: the window shares the
            mask.
        is_keyed: False where no sample axis was found and the user allowed that.
        path: 64 bits, of the call of the module: the draws of one call share it.
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
        """Of its masks along the sample axis; 1 where the window shares the mask."""
        return 1 if self.axis is None else self.shapes[0][self.axis] // 2
