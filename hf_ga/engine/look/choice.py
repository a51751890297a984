"""Which windows of a run are rehearsed, and which of their samples, in which company."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_ga.loading.window import Window

NUM_FIRST_WINDOWS = 3  # are rehearsed
EARLY_WINDOWS = (8, 16, 32, 64)  # too: what a loop begins after a warm-up
INTERVAL = 100  # one window in this many is rehearsed afterwards


def is_rehearsed(window_index: int) -> bool:
    """Whether the n-th window of a run, counted from 0, is rehearsed."""
    is_early = window_index < NUM_FIRST_WINDOWS or window_index in EARLY_WINDOWS
    return is_early or window_index % INTERVAL == 0


def number_of(window: Window) -> int:
    """Return the number of a window that decides whether it is rehearsed: its own, so that a run
    that is resumed rehearses the same windows.
    """
    return window.index if window.epoch == 0 else max(window.index, EARLY_WINDOWS[-1] + 1)


@dataclass(frozen=True)
class Choice:
    """What decides which samples of a window are rehearsed.

    Attributes:
        spare: Offsets of other ranks' samples, which may keep the rehearsed samples company.
        lengths: About how long each sample of the window is, shape (samples of the window,).
        preferred: Offsets of samples that are rehearsed in any case.
        is_first: Whether no window of the run was rehearsed so far. Later rehearsals are half as
            large.
    """

    spare: np.ndarray
    lengths: np.ndarray
    preferred: np.ndarray
    is_first: bool

    @property
    def is_large(self) -> bool:
        """Whether the rehearsal is about as large as a micro-batch: the first one, and one with
        preferred samples, which need company.
        """
        return self.is_first or len(self.preferred) > 0


def rehearsal_parts(
    planned: Sequence[np.ndarray], num_parts: int, choice: Choice
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Choose the samples to rehearse in a window, and split the window into other micro-batches.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        num_parts: Number of micro-batches after the rehearsal.
        choice: What decides.

    Returns:
        (offsets of the rehearsed samples, micro-batches that follow), of different sizes.
    """
    own = np.concatenate(planned) if len(planned) else np.empty(0, np.int64)
    parts = [part for part in np.array_split(own, num_parts) if len(part)]
    size = max((len(micro_batch) for micro_batch in planned), default=0)
    if not choice.is_large:
        size = _half(size)
    if len(planned):
        size = min(size, _num_that_fit(planned, choice))
    size = max(size, 2)  # a sample alone has no company
    if len(parts) == 1:
        size = max(size - 1, 2)
        if size == len(parts[0]):
            size += 1 if len(choice.spare) else -1
        # The shortest ones, for another width than that of the only part.
        shortest_first = np.argsort(choice.lengths[parts[0]], kind="stable")
        rehearsed = _with_company(parts[0][shortest_first], choice, size)
    else:
        rehearsed = _of_all_parts(sorted(parts, key=len, reverse=True), choice, size)
    return rehearsed[::-1].copy(), parts


def rehearsed_offsets(planned: Sequence[np.ndarray], choice: Choice) -> np.ndarray:
    """Choose the samples to rehearse in a window that follows as it was planned.

    Their number differs from that of all planned micro-batches, where the window has enough.

    Args:
        planned: The micro-batches of this rank, as offsets of samples in the window.
        choice: What decides.
    """
    sizes = {len(micro_batch) for micro_batch in planned}
    size = max(sizes) - 1 if choice.is_large else _half(max(sizes))
    size = min(size, _num_that_fit(planned, choice))
    others = [number for number in range(2, max(sizes) + 2) if number not in sizes]
    size = min(others or [max(sizes) + 1], key=lambda number: (abs(number - size), number))
    if len(planned) == 1:
        own = _longest_first(planned[0], choice.lengths)
        first = np.array([*dict.fromkeys([*choice.preferred.tolist(), *own.tolist()])], np.int64)
        return _with_company(first, choice, size)[::-1].copy()
    return _of_all_parts(planned, choice, size)[::-1].copy()


def _num_that_fit(planned: Sequence[np.ndarray], choice: Choice) -> int:
    """Return how many samples, padded to the longest one, take the memory of the largest planned
    micro-batch; at least 3. A plan by length has its most samples where they are short.
    """
    longest = max(1, choice.lengths.max(initial=0))
    padded = [len(part) * choice.lengths[part].max() for part in planned if len(part)]
    return max(3, int(max(padded) / longest)) if max(padded, default=0) else max(map(len, planned))


def _half(size: int) -> int:
    """Return about half of a number of samples, an odd number of at least 3 if there are as many:
    dims of layers are even, and a draw of such a size is not taken for one of rows of samples.
    """
    return min(size, max(3, size // 2 | 1))


def _with_company(own: np.ndarray, choice: Choice, size: int) -> np.ndarray:
    """Return the first samples of this rank together with others, half of each, `size` in total;
    more of its own if there are fewer others, or more preferred ones.
    """
    spare = np.setdiff1d(choice.spare, own)
    num_own = min(len(own), max(len(choice.preferred), (size + 1) // 2, size - len(spare)))
    return np.concatenate([own[:num_own], spare[: max(0, size - num_own)]])


def _of_all_parts(parts: Sequence[np.ndarray], choice: Choice, size: int) -> np.ndarray:
    """Return `size` samples: all preferred ones; the longest one, which has no padding in any
    company; then the first ones of all parts in turn, those of other ranks last.
    """
    own = np.concatenate(parts)
    longest = _longest_first(own, choice.lengths)[:1]
    in_turn = _in_turn([_longest_first(part, choice.lengths) for part in parts], size)
    preferred = _longest_first(choice.preferred, choice.lengths)
    size = max(size, len(preferred))
    ordered = np.concatenate([preferred, longest, in_turn, choice.spare])
    return np.array([*dict.fromkeys(ordered.tolist())][:size], np.int64)


def _longest_first(offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return samples with the longest one in front."""
    if not len(offsets):
        return offsets
    longest = int(lengths[offsets].argmax())
    return np.concatenate([offsets[longest : longest + 1], np.delete(offsets, longest)])


def _in_turn(parts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return up to `size` samples: the first of each part, then the second of each, ...

    If there are more parts than `size`, they are taken at equal distances, from the first to the
    last: parts are often in the order of their lengths, and samples of one length would not show
    what depends on the padded width.
    """
    if len(parts) > size:
        spread = np.linspace(0, len(parts) - 1, size).round().astype(int)
        parts = [parts[index] for index in spread]
    longest = max((len(part) for part in parts), default=0)
    taken = [part[i] for i in range(longest) for part in parts if i < len(part)]
    return np.array(taken[:size], np.int64)
