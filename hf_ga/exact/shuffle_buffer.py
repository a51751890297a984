"""A shuffle buffer whose choices are pure functions of (seed, epoch, position)."""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from hf_ga.exact.hashing import Purpose, fold_in

T = TypeVar("T")


def shuffled(stream: Iterator[T], buffer_size: int, seed: int, epoch: int) -> Iterator[T]:
    """Shuffle a stream with a buffer.

    The buffer is filled with the first `buffer_size` items. At position p = 0, 1, ... the item in
    slot hash(seed, epoch, p) mod (items in the buffer) is yielded, and the next item of the stream
    replaces it; at the end of the stream, the item of the last slot does. So the item at position p
    has an index below p + buffer_size in the stream, and the buffer never exceeds `buffer_size`
    items. No random state is needed: the order is the same on every process and whenever the stream
    is read again.

    Args:
        buffer_size: 0 and 1 keep the order of the stream.

    >>> list(shuffled(iter(range(8)), 4, seed=0, epoch=0))
    [0, 4, 3, 1, 6, 7, 5, 2]
    """
    if buffer_size < 2:
        yield from stream
        return
    buffer = list(islice(stream, buffer_size))
    position = 0
    while buffer:
        slot = fold_in(Purpose.BUFFER, seed, epoch, position) % len(buffer)
        yield buffer[slot]
        try:
            buffer[slot] = next(stream)
        except StopIteration:
            buffer[slot] = buffer[-1]
            buffer.pop()
        position += 1
