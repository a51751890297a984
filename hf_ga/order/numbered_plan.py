"""Plan a window for a loop that gets as many micro-batches as its own loader has batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from hf_ga.order.length_plan import Computed, row_length, row_lengths
from hf_ga.order.plan import Plan, Planner, plan_by_sizes

# The limits on real tokens that are tried are so many equal parts of the largest one.
NUM_LIMITS = 64


@dataclass(frozen=True)
class ByNumber:
    """The planner of the loaders of such loops, if the lengths of the samples are known.

    Where the model computes padding, micro-batches have equally many samples, sorted by length.
    Where it does not, they have about equally many tokens, and rows of compiled layers are full.

    Attributes:
        micro_batch_size: Number of samples of a batch.
        max_tokens: Maximum number of padded tokens of a micro-batch: that of a batch of samples as
            long as the longest one, so that the loop needs no more memory than its largest batch.
        computed: Which tokens the model computes.

    >>> plan = ByNumber(2, max_tokens=20, computed=Computed.REAL)
    >>> [m.tolist() for m in plan(np.array([9, 1, 2, 1, 2, 2]), 1)[0]]
    [[1, 3], [2, 4, 5], [0]]
    """

    micro_batch_size: int
    max_tokens: int
    computed: Computed = Computed.PADDED

    def __call__(self, lengths: np.ndarray, num_processes: int) -> Plan:
        """Split a window.

        Args:
            lengths: Number of tokens of each sample of the window, shape (samples,).
            num_processes: Number of processes.

        Returns:
            For each process, the list of its micro-batches (offsets of samples in the window), as
            many as batches of `micro_batch_size` samples.
        """
        by_sizes = plan_by_sizes(lengths, num_processes, [self.micro_batch_size])
        if self.computed is Computed.PADDED:
            return by_sizes
        longest_first = np.argsort(-lengths, kind="stable")
        boundaries = self._boundaries(lengths[longest_first], number=sum(map(len, by_sizes)))
        micro_batches = [longest_first[begin:end] for begin, end in pairwise(boundaries)]
        micro_batches.sort(key=lambda micro_batch: self._num_computed(lengths[micro_batch]))
        return [micro_batches[process::num_processes] for process in range(num_processes)]

    def _boundaries(self, descending_lengths: np.ndarray, number: int) -> list[int]:
        """Return where the micro-batches of a sorted window begin, and its number of samples: those
        with the fewest tokens into which the window fits.
        """
        num_tokens = int(descending_lengths.sum())
        for limits in self._limits(number):
            if sum(limits) < num_tokens:
                continue
            boundaries = _filled(descending_lengths, limits, self.max_tokens)
            if boundaries[-1] == len(descending_lengths):
                break
        return boundaries

    def _limits(self, number: int) -> Iterator[list[int]]:
        """Yield limits on the tokens of each micro-batch, from low to high ones."""
        if self.computed is Computed.ROWS:
            rows = row_lengths(self.max_tokens)
            for row, longer_row in pairwise(rows):
                for num_longer in range(number):
                    yield [longer_row] * num_longer + [row] * (number - num_longer)
            yield [rows[-1]] * number
            return
        for part in range(1, NUM_LIMITS + 1):
            yield [self.max_tokens * part // NUM_LIMITS] * number

    def _num_computed(self, lengths: np.ndarray) -> int:
        """Return how many tokens are computed in a micro-batch."""
        num_tokens = int(lengths.sum())
        is_row = self.computed is Computed.ROWS
        return row_length(num_tokens, self.max_tokens) if is_row else num_tokens


def _filled(
    descending_lengths: np.ndarray, limits: Sequence[int], max_padded_tokens: int
) -> list[int]:
    """Fill micro-batches one after the other, as far as their limits allow, but leave a sample for
    each that follows. Returns where they begin, and the number of samples that fit in.
    """
    tokens_before = np.concatenate([[0], np.cumsum(descending_lengths)])
    boundaries = [0]
    for index, limit in enumerate(limits):
        begin = boundaries[-1]
        num_following = len(limits) - 1 - index
        end = int(np.searchsorted(tokens_before, tokens_before[begin] + limit, side="right")) - 1
        longest = max(1, int(descending_lengths[begin]))
        end = min(end, begin + max_padded_tokens // longest)
        end = min(end, len(descending_lengths) - num_following)
        boundaries.append(max(end, begin + 1))
    return boundaries


def numbered_planner(micro_batch_size: int, lengths: np.ndarray | None) -> Planner:
    """Return the planner of a loop that gets as many micro-batches as batches of this size.

    Args:
        micro_batch_size: Number of samples of a batch.
        lengths: Number of tokens of each sample of the dataset. None: unknown.
    """
    if lengths is None:
        return partial(plan_by_sizes, sizes=[micro_batch_size])
    return ByNumber(micro_batch_size, max_tokens=micro_batch_size * max(1, int(lengths.max())))
