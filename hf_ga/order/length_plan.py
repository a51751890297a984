"""Plan a window by the lengths of its samples: little padding, a limit on the padded tokens of a
micro-batch, and about equal compute time on all processes.

Where the model computes real tokens only (packing), padding costs nothing, but in attention on a
CPU: the limit is one of real tokens, and there are fewer micro-batches. Compiled layers compute
rows of few lengths, each filled up to the next one: there, rows should be full.

The samples are sorted by length, and a micro-batch is a run of consecutive ones. Nothing is lost by
that: for any split into micro-batches there is one into consecutive samples of the sorted window
with the same sizes, in which no micro-batch is padded to a greater length.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hf_ga.order.plan import Plan, plan_window

# The padded length at which attention costs as much as everything else in a transformer layer. Per
# token and layer, attention computes 4 x length x hidden_size operations, everything else 24 x
# hidden_size^2, so the two are equal at a length of 6 x hidden_size. Here hidden_size is 768, that
# of BERT-base and GPT-2-small.
ATTENTION_WIDTH = 6 * 768
# The cost of a micro-batch that does not depend on its size, in tokens.
# On a CPU, a fit of the times of about 150 micro-batches of models with 4 layers and hidden size
# 256, on two cores, gives 175 for a GPT and 219 for a BERT: Python's overhead, and weights and
# gradients that pass through memory.
CPU_OVERHEAD = 192
# On a GPU, measured with GPT-2-small in bf16 on an H200 (torch 2.11): while the host launches the
# kernels of a forward and backward, the GPU could compute so many tokens.
GPU_OVERHEAD = 7000
# The same for compiled rows, an estimate: an eighth of the operators to launch (count_rows.py), and
# tokens that the GPU computes twice as fast.
GPU_OVERHEAD_OF_ROWS = GPU_OVERHEAD // 4
# Lengths of rows, for each of which layers are compiled: the limit of the run over these numbers.
PARTS_OF_LIMIT = (1, 2, 4)
MULTIPLE = 64  # lengths are multiples of it, for aligned matrix products
# Maximum padded tokens of a packed micro-batch, in units of the limit on its real ones: embeddings
# and heads compute them.
MAX_PADDING = 2
# The limits on padded tokens that `ByLength` tries, in sixteenths of the largest one.
LIMIT_SIXTEENTHS = (16, 14, 12, 10, 8, 7, 6, 5, 4)
# A plan that needs less memory than the fastest plan may be slower by 1/32 of its time.
SLOWDOWN_DENOMINATOR = 32
TOO_LARGE = np.iinfo(np.int64).max  # the cost of a micro-batch beyond the limit


class Computed(IntEnum):
    """Which tokens of a micro-batch the model computes, as far as plans have to know."""

    PADDED = 0
    REAL = 1
    ROWS = 2  # real ones, filled up to a row of fixed length


class _Candidate(NamedTuple):
    """A split of a window: when the slowest process is done, in units of cost; the micro-batches
    (see `cheapest_splits`); for each process, the indices of its micro-batches.
    """

    time: int
    boundaries: np.ndarray
    assignment: list[list[int]]


@dataclass(frozen=True)
class ByLength:
    """Splits a window into micro-batches of similar lengths, and assigns them to processes: the
    planner that loaders use by default if the lengths of the samples are known.

    The cost of a micro-batch, in tokens, is modelled as

        overhead + samples x padded length x (1 + padded length / ATTENTION_WIDTH)

    For packed tokens, it is overhead + real tokens + what attention adds to them; for rows, the
    length of the row takes the place of the real tokens.

    Attributes:
        micro_batch_size: Number of samples that fit into one micro-batch, however long they are.
        max_tokens: Maximum number of samples x padded length of one micro-batch; for packed tokens,
            of real ones. A sample that is longer than that gets a micro-batch of its own. None: as
            many as `micro_batch_size` samples of the length of the window's longest sample.
        overhead: The part of the cost of a micro-batch that does not depend on its size, in tokens.
        lockstep: Whether processes wait for each other in every micro-batch (FSDP). If so, the i-th
            micro-batches of all processes have about the same cost. If not, only the total costs of
            the processes are balanced.
        computed: Which tokens the model computes; but in attention, see `pads_attention`.
        pads_attention: Whether attention of packed tokens is padded (on a CPU).

    >>> planner = ByLength(2, 200, CPU_OVERHEAD, lockstep=False)
    >>> [m.tolist() for m in planner(np.array([90, 10, 95, 12]), 1)[0]]
    [[1, 3], [0, 2]]
    """

    micro_batch_size: int
    max_tokens: int | None
    overhead: int
    lockstep: bool
    computed: Computed = Computed.PADDED
    pads_attention: bool = True

    def __call__(self, lengths: np.ndarray, num_processes: int) -> Plan:
        """Plan a window.

        For several limits on the padded tokens of a micro-batch, from `max_tokens` (or twice the
        tokens per process, if that is less) downwards, the sorted window is split so that the sum
        of costs is smallest, and the micro-batches are assigned to processes. Among the plans that
        are at most 1/32 slower than the fastest one, the one with the smallest limit is returned,
        as it needs the least memory. A window whose samples all have the same length is split by
        number (`plan_window`).

        Args:
            lengths: Number of tokens of each sample of the window, shape (samples,). 0 counts as 1.
            num_processes: Number of processes. Some may get no micro-batch.

        Returns:
            For each process, the list of its micro-batches (offsets of samples in the window),
            cheapest first. Every sample occurs once. The plan depends on the arguments alone, not
            on the platform, as all costs are integers (in units of 1 / ATTENTION_WIDTH tokens).
        """
        if not len(lengths):
            return [[] for _ in range(num_processes)]
        max_tokens = self.max_tokens or self.micro_batch_size * max(1, int(lengths.max()))
        order = np.argsort(lengths, kind="stable")
        sorted_lengths = np.maximum(lengths[order].astype(np.int64), 1)
        if sorted_lengths[0] == sorted_lengths[-1]:
            micro_batch_size = max(1, max_tokens // int(sorted_lengths[0]))
            return plan_window(len(lengths), num_processes, micro_batch_size)

        # One micro-batch of more than twice the tokens per process would unbalance the processes.
        twice_tokens_per_process = -(-2 * int(sorted_lengths.sum()) // num_processes)
        largest_limit = min(max_tokens, twice_tokens_per_process)
        assign = _assign_in_rounds if self.lockstep else assign_longest_first
        limits = [max(1, largest_limit * sixteenths // 16) for sixteenths in LIMIT_SIXTEENTHS]
        candidates = []
        for boundaries, costs in self.cheapest_splits(sorted_lengths, limits):
            time, assignment = assign(costs, num_processes)
            candidates.append(_Candidate(time, boundaries, assignment))

        fastest = min(candidate.time for candidate in candidates)
        fast_enough = [
            candidate
            for candidate in candidates
            if (candidate.time - fastest) * SLOWDOWN_DENOMINATOR <= fastest
        ]
        chosen = fast_enough[-1]  # the one with the smallest limit
        micro_batches = [order[start:stop] for start, stop in pairwise(chosen.boundaries)]
        return [[micro_batches[index] for index in indices] for indices in chosen.assignment]

    def cheapest_splits(
        self, sorted_lengths: np.ndarray, limits: Sequence[int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Split a window, sorted by length, into micro-batches with the smallest sum of costs, for
        each of some limits.

        Dynamic programming over the number of samples at which a micro-batch ends. All
        micro-batches of packed tokens together have the same real tokens, so only their number, the
        padding of attention and the tails of rows count.

        Args:
            sorted_lengths: Number of tokens of each sample, in ascending order, at least 1.
            limits: Maximum numbers of padded tokens in one micro-batch; of packed ones, of real
                tokens, and of padded ones `MAX_PADDING` times as many.

        Returns:
            For each limit, ascending offsets from 0 to the number of samples, and the cost of each
            micro-batch, which consists of the samples from one of them up to the next.
        """
        num_samples = len(sorted_lengths)
        is_packed = self.computed is not Computed.PADDED
        overhead = self.overhead
        rows = np.empty(0, np.int64)
        if self.computed is Computed.ROWS:
            overhead = min(overhead, GPU_OVERHEAD_OF_ROWS)
            rows = np.array(row_lengths(self.max_tokens), np.int64)
        ends = np.arange(1, num_samples + 1)
        tokens_before = np.concatenate([[0], np.cumsum(sorted_lengths)])
        # The last sample of a micro-batch is the longest one and determines its cost per sample,
        # and the first begin at which its tokens are few enough, of shape (limits, samples).
        max_tokens = np.array(limits, np.int64)[:, None]
        if is_packed:
            first_begins = np.maximum(
                np.searchsorted(tokens_before, tokens_before[1:] - max_tokens),
                ends - MAX_PADDING * max_tokens // sorted_lengths,
            )
            costs_per_sample = sorted_lengths**2 * self.pads_attention
        else:
            first_begins = ends - max_tokens // sorted_lengths
            costs_per_sample = sorted_lengths * (ATTENTION_WIDTH + sorted_lengths)
        first_begins = first_begins.clip(0, ends - 1)
        # Smallest cost of the first 0, 1, 2, ... samples, and where their last micro-batch begins.
        best_costs = np.zeros((len(limits), num_samples + 1), np.int64)
        begins = np.zeros((len(limits), num_samples + 1), np.int64)
        offsets = np.arange(num_samples)
        countdown = offsets[::-1] + 1  # of which the last n are n, ..., 2, 1
        every_limit = np.arange(len(limits))
        for end, lowest in enumerate(first_begins.min(0).tolist(), start=1):  # of all limits
            begin = offsets[lowest:end]
            cost = countdown[lowest - end :] * costs_per_sample[end - 1]
            if len(rows):
                num_tokens = tokens_before[end] - tokens_before[lowest:end]
                cost += _computed_tokens(num_tokens, rows) * ATTENTION_WIDTH
            costs = best_costs[:, lowest:end] + cost
            np.copyto(costs, TOO_LARGE, where=begin < first_begins[:, end - 1, None])
            cheapest = costs.argmin(1)
            best_costs[:, end] = costs[every_limit, cheapest] + overhead * ATTENTION_WIDTH
            begins[:, end] = lowest + cheapest
        all_boundaries = [_followed(of_limit) for of_limit in begins]
        if not is_packed:
            all_boundaries = [_even_out(b, sorted_lengths) for b in all_boundaries]
            return [
                (b, np.diff(b) * costs_per_sample[b[1:] - 1] + overhead * ATTENTION_WIDTH)
                for b in all_boundaries
            ]
        # What is the same for all splits was left out.
        if not len(rows):
            best_costs += tokens_before * ATTENTION_WIDTH
        if not self.pads_attention:
            best_costs[:, 1:] += np.cumsum(sorted_lengths**2)
        return [
            (boundaries, np.diff(costs[boundaries]))
            for boundaries, costs in zip(all_boundaries, best_costs, strict=True)
        ]


def padded_tokens(plan: Plan, lengths: np.ndarray) -> int:
    """Count the padded tokens of a window: samples x padded length, summed over its micro-batches.

    Args:
        plan: For each process, the list of its micro-batches (offsets of samples in the window).
        lengths: Number of tokens of each sample of the window, shape (samples,).
    """
    total = 0
    for share in plan:
        for micro_batch in share:
            total += len(micro_batch) * int(lengths[micro_batch].max())
    return total


def assign_longest_first(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Assign the micro-batches of a window to processes so that all take about equally long.

    Goes through the micro-batches from the most to the least expensive, and gives each to the
    process with the smallest sum of costs so far. The slowest process takes at most 4/3 of the time
    of the best possible assignment (Graham 1969, Bounds on multiprocessing timing anomalies).

    Args:
        costs: Cost of each micro-batch (integers).
        num_processes: Number of processes.

    Returns:
        The sum of costs of the slowest process, and for each process the indices of its
        micro-batches, cheapest first.
    """
    # A heap of pairs (sum of costs, process).
    sums_of_costs = [(0, process) for process in range(num_processes)]
    assignment: list[list[int]] = [[] for _ in range(num_processes)]
    for index in np.argsort(costs, kind="stable")[::-1].tolist():
        sum_of_costs, process = sums_of_costs[0]
        assignment[process].append(index)
        heapq.heapreplace(sums_of_costs, (sum_of_costs + int(costs[index]), process))
    largest_sum, _ = max(sums_of_costs)
    return largest_sum, [indices[::-1] for indices in assignment]


def row_length(num_tokens: int, limit: int | None) -> int:
    """Return the length of the row for some tokens, one of few.

    Args:
        num_tokens: Number of real tokens of a micro-batch.
        limit: Maximum number of them in this run. None: unknown, then it is a power of two.

    >>> [row_length(number, 2000) for number in (1900, 1100, 1000, 300, 2100)]
    [2048, 2048, 1024, 512, 4096]
    """
    long_enough = [length for length in row_lengths(limit) if length >= num_tokens]
    if long_enough:
        return min(long_enough)
    return max(MULTIPLE, 1 << (num_tokens - 1).bit_length())


def row_lengths(limit: int | None) -> list[int]:
    """Return the lengths of rows of at most `limit` tokens, in ascending order."""
    if limit is None:
        return []
    return sorted(-(-limit // (part * MULTIPLE)) * MULTIPLE for part in PARTS_OF_LIMIT)


def _computed_tokens(num_tokens: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return how many tokens are computed for so many real ones: the length of the row. More than
    fit into the longest one, of a single sample, count as they are.
    """
    computed = num_tokens.copy()
    is_row = num_tokens <= rows[-1]
    computed[is_row] = rows[np.searchsorted(rows, num_tokens[is_row])]
    return computed


def _followed(begins: np.ndarray) -> np.ndarray:
    """Return the boundaries of micro-batches, given where the one begins that ends at each offset
    of the window.
    """
    boundaries = [len(begins) - 1]
    while boundaries[-1]:
        boundaries.append(int(begins[boundaries[-1]]))
    return np.array(boundaries[::-1])


def _even_out(boundaries: np.ndarray, sorted_lengths: np.ndarray) -> np.ndarray:
    """Make consecutive micro-batches with the same padded length equally large, larger ones first,
    given and returned as in `cheapest_splits`: the largest then needs less memory.
    """
    padded_lengths = sorted_lengths[boundaries[1:] - 1]
    is_new_length = np.append(True, padded_lengths[1:] != padded_lengths[:-1])
    # Indices of the first micro-batch of each padded length, and the number of micro-batches.
    starts = np.append(np.flatnonzero(is_new_length), len(padded_lengths)).tolist()
    even_boundaries = []
    for start, stop in pairwise(starts):
        samples = np.arange(boundaries[start], boundaries[stop])
        parts = np.array_split(samples, stop - start)
        even_boundaries += [int(part[0]) for part in parts]
    return np.array([*even_boundaries, int(boundaries[-1])], np.int64)


def _assign_in_rounds(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Assign micro-batches to processes that wait for each other after every micro-batch (FSDP).
    Returns the sum of the times of all rounds, and for each process its micro-batches.

    In each round, every process computes one micro-batch, so a round takes as long as its most
    expensive one: those of similar cost are put together, from the cheapest to the most expensive.
    If there are too few for the first round, the others are taken to repeat their next one there.
    """
    most_expensive_first = np.argsort(costs, kind="stable")[::-1]
    rounds = [
        most_expensive_first[start : start + num_processes]
        for start in range(0, len(most_expensive_first), num_processes)
    ]
    assignment = [
        [int(indices[process]) for indices in reversed(rounds) if process < len(indices)]
        for process in range(num_processes)
    ]
    times = [int(costs[indices[0]]) for indices in rounds]
    if len(rounds) > 1 and len(rounds[-1]) < num_processes:
        # The most expensive micro-batch that a process repeats in the round that is not full.
        repeated = rounds[-2][len(rounds[-1])]
        times[-1] = max(times[-1], int(costs[repeated]))
    return sum(times), assignment
