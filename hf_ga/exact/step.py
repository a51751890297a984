"""The one loop of our own over the micro-batches of a window, and its repetition when memory runs
out.
"""

import itertools
from dataclasses import replace

from accelerate.utils.memory import clear_device_cache

from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import buffers_as_now, gradients_apart
from hf_ga.exact.memory import TooLarge
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window


def add_gradients(engine: Engine, window: Window) -> StepResult:
    """Add the gradient of the window's mean loss to `.grad`.

    Where memory runs out on a rank, all ranks drop the window's gradients and compute it again in
    smaller micro-batches: the same update. Under FSDP2 the rank first makes the collectives that
    the others wait for.

    Args:
        engine: Of the prepared model, which is in training mode.
        window: The samples of one optimizer step.

    Raises:
        See `hf_ga.backward_window`.
    """
    for retries in itertools.count():
        restore_buffers = buffers_as_now(engine.model)
        try:
            with gradients_apart(engine.parameters):
                result = compute(engine, window)
            return replace(result, retries=retries)
        except TooLarge as error:
            window.state.max_elements = error.num_elements // 2
        restore_buffers()  # what counts samples must not count them twice
        # After the traceback has released the failed try's tensors.
        clear_device_cache(garbage_collection=True)


def compute(engine: Engine, window: Window) -> StepResult:
    """The gradient of one window, added up in `.grad`, which should be empty before."""
    engine.begin(window)
    index = 0
    with engine.deferring_failures(), engine.scope():
        # After forwards without gradients: a micro-batch that is repeated gathers the same units.
        engine.backend.reshard(engine.model)
        while index < len(engine.calls):
            outputs = None  # frees those of the last micro-batch, or of one that failed
            must_rejoin = False
            try:
                with engine.micro_batch(index) as batch:
                    outputs = engine.forward(batch)
                    engine.backward(outputs)
            except Exception as error:
                must_rejoin = engine.can_rejoin(error)
                if not must_rejoin:
                    raise
            if must_rejoin:  # after the traceback has released its tensors
                engine.rejoin(index)
            else:
                index += 1
    return engine.end()
