"""Reads the loss of a forward without a backward: its graph is built, but keeps no activations.

Autograd saves tensors for a backward in the order of the operations. Reading a loss needs a few of
them, those of the loss itself. Which ones is found by trying: a forward is run again if its loss
asked for a tensor that was dropped; the next forwards keep it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Result = TypeVar("Result")
MAX_KEPT = 256  # tensors of a forward


class LightGraph:
    """Runs forwards whose graphs keep only the tensors that are asked for.

    Args:
        is_any: Returns whether a condition holds on any rank, where forwards are collectives, so
            that all ranks run equally many.

    Example:
        graph = LightGraph()
        terms = graph.run(lambda: read_terms(model(**batch).loss, num_samples=8))
    """

    def __init__(self, is_any: Callable[[bool], bool] = bool) -> None:
        """Start without knowing which tensors are needed."""
        self._is_any = is_any
        self._needed: set[int] = set()
        self._missing: set[int] = set()
        self._number = 0

    def run(self, compute: Callable[[], Result]) -> Result:
        """Return what a function returns that runs a forward and reads its loss.

        Args:
            compute: The function. It may be called several times, and must return nothing that
                depends on the graph.
        """
        while True:
            self._number = 0
            self._missing = set()
            result = None  # of the try before
            failure: Exception | None = None
            with torch.enable_grad(), saved_tensors_hooks(self._pack, self._unpack):
                try:
                    result = compute()
                except Exception as error:  # perhaps because of what was dropped
                    failure = error
            if failure is not None and not self._missing:
                raise failure
            if not self._is_any(bool(self._missing)):
                return result
            if len(self._needed) > MAX_KEPT:  # of forwards that differ from each other
                self._needed = set()
            self._needed |= self._missing

    def _pack(self, tensor: Tensor) -> Any:
        """Keep a tensor that was asked for before; otherwise its shape."""
        number = self._number
        self._number += 1
        if number in self._needed:
            return tensor
        return number, tensor.shape, tensor.dtype, tensor.device

    def _unpack(self, packed: Any) -> Tensor:
        """Return a kept tensor, or zeros of a dropped one, which will be kept."""
        if isinstance(packed, Tensor):
            return packed
        number, shape, dtype, device = packed
        self._missing.add(number)
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
