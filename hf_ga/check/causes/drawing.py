"""Where the forwards of the model of an equivalence check draw random numbers."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from accelerate.utils import send_to_device
from torch import nn

from hf_ga.check.oracle.reference import begin_draws, mean_loss
from hf_ga.check.steps import CheckContext, device_of
from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.loading.batches import as_batch, sample_length
from hf_ga.model.forward import force_eager, restored_state

# Batch sizes of the forwards. The dim of a draw that holds the samples changes with them.
BATCH_SIZES = (2, 3)


def look_at_forwards(context: CheckContext) -> list[nn.Module]:
    """Run forwards of copies of the longest sample, in which `context.draws` learn which dim of
    each draw holds the samples.

    Returns:
        The innermost modules with random draws that cannot be tied to samples.
    """
    longest = max(context.samples, key=sample_length)
    with (
        context.draws.scope(),
        restored_state(context.model),
        force_eager(),
        _drawing_modules(context.model) as found,
    ):
        for num_samples in BATCH_SIZES:
            batch = as_batch(context.collate_fn([longest] * num_samples))
            begin_draws(context, np.arange(num_samples))
            mean_loss(context, send_to_device(batch, device_of(context.model)))
    return list(dict.fromkeys(found))


@contextmanager
def _drawing_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Give a list of the innermost modules whose forwards in the block move a global random
    generator, which keyed draws do not.
    """
    found: list[nn.Module] = []
    running: list[tuple[dict[str, bytes], int]] = []  # states and length of `found` before

    def before(module: nn.Module, args: tuple) -> None:
        """Note where the generators stand."""
        running.append((random_states(), len(found)))

    def after(module: nn.Module, args: tuple, outputs: Any) -> None:
        """Keep a module that has moved one, unless one of its submodules has."""
        states, num_found = running.pop()
        if len(found) == num_found and moved_generators(states):
            found.append(module)

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield found
