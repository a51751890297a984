"""Whether padding changes the gradient of a sample a little, as in a model without a mask: a window
whose samples were compared in two widths is computed again, padded to one width.
"""

from hf_ga.engine.look.rehearsal import WIDTH_TOLERANCE, Rehearsal
from hf_ga.loading.window import LoaderState
from hf_ga.logs import get_logger

logger = get_logger(__name__)

# Padding that makes the differences of samples this many times smaller is needed.
MIN_IMPROVEMENT = 3.0


class PaddingTrial:
    """The trial of a run, or of a loader."""

    def __init__(self) -> None:
        """Start before it."""
        self._is_on = False  # in the current window
        self._unpadded_difference = 0.0  # of the window before it was padded

    def asks(self, rehearsal: Rehearsal) -> bool:
        """Whether to try padding: samples differ between two widths by more than rounding alone."""
        is_small = rehearsal.largest_difference <= WIDTH_TOLERANCE or rehearsal.is_low_precision
        if is_small or not rehearsal.has_other_width:
            return False
        self._unpadded_difference = rehearsal.largest_difference
        return True

    def begin(self, state: LoaderState) -> None:
        """Let the window be computed again with one padded width."""
        self._is_on = True
        state.pad_to_window = True

    def helps(self, rehearsal: Rehearsal | None) -> bool:
        """Whether samples of the window, which is padded on trial, differ less."""
        if not self._is_on or rehearsal is None:
            return False
        return rehearsal.largest_difference * MIN_IMPROVEMENT < self._unpadded_difference

    def end(self, state: LoaderState, *, needs_padding: bool) -> None:
        """End the trial, if the window that is done was padded on trial."""
        if not self._is_on:
            return
        self._is_on = False
        self._unpadded_difference = 0.0
        state.is_padding_tried = True
        state.pad_to_window = needs_padding
        if needs_padding and state.has_unpadded:
            logger.warning(
                "hf_ga: padding changes the gradient of a sample in this window, which it did not "
                "in the samples that were compared before. From now on windows are padded to their "
                "longest sample; the updates so far may depend on how their windows were split. To "
                "rule that out, start again with a collate function that pads all samples to one "
                "length."
            )
