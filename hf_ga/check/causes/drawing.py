"""What forwards of the model of an equivalence check show: where they draw random numbers, and
whether they normalise by statistics of the micro-batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ga.check.oracle.reference import begin_draws, mean_loss
from hf_ga.check.steps import CheckContext, device_of
from hf_ga.draws.generators import moved_generators, random_states
from hf_ga.loading.batches import as_batch, sample_length
from hf_ga.model.forward import force_eager, restored_state
from hf_ga.model.override import override

# Batch sizes of the forwards. The dim of a draw that holds the samples changes with them.
BATCH_SIZES = (2, 3)


def look_at_forwards(context: CheckContext) -> list[nn.Module]:
    """Run forwards of copies of the longest sample, in which `context.draws` learn which dim of
    each draw holds the samples. Sets `context.has_batch_norm`.

    Returns:
        The innermost modules with random draws that cannot be tied to samples.
    """
    longest = max(context.samples, key=sample_length)
    window = context.first_samples_window(max(BATCH_SIZES))
    with (
        context.draws.scope(),
        restored_state(context.model),
        force_eager(),
        _noting_batch_norm(context),
        _drawing_modules(context.model) as found,
    ):
        for num_samples in BATCH_SIZES:
            batch = as_batch(context.collate_fn([longest] * num_samples))
            begin_draws(context, window, np.arange(num_samples))
            mean_loss(context, send_to_device(batch, device_of(context.model)))
    return list(dict.fromkeys(found))


@contextmanager
def _noting_batch_norm(context: CheckContext) -> Iterator[None]:
    """Set `context.has_batch_norm` if a BatchNorm in the block normalises by statistics of its
    input, whatever its parameters need.
    """
    batch_norm = F.batch_norm

    def noting(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        *settings: Any,
        **named_settings: Any,
    ) -> Tensor:
        """Replacement of `F.batch_norm`."""
        context.has_batch_norm |= training
        return batch_norm(
            input, running_mean, running_var, weight, bias, training, *settings, **named_settings
        )

    with override(F, batch_norm=noting):
        yield


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
