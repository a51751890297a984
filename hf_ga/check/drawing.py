"""Where the model of an equivalence check draws random numbers."""

from typing import Any

import numpy as np
from accelerate.utils import send_to_device
from torch import nn

from hf_ga.check.reference import mean_loss
from hf_ga.check.steps import CheckContext, device_of
from hf_ga.exact.batches import as_batch, sample_length
from hf_ga.exact.forward import force_eager, restored_buffers
from hf_ga.exact.generators import moved_generators, random_states
from hf_ga.exact.masks import sample_keys, window_key

# Batch sizes of the forwards. The dim of a draw that holds the samples changes with them.
BATCH_SIZES = (2, 3)


def find_draws(context: CheckContext) -> list[nn.Module]:
    """Run forwards of copies of the longest sample, in which `context.draws` learn which dim of
    each draw holds the samples.

    Returns:
        The innermost modules with random draws that cannot be tied to samples.
    """
    device = device_of(context.model)
    longest = max(context.samples, key=sample_length)
    found: list[nn.Module] = []
    for num_samples in BATCH_SIZES:
        keys = sample_keys(context.seed, 0, np.arange(num_samples)).to(device)
        batch = as_batch(context.collate_fn([longest] * num_samples))
        context.draws.begin(keys, window_key(context.seed, 0, 0).to(device))
        with (
            context.draws.scope(),
            restored_buffers(context.model),
            force_eager(),
            _DrawingModules(context.model) as drawing,
        ):
            mean_loss(context, send_to_device(batch, device))
        found += drawing.found
    return list(dict.fromkeys(found))


class _DrawingModules:
    """Finds the innermost modules whose forwards move a global random generator, which keyed draws
    do not.
    """

    def __init__(self, model: nn.Module) -> None:
        """Observe the modules of a model."""
        self.found: list[nn.Module] = []
        self._modules = list(model.modules())
        self._running: list[tuple[dict[str, bytes], int]] = []  # states, number found before
        self._handles: list[Any] = []

    def __enter__(self) -> "_DrawingModules":
        """Begin to observe."""
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._before, prepend=True))
            self._handles.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *_: Any) -> None:
        """End it."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple) -> None:
        """Note where the generators stand."""
        self._running.append((random_states(), len(self.found)))

    def _after(self, module: nn.Module, args: tuple, outputs: Any) -> None:
        """Keep a module that has moved a generator, unless one of its submodules has."""
        states, num_found = self._running.pop()
        if len(self.found) == num_found and moved_generators(states):
            self.found.append(module)
