"""Checks that a micro-batch draws no random number but by keyed draws."""

from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.draws.keyed import KeyedDraws
from hf_ga.errors import UnkeyedRandomness
from hf_ga.logs import Warnings

WITHOUT_REHEARSAL = (
    "hf_ga: random numbers are drawn that cannot be tied to samples, as allowed, so it is not "
    "tried whether a sample's loss depends on the other samples of its micro-batch."
)


class DrawCheck:
    """Compares the states of the global random generators before and after the code of a loop.

    Args:
        draws: Keys the random draws.
    """

    def __init__(self, draws: KeyedDraws) -> None:
        """Start before the first micro-batch."""
        self._draws = draws
        self._states: dict[str, bytes] = {}  # when the micro-batch began

    def begin(self) -> None:
        """Begin a micro-batch."""
        self._states = random_states(self._states)

    def check(self) -> None:
        """Check that no random number was drawn since the micro-batch began but by keyed draws.

        Raises:
            UnkeyedRandomness: If one was.
        """
        if self._draws.allow_unkeyed:
            return
        moved = moved_generators(self._states)
        unkeyed = self._draws.unkeyed_after_backward
        if not moved and unkeyed is None:
            return
        source = unkeyed or f"from the generator of {' and '.join(moved)}"
        raise UnkeyedRandomness(
            f"the loop or the model drew random numbers ({source}) that cannot be tied to samples, "
            "so they depend on the split of the window. Draw with torch's functions by their full "
            "names (torch.randn, not randn imported from torch), one row for each sample, or in "
            "the dataset or collate function; sample in evaluations after optimizer.step(); or "
            "accept it with "
            "Accelerator(allow_split_dependent_randomness=True)."
        )

    def check_between_backwards(self) -> None:
        """Check that nothing was drawn between two backwards that may be rows of samples or noise
        on a weight.

        Raises:
            UnkeyedRandomness: If something was.
        """
        if self._draws.taken_for_weights is not None:
            raise UnkeyedRandomness(
                f"{self._draws.taken_for_weights} was drawn between two backwards of a "
                "micro-batch: it may be rows of samples, or noise on a weight of that shape. Draw "
                "it before the first backward."
            )

    @property
    def has_unkeyed(self) -> bool:
        """Whether a draw of the micro-batch cannot be tied to samples, as allowed."""
        if not self._draws.allow_unkeyed:
            return False
        return self._draws.has_unkeyed or bool(moved_generators(self._states))


def check_first_pass(before: dict[str, bytes]) -> None:
    """Check that a first pass over a window drew nothing but by keyed draws.

    Args:
        before: `random_states` before it.

    Raises:
        UnkeyedRandomness: If it did.
    """
    moved = moved_generators(before)
    if moved:
        raise UnkeyedRandomness(
            f"the model drew random numbers (from the generator of {' and '.join(moved)}) that "
            "cannot be tied to samples. This loss runs each forward twice, and the second one "
            "would draw others, so its gradient would be wrong: turn this randomness off."
        )


def warn_of_doubtful_draws(draws: KeyedDraws, warnings: Warnings) -> None:
    """Warn once that windows of one micro-batch, which are not rehearsed, do not show to which
    samples some draws belong: other splits may draw other numbers.
    """
    shape = draws.doubtful_shape()
    if shape is None:
        return
    message = (
        f"hf_ga: random numbers of shape {list(shape)} are drawn in windows of one micro-batch of "
        f"{draws.num_samples} samples, and their sizes do not tell which of them belong to which "
        "sample, so other splits of the windows may draw other numbers. That shows in two "
        "micro-batches (gradient_accumulation_steps=2), or with a batch size that divides none of "
        "these sizes."
    )
    warnings.once(message, topic="doubtful draws")
