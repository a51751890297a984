"""A first pass over a window: the forwards of its micro-batches without gradients, which losses of
all its samples need.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hf_ga.draws.generators import random_states
from hf_ga.engine.checks.draw_check import check_first_pass
from hf_ga.engine.slots import Slot
from hf_ga.loading.fetch import WindowRequest
from hf_ga.model.forward import extra_forwards

if TYPE_CHECKING:  # the engine imports this module
    from hf_ga.engine.window_engine import WindowEngine


def run_first_pass(
    engine: "WindowEngine",
    slots: Sequence[Slot],
    request: WindowRequest,
    forward: Callable[[Slot], Any],
    after: Callable[[], Any] | None = None,
) -> list[Any]:
    """Run the forwards of all micro-batches without gradients, with the random numbers that the
    loop's forwards will draw.

    They are run again if one showed that random numbers of the others were keyed otherwise.

    Args:
        engine: Computes the window.
        slots: The micro-batches of this rank.
        request: The plan of the window.
        forward: Runs the forward of a micro-batch.
        after: Is called after each forward.

    Returns:
        For each micro-batch, what `after` returned; without it, what `forward` did.

    Raises:
        UnkeyedRandomness: If random numbers were drawn that are not keyed.
    """
    draws = engine.draws
    backend = engine.gradient.backend
    before = random_states()
    while True:
        num_reclassified = draws.num_reclassified
        results = []
        for slot in slots:
            with _forward_of(engine, slot, request):
                result = forward(slot)
                results.append(result if after is None else after())
        is_changed = draws.num_reclassified != num_reclassified
        if backend.is_sharded:  # forwards are collectives
            is_changed = bool(backend.max_over_ranks(int(is_changed)))
        if not is_changed:
            break
    engine.slot = None
    check_first_pass(before)
    return results


@contextmanager
def _forward_of(engine: "WindowEngine", slot: Slot, request: WindowRequest) -> Iterator[None]:
    """Run a forward of a first pass in the block: keyed draws, no gradients, buffers kept.

    Raises:
        TooLarge: If memory ran out, and the loop computes such a window in smaller micro-batches.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(engine.draws.resumed())
            stack.enter_context(engine.micro_batch(slot, request))
            stack.enter_context(torch.no_grad())
            for model in engine.models:
                stack.enter_context(extra_forwards(model))
            yield
    except Exception as error:
        if not engine.splits_where_memory_runs_out:
            raise
        raise engine.error_to_report(error) from None
