"""Hooks around the forwards of a window: keyed dropout, the router's balancing loss and every
speed-up are hooks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.exact.batches import MicroBatch

Counts = tuple[
    float, ...
]  # targets: one number, or one for each mean of a loss that is a sum of means


@dataclass(frozen=True)
class Call:
    """One forward and backward, as hooks and losses see it.

    Attributes:
        micro_batch: on the host.
        batch: on the device.
        counts: targets, counted on the host; () for a loss that counts in its forward.
        keys: int64, shape (samples,): what the samples' dropout masks are keyed by, on the device.
        window_key: int64, shape (1,): the same of masks that the whole window shares.
        weight: 0 for a call that is made only because other ranks make one (FSDP), else 1.
        index: of the micro-batch among this process's in the window.
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
        """Around the forwards and backwards of a window; leaves nothing behind. `model` as it was
        prepared.
        """
        return nullcontext()

    def before(self, call: Call) -> None:
        """Before the forward of `call`."""


class SpeedUp(Hook):
    """A hook that must change neither loss nor gradient. The proof compares both with and without
    it, and leaves it out if they differ.

    Attributes:
        name: how reports call it.
    """

    name = ""

    def attach(
        self, model: nn.Module, dropout: Hook, *, reads_logits: bool, has_router: bool
    ) -> str:
        """Attach to a model. Returns why it is not tried on this one; "" if it is.

        Args:
            model: unwrapped. dropout: its `KeyedDropout`.
            reads_logits: the loss is computed from the outputs after the forward (a `loss_fn`, a
                sum of means).
            has_router: the head adds a router's balancing loss.
        """
        return ""

    def trial(self) -> AbstractContextManager[None]:
        """Around the proof's probes: used also where a batch is too small to gain from it."""
        return nullcontext()

    def fits(self, call: Call) -> bool:
        """Whether a micro-batch has the structure for which the speed-up changes nothing. Decided
        on the host; a micro-batch that does not is computed without it.
        """
        return True

    def verdict(self) -> str:
        """After the probe with it: why it had no effect; "" if it had one."""
        return ""
