"""A shuffle buffer for streams, whose order is a pure function of (seed, epoch)."""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from hf_ga.draws.hashing import Purpose, fold_in

T = TypeVar("T")


def shuffled(stream: Iterator[T], buffer_size: int, seed: int, epoch: int) -> Iterator[T]:
    """Yield the samples of a stream in a shuffled order, with a buffer of limited size.

    The buffer is filled with the first `buffer_size` items. For position p = 0, 1, ... the item in
    slot hash(seed, epoch, p) mod (number of items in the buffer) is yielded, and replaced by the
    next item of the stream. After the end of the stream, it is replaced by the item in the last
    slot. So the item that is yielded at position p has an index below p + buffer_size in the
    stream.

    There is no random state: the order is the same on every process, and whenever the stream is
    read again.

    Args:
        stream: The items.
        buffer_size: Maximum number of items in the buffer. 0 and 1 keep the order of the stream.
        seed: Any integer.
        epoch: 0-based; every epoch has its own order.

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
