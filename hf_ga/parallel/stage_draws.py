"""Random draws of a pipeline stage: those that the full model would make there."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_ga.draws.keyed import KeyedDraws
from hf_ga.exact.batches import Batch
from hf_ga.exact.forward import argument_filter, extra_forwards
from hf_ga.exact.hooks import Call, Hook
from hf_ga.exact.masks import sample_keys, window_key


class StageDraws(Hook):
    """Keys the draws of a stage by their numbers in a forward of the full model.

    Args:
        first: How many draws the previous stages make in a forward.
    """

    sites: dict[Any, Any] = {}
    unkeyed: tuple[nn.Module, ...] = ()

    def __init__(self, first: int) -> None:
        """Start before the first forward."""
        self.first = first
        self._draws = KeyedDraws()

    def scope(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which all draws are keyed."""
        return self._draws.scope()

    def before(self, call: Call) -> None:
        """Begin the draws of a forward."""
        self._draws.begin(call.keys, call.window_key, first=self.first)

    def check_compiled(self, model: nn.Module) -> None:
        """Do nothing: draws in compiled layers are keyed, too."""


def num_draws_before(model: nn.Module, batch: Batch, num_samples: int, module: nn.Module) -> int:
    """Return how many draws a forward of a model makes before it reaches a module.

    Args:
        model: The full model, in training mode.
        batch: A batch on the model's device.
        num_samples: Its number of samples.
        module: A module of the model.
    """
    draws = KeyedDraws()
    counted = []
    keys = sample_keys(0, 0, np.arange(num_samples))
    device = next(model.parameters()).device
    with ExitStack() as stack:
        handle = module.register_forward_pre_hook(lambda *_: counted.append(draws.num_draws))
        stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(extra_forwards(model))
        stack.enter_context(draws.scope())
        draws.begin(keys.to(device), window_key(0, 0, 0).to(device))
        model(**argument_filter(model)(batch))
    return counted[0]
