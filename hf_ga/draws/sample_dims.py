"""Find the dim of a random draw that holds the samples of the micro-batch, from its shape alone.

One shape allows several layouts: 64 x 32 numbers for 4 samples may be 16 rows per sample, or noise
of a layer's weights that all samples share. What follows the samples shows when their number
changes. So each draw keeps the layouts that have been consistent with every micro-batch so far, and
uses the most probable one.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class SampleRows(NamedTuple):
    """Layout: the samples are in one dim, with a constant number of consecutive rows each."""

    dim: int
    rows: int

    def fits(self, shape: Sequence[int], num_samples: int) -> bool:
        """Whether a shape drawn for so many samples has this layout."""
        return shape[self.dim] == self.rows * num_samples


class PaddedRows(NamedTuple):
    """Layout: the samples are in dim 0, with an equal number of consecutive rows each, which varies
    between micro-batches: tokens of a padded batch, flattened to (samples * width, features).
    """

    dim: int = 0

    def fits(self, shape: Sequence[int], num_samples: int) -> bool:
        """Whether a shape drawn for so many samples has this layout."""
        return shape[0] % num_samples == 0


class Shared(NamedTuple):
    """Layout: all samples of the window share the numbers, whose shape is constant."""

    shape: tuple[int, ...]
    dim: None = None

    def fits(self, shape: Sequence[int], num_samples: int) -> bool:
        """Whether a shape drawn for so many samples has this layout."""
        return tuple(shape) == self.shape


Layout = SampleRows | PaddedRows | Shared


def possible_layouts(shape: Sequence[int], num_samples: int) -> list[Layout]:
    """Return the layouts that a shape has for a number of samples, the most probable first."""
    multiples = [
        SampleRows(dim, size // num_samples)
        for dim, size in enumerate(shape)
        if size % num_samples == 0
    ]
    first_dim = [layout for layout in multiples if layout.dim == 0]
    one_row = [layout for layout in multiples if layout.dim > 0 and layout.rows == 1]
    several_rows = [layout for layout in multiples if layout.dim > 0 and layout.rows > 1]
    padded = [PaddedRows()] if first_dim else []
    return [*first_dim, *one_row, Shared(tuple(shape)), *padded, *several_rows]


def _is_probable(layout: Layout, best: Layout) -> bool:
    """Whether a layout is nearly as probable as the best one of a draw. That each sample has one
    row in dim 0 is more probable than that they share the numbers.
    """
    if isinstance(layout, SampleRows):
        return layout.rows == 1 or layout.dim == 0
    return isinstance(layout, Shared) and best != SampleRows(0, 1)


class SampleDims:
    """Remembers the possible layouts of each random draw of a training run.

    Attributes:
        num_reclassified: How often a micro-batch contradicted the layout that a draw had in earlier
            ones, so that their numbers do not belong to the same samples.
    """

    def __init__(self) -> None:
        """Create an empty memory."""
        self.num_reclassified = 0
        self._layouts: dict[Hashable, list[Layout]] = {}
        self._last_shapes: dict[Hashable, tuple[int, ...]] = {}

    def doubtful_shape(self) -> tuple[int, ...] | None:
        """Return the shape of a draw whose samples may be in another dim than the most probable
        one, or share its numbers; None if there is none. Micro-batches of another size tell.
        """
        for place, layouts in self._layouts.items():
            if len({layout.dim for layout in layouts if _is_probable(layout, layouts[0])}) > 1:
                return self._last_shapes[place]
        return None

    def find(
        self, place: Hashable, shape: Sequence[int], num_samples: int, only_shared: bool = False
    ) -> Layout | None:
        """Return the most probable layout of a draw that is consistent with all micro-batches.

        Args:
            place: Identifies the draw in every micro-batch.
            shape: Shape of the numbers.
            num_samples: Samples of the micro-batch.
            only_shared: Whether the numbers are one per window and cannot be one per sample.

        Returns:
            The layout; None if no layout is consistent.
        """
        before = self._layouts.get(place)
        if before is None and only_shared:
            before = [Shared(tuple(shape))]
        elif before is None:
            before = possible_layouts(shape, num_samples)
        layouts = [layout for layout in before if layout.fits(shape, num_samples)]
        self._layouts[place] = layouts
        self._last_shapes[place] = tuple(shape)
        if layouts[:1] != before[:1]:
            self.num_reclassified += 1
        return layouts[0] if layouts else None
