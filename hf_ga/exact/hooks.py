"""Hooks that run around the forwards of a window.

Keyed dropout, the load-balancing loss of a mixture-of-experts router and every speed-up are hooks.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_ga.exact.batches import MicroBatch

# Numbers of targets: a single one, or one for each mean of a loss that is a sum of several means.
Counts = tuple[float, ...]


@dataclass(frozen=True)
class Call:
    """The inputs of one forward and backward of a micro-batch, as hooks and losses receive them.

    Attributes:
        micro_batch: The collated samples, on the host.
        batch: The tensors of `micro_batch`, on the device. Empty until the forward begins.
        counts: Numbers of targets, counted on the host. () if the loss counts them in the forward.
        keys: One dropout key per sample: int64, shape (samples,), on the device.
        window_key: Key of the dropout masks that all samples of the window share: int64, shape
            (1,), on the device.
        weight: 1. Or 0 for a filler, which runs only so that all ranks run the same number of
            forwards (FSDP) and adds nothing to the loss or the gradient.
        index: 0-based index among this rank's micro-batches of the window; `FILLER_INDEX` for a
            filler.
    """

    micro_batch: MicroBatch
    batch: dict[str, Any] = field(default_factory=dict)
    counts: Counts = ()
    keys: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    window_key: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    weight: int = 1
    index: int = 0


class Hook:
    """Base class for code that runs around the forwards of a window: keyed dropout, speed-ups, ...

    Its methods are no-ops.
    """

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager to run all forwards and backwards of a window in.

        On exit it undoes everything that it changed, for example patched functions.

        Args:
            model: The prepared model.
        """
        return nullcontext()

    def before(self, call: Call) -> None:
        """Prepare for the next forward. The engine calls this just before each forward.

        Args:
            call: The inputs of that forward, already on the device.
        """


class SpeedUp(Hook):
    """Base class for speed-ups: hooks around the forwards of a window that must not change the loss
    or the gradient.

    The proof computes both with and without the speed-up, and disables it if they differ.

    Attributes:
        name: The speed-up's name in logs and reports.
    """

    name = ""

    def attach(
        self, model: nn.Module, dropout: Hook, *, reads_logits: bool, has_router: bool
    ) -> str | None:
        """Attach the speed-up to a model, if the model supports it.

        Args:
            model: The unwrapped model.
            dropout: The model's keyed dropout (a `KeyedDropout`).
            reads_logits: Whether the loss is computed from the model's outputs after the forward,
                by the user's `loss_fn` or as a sum of several means.
            has_router: Whether the model adds the load-balancing loss of a mixture-of-experts
                router.

        Returns:
            None if the speed-up was attached, or the reason why it does not apply to this model.
        """
        return None

    def trial(self) -> AbstractContextManager[None]:
        """Return a context manager that forces the speed-up on for the proof's trial batches.

        The proof must test the speed-up, even if its few samples are too small to gain from it. In
        this base class the context does nothing.
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
        """Return why the proof's trial forward, which just ran, did not use the speed-up.

        Returns:
            The reason, or None if the speed-up was used.
        """
        return None
