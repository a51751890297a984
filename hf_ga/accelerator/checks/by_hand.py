"""Loops that accumulate by hand: `accelerator.backward(loss / k)`, a step after every k-th one."""

from torch import Tensor

from hf_ga.accelerator.checks.misuse import division_by_number, num_terms
from hf_ga.errors import ConfigError


class ByHand:
    """Finds out over how many backwards a loop accumulates, and checks that it does.

    Attributes:
        num_parts: What the loop divides its losses by; 1 if it does not divide them.
        is_established: Whether the optimizer has stepped after that many backwards.
        num_steps: How many optimizer steps the loop has made.
        is_used: Whether the loop has called `accelerator.backward`.
        was_one_batch: Whether the last step came after the backwards of one batch, undivided.
    """

    def __init__(self) -> None:
        """Start before the first backward of the run."""
        self.num_parts = 1
        self.is_established = False
        self.num_steps = 0
        self.is_used = False
        self.was_one_batch = False
        self._num_backwards = 0  # since the last step, those of one batch counted once
        self._may_be_mean_of_terms = False
        self._is_mean_of_terms = False  # (a + b) / 2 is no accumulation

    def note_backward(self, loss: Tensor, *, is_new: bool) -> None:
        """Record a backward of what the loop passed to `accelerator.backward`, before it frees the
        graph.

        Args:
            loss: The loss.
            is_new: Whether it is the first one of a batch.
        """
        self.is_used = True
        self._num_backwards += is_new or not self._num_backwards
        if not self._is_mean_of_terms:
            self.num_parts = division_by_number(loss) or 1
        number = 1 if self.num_parts == 1 else num_terms(loss)
        self._may_be_mean_of_terms = number > 1 and self.num_parts in (2, number)

    @property
    def has_begun(self) -> bool:
        """Whether there was one backward, but no step, of a window of several."""
        return self._num_backwards == 1

    @property
    def is_open(self) -> bool:
        """Whether there was a backward since the last step."""
        return self._num_backwards > 0

    @property
    def num_shown(self) -> int:
        """What the mean loss so far is multiplied by, so that a complete window has its mean."""
        return self.num_parts if self.is_established else self._num_backwards

    def check_step(self) -> None:
        """Check, before the optimizer steps, that the window has as many backwards as its losses
        were divided by. The last window of an epoch may have fewer.

        Raises:
            ConfigError: If it has not.
        """
        number = self._num_backwards
        parts = self.num_parts
        if number == 0 or number == parts:
            self.is_established = self.is_established or number == parts > 1
            return
        if number < parts and self.is_established:
            return
        if number == 1 and self._may_be_mean_of_terms:
            self._is_mean_of_terms = True
            self.num_parts = 1
            return
        if number < parts:
            raise ConfigError(
                f"the optimizer steps after {number} of {parts} backwards whose losses are divided "
                f"by {parts}: this update would have the gradient of {number} micro-batch alone. "
                f"Step when (step + 1) % {parts} == 0, not when step % {parts} == 0; or pass "
                f"gradient_accumulation_steps={parts} to Accelerator, put the loop's body into "
                "`with accelerator.accumulate(model):`, leave out the division, and replace the "
                "condition of the step by `if accelerator.sync_gradients:`. If the loss is meant "
                f"to be divided by {parts}, multiply it by {1 / parts:.6g}."
            )
        raise ConfigError(
            f"the optimizer steps after {number} backwards whose losses are divided by {parts}: "
            f"the update is {number / parts:g} times that of the full batch. Divide the mean loss "
            f"by {number}; or pass gradient_accumulation_steps={number} to Accelerator, and put "
            "the loop's body into `with accelerator.accumulate(model):`."
        )

    def note_step(self) -> None:
        """Record that the optimizer has stepped: the next backward begins a window."""
        if self._num_backwards:
            self.num_steps += 1
            self.was_one_batch = self._num_backwards == self.num_parts == 1
        self._num_backwards = 0
