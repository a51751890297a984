"""Hooks around the forwards of a window: keyed dropout, the router's balancing loss and every
speed-up are hooks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.exact.batches import MicroBatch

# Targets: one number, or one for each mean of a loss that is a sum of means.
Counts = tuple[float, ...]


@dataclass(frozen=True)
class Call:
    """One forward and backward, as hooks and losses see it.

    Attributes:
        micro_batch: Its samples, on the host.
        batch: Its tensors, on the device.
        counts: Targets, counted on the host; () for a loss that counts in its forward.
        keys: Keys of the samples' dropout masks: int64, shape (samples,), on the device.
        window_key: Key of masks that the whole window shares: int64, shape (1,), on the device.
        weight: 0 for a call that is made only because other ranks make one (FSDP), else 1.
        index: Which of this process's micro-batches in the window.
    """

    micro_batch: MicroBatch
    batch: dict[str, Any] = field(default_factory=dict)
    counts: Counts = ()
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    window_key: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    weight: int = 1
    index: int = 0


class Hook:
    """Takes part in the forwards of a window. Every method does nothing unless overridden."""

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager around the forwards and backwards of a window.

        It leaves nothing behind.

        Args:
            model: The prepared model.
        """
        return nullcontext()

    def before(self, call: Call) -> None:
        """Called before the forward of `call`."""


class SpeedUp(Hook):
    """A hook that must change neither loss nor gradient.

    The proof compares both with and without it, and leaves it out if they differ.

    Attributes:
        name: How reports call it.
    """

    name = ""

    def attach(
        self, model: nn.Module, dropout: Hook, *, reads_logits: bool, has_router: bool
    ) -> str | None:
        """Attach to a model.

        Args:
            model: The unwrapped model.
            dropout: Its `KeyedDropout`.
            reads_logits: Whether the loss is computed from the outputs after the forward (a
                `loss_fn`, a sum of means).
            has_router: Whether the head adds a router's balancing loss.

        Returns:
            Why it is not tried on this model. None: it is tried.
        """
        return None

    def trial(self) -> AbstractContextManager[None]:
        """Return a context manager around the proof's forwards.

        Within it the speed-up is used also where a batch is too small to gain from it.
        """
        return nullcontext()

    def fits(self, call: Call) -> bool:
        """Whether the speed-up changes nothing for a micro-batch of this structure.

        Decided on the host. A micro-batch that does not fit is computed without it.
        """
        return True

    def verdict(self) -> str | None:
        """Return why the forward before had no use of the speed-up. None: it had."""
        return None
