"""What a speed-up is: code around the forwards of a window that must not change the loss or the
gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.loading.batches import MicroBatch
from hf_ga.model.override import Replacement, replaced


@dataclass(frozen=True)
class Call:
    """The inputs of one forward of a micro-batch, as speed-ups get them.

    Attributes:
        micro_batch: The collated samples, on the host.
        batch: The arguments of the model, on the device.
        keys: One dropout key per sample: int64, shape (samples,), on the device.
        max_tokens: Maximum number of real tokens of a micro-batch in this run. None: unknown.
    """

    micro_batch: MicroBatch
    batch: dict[str, Any] = field(default_factory=dict)
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    max_tokens: int | None = None


class SpeedUp:
    """Base class for speed-ups: code around the forwards of a window that must not change the loss
    or the gradient. Its methods do nothing.

    Each is tried on a micro-batch, with and without it, and left out if the two differ.

    Attributes:
        name: The speed-up's name in logs and reports.
        is_compiled: Whether it runs compiled layers.
    """

    name = ""
    is_compiled = False

    def attach(self, model: nn.Module, draws: KeyedDraws) -> str | None:
        """Attach the speed-up to a model, if the model supports it.

        Args:
            model: The unwrapped model.
            draws: Keys the random draws of the model.

        Returns:
            None if the speed-up was attached, or the reason why it does not apply to this model.
        """
        return None

    def obstacle(self, compiled: Sequence[nn.Module]) -> str | None:
        """Return why the speed-up cannot be used any more, before a window; None if it can.

        Args:
            compiled: The compiled modules of the model.
        """
        return None

    def before(self, call: Call) -> None:
        """Prepare for the next forward, or for its backward, which may run parts of it again.

        Args:
            call: The inputs of that forward.
        """

    def replacements(self) -> Sequence[Replacement]:
        """Return what is replaced in the forward or backward that `before` has prepared."""
        return ()

    def after(self) -> None:
        """Undo what `before` has changed."""

    def trial(self) -> AbstractContextManager[None]:
        """Return a context that forces the speed-up on in its trial, even if the few samples are
        too small to gain from it.
        """
        return nullcontext()

    def fits(self, call: Call) -> bool:
        """Return whether the speed-up may be used for a micro-batch without changing its result.

        Decided on the host, from the structure of the batch. If False, the micro-batch is computed
        without the speed-up.

        Args:
            call: The micro-batch, whose tensors are still on the host (`call.micro_batch`).
        """
        return True

    def verdict(self) -> str | None:
        """Return why the forward of the trial, which just ran, did not use the speed-up.

        Returns:
            The reason, or None if the speed-up was used.
        """
        return None


@contextmanager
def acting(speed_ups: Sequence[SpeedUp], call: Call) -> Iterator[None]:
    """Let some speed-ups act on the forward or backward of a micro-batch in the block.

    Args:
        speed_ups: They are attached to the model.
        call: The inputs of the forward.
    """
    try:
        for speed_up in speed_ups:
            speed_up.before(call)
        with replaced([r for speed_up in speed_ups for r in speed_up.replacements()]):
            yield
    finally:
        for speed_up in speed_ups:
            speed_up.after()
