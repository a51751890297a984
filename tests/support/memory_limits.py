"""A device whose memory runs out on command."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 9"
    ),
}


class Device:
    """Lets a forward of `model` on more than `fits` padded tokens fail, where `chosen()`; in the
    middle of its backward, if asked.

    Attributes:
        failures: shapes of the micro-batches that failed. seen: tokens of the samples that went
            forward since the last failure or `take`.
    """

    def __init__(
        self,
        model: nn.Module,
        fits: float,
        *,
        backward: bool = False,
        error: str = "gpu",
        chosen: Callable[[], bool] = lambda: True,
    ) -> None:
        self.fits = fits
        self.backward = backward
        self.error = ERRORS[error]
        self.chosen = chosen
        self.failures: list[tuple[int, ...]] = []
        self.seen: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(self._check, with_kwargs=True)

    def take(self) -> Counter:
        """How often each sample was seen."""
        seen = self.seen
        self.seen = []
        return Counter(seen)

    def _check(self, module: nn.Module, args: tuple, batch: dict) -> None:
        ids = batch["input_ids"]
        self.seen += [of_sample(row.tolist()) for row in ids]
        if ids.numel() <= self.fits or not self.chosen():
            return
        self.failures.append(tuple(ids.shape))
        if not torch.is_grad_enabled():  # an evaluation, of which the other batches count
            self._fail(len(ids))
        if not self.backward:
            self._fail()
        parameters = list(module.parameters())
        parameter = parameters[len(parameters) // 2]
        # The node that adds to its `.grad`: hooks on parameters get the gradient of the window.
        (self.node, _), *_ = parameter.expand_as(parameter).grad_fn.next_functions
        handle = self.node.register_hook(lambda *gradients: (handle.remove(), self._fail()))

    def _fail(self, lost: int = 0) -> None:
        del self.seen[-lost:]
        raise self.error


def of_sample(tokens: list[int]) -> tuple[int, ...]:
    """Without padding, which is token 0."""
    return tuple(token for token in tokens if token)
