"""All processes go on or none does: what one of them cannot do stops all, in the same place with the same message."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from accelerate.utils import gather_object

from hf_ga.errors import CheckpointError
from hf_ga.exact.reduce import sum_over_processes


@contextmanager
def agreed(accelerator: Accelerator) -> Iterator[None]:
    """A block that every process enters, whatever each does in it, and that all have left when one goes on.

    Raises:
        CheckpointError: raised by the block on any process: on all, instead of waiting for it for ever. Of several the first's.
    """
    failure = None
    try:
        yield
    except CheckpointError as error:
        failure = str(error)
        if accelerator.num_processes == 1:
            raise
    if accelerator.num_processes > 1 and any(sum_over_processes(accelerator, [failure is not None])):  # one number, mostly 0
        raise CheckpointError(next(filter(None, gather_object([failure]))))
