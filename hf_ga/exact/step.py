"""hf_ga's own loop over the micro-batches of a window, which is retried if memory runs out."""

import itertools
from dataclasses import replace

from accelerate.utils.memory import clear_device_cache

from hf_ga.exact.engine import Engine
from hf_ga.exact.forward import fresh_gradients, snapshot_buffers
from hf_ga.exact.memory import TooLarge
from hf_ga.exact.update import StepResult
from hf_ga.exact.window import Window


def add_gradients(engine: Engine, window: Window) -> StepResult:
    """Add the gradient of a window's mean loss to the `.grad` of the model's parameters.

    If any rank runs out of memory, all ranks drop the window's gradients and compute the window
    again in smaller micro-batches, which gives the same update. The model's buffers are restored
    before that.

    Args:
        engine: The engine of the prepared model, which is in training mode.
        window: The samples of one optimizer step.

    Returns:
        The window's mean loss, its number of targets, and how many times it was computed again.

    Raises:
        UnkeyedRandomness: If a forward drew random numbers from a global generator.
        LossNotAdditive: If the loss was found not to be additive on samples of the window.
        OutOfMemory: If a micro-batch that cannot be split does not fit into memory.
        ProcessFailed: If another rank failed.
        Exception: Any other exception of this rank, such as one from the model's forward.
    """
    for retries in itertools.count():
        restore_buffers = snapshot_buffers(engine.model)
        try:
            with fresh_gradients(engine.parameters):
                result = compute(engine, window)
            return replace(result, retries=retries)
        except TooLarge as error:
            window.state.max_elements = error.num_elements // 2  # half of what did not fit
        restore_buffers()  # what counts samples (BatchNorm) must not count them twice
        # Only here, as the traceback keeps the tensors of the failed try until the `except` ends.
        clear_device_cache(garbage_collection=True)


def compute(engine: Engine, window: Window) -> StepResult:
    """Compute the gradient of a window's mean loss, with one forward and backward per micro-batch.

    Under FSDP2, a rank that runs out of memory keeps running the collectives that the other ranks
    wait for; all ranks raise at the end.

    Args:
        engine: The engine of the prepared model.
        window: The samples of one optimizer step.

    Returns:
        The window's mean loss and number of targets. The gradient is in `.grad`, which should be
        None before.

    Raises:
        TooLarge: If a micro-batch did not fit into memory on some rank, and can be split.
    """
    engine.begin(window)
    index = 0
    with engine.deferring_failures(), engine.scope():
        # Forwards without backwards (an evaluation, a first pass) leave FSDP2's units gathered. If
        # a micro-batch is repeated, every rank must gather the same units again.
        engine.backend.reshard(engine.model)
        while index < len(engine.calls):
            outputs = None  # frees the outputs of the previous or failed micro-batch
            must_rejoin = False
            try:
                with engine.micro_batch(index) as batch:
                    outputs = engine.forward(batch)
                    engine.backward(outputs)
            except Exception as error:
                must_rejoin = engine.can_rejoin(error)
                if not must_rejoin:
                    raise
            if must_rejoin:  # not in the `except` block, where the traceback still keeps tensors
                engine.rejoin(index)
            else:
                index += 1
    return engine.end()
