"""A stream in another order: a shuffle buffer whose every choice is a pure function of (seed, epoch, position)."""

from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

from hf_ga.exact.hashing import Stream, make_key

T = TypeVar("T")


def shuffled(stream: Iterator[T], buffer_size: int, seed: int, epoch: int) -> Iterator[T]:
    """The stream in the order in which its things leave a buffer.

    The buffer takes the first `buffer_size` things. At position p = 0, 1, ... the thing in slot hash(seed, epoch, p) mod (things in
    the buffer) leaves, and the next one of the stream takes its slot; at the end of the stream the last slot's does. So the thing
    at position p has a number below p + buffer_size in the stream, and never more than `buffer_size` are held. The order needs no
    random state: it is the same for every process, and a stream that is read again from its beginning comes in the same order.

    Args:
        buffer_size: 0 and 1 leave the order as it is.

    >>> list(shuffled(iter(range(8)), 4, seed=0, epoch=0))
    [0, 4, 3, 1, 6, 7, 5, 2]
    """
    if buffer_size < 2:
        yield from stream
        return
    buffer = list(islice(stream, buffer_size))
    position = 0
    while buffer:
        slot = make_key(Stream.BUFFER, seed, epoch, position) % len(buffer)
        yield buffer[slot]
        try:
            buffer[slot] = next(stream)
        except StopIteration:
            buffer[slot] = buffer[-1]
            buffer.pop()
        position += 1
