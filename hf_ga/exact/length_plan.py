"""One window -> who computes what, by length: least padding under a limit on padded tokens, all
processes about equally long busy.

The window is sorted by length and cut: for any split into micro-batches there is one into
consecutive samples of the sorted window with as many samples in each and no greater width in any.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_ga.exact.plan import Plan, plan_window

# Attention computes 4 x width x hidden operations a token and layer, everything else of a layer 24
# x hidden^2: they are equal at a width of 6 x hidden, here for the 768 of BERT-base and
# GPT-2-small.
ATTENTION_WIDTH = 6 * 768
# What a micro-batch costs however small it is, in tokens. On a CPU a fit of the times of some 150
# micro-batches of 4 layers x 256 on two cores: 175 for a GPT, 219 for a BERT, for Python's work and
# for weights and gradients that pass through memory. On a GPU an estimate: some 1,000 kernel
# launches a forward and backward take about 10 ms, in which it computes 6,000 tokens of a model of
# 100 million parameters, or 300 of one of 7 billion.
CPU_OVERHEAD = 192
GPU_OVERHEAD = 1024
LIMITS = (16, 14, 12, 10, 8, 7, 6, 5, 4)  # in sixteenths of the largest limit: what is tried
LITTLE_TIME = 32  # a plan that needs less memory may take 1/32 more time than the fastest


@dataclass(frozen=True)
class ByLength:
    """The planner of loaders that know lengths.

    Attributes:
        micro_batch_size: Samples that fit into one micro-batch however long they are.
        max_tokens: Most padded tokens in one. None: what `micro_batch_size` samples as long as the
            window's longest have.
        overhead: See `plan_by_length`.
        lockstep: See `plan_by_length`.
    """

    micro_batch_size: int
    max_tokens: int | None
    overhead: int
    lockstep: bool

    def __call__(self, lengths: np.ndarray, num_processes: int) -> Plan:
        limit = self.max_tokens or self.micro_batch_size * int(lengths.max(initial=1))
        return plan_by_length(
            lengths, num_processes, limit, overhead=self.overhead, lockstep=self.lockstep
        )


def plan_by_length(
    lengths: np.ndarray,
    num_processes: int,
    max_tokens: int,
    *,
    overhead: int = CPU_OVERHEAD,
    lockstep: bool = False,
) -> Plan:
    """Split a window into micro-batches of samples of similar lengths, of at most `max_tokens`
    padded tokens.

    The time of a micro-batch, in tokens, is taken to be overhead + samples x width x (1 + width /
    ATTENTION_WIDTH). For a few limits from `max_tokens` (or twice a process's share) downwards, the
    window is cut where the sum of times is least, and the micro-batches are dealt to the processes.
    Of the plans that take at most 1/32 more time than the fastest, the one with the smallest limit
    is taken: it needs the least memory. Samples of one length are split by number (`plan_window`).

    Args:
        lengths: Tokens of each sample of the window; one without tokens is as wide as one token.
        num_processes: At least 1; a process may get nothing.
        max_tokens: Maximum samples x padded width in one micro-batch; a longer sample is alone in
            its own.
        overhead: What a micro-batch costs however small it is, in tokens.
        lockstep: Whether ranks wait for each other in every micro-batch (FSDP), so that the n-th
            micro-batches of all ranks must have about the same cost.

    Returns:
        For each process its micro-batches, cheapest first; together every offset once. A function
        of the arguments alone: all is computed in integers, in units of 1 / ATTENTION_WIDTH tokens.

    Raises:
        ValueError: If a number is below 1.

    >>> [m.tolist() for m in plan_by_length(np.array([90, 10, 95, 12]), 1, 200)[0]]
    [[1, 3], [0, 2]]
    """
    if num_processes < 1 or max_tokens < 1:
        raise ValueError(
            "plan_by_length needs num_processes and max_tokens of at least 1, got "
            f"{num_processes}, {max_tokens}"
        )
    if not len(lengths):
        return [[] for _ in range(num_processes)]
    order = np.argsort(lengths, kind="stable")
    widths = np.maximum(lengths[order].astype(np.int64), 1)
    deal = _in_turns if lockstep else assign_longest_first
    if widths[0] == widths[-1]:
        return plan_window(len(widths), num_processes, max(1, max_tokens // int(widths[0])))
    twice_a_share = -(-2 * int(widths.sum()) // num_processes)  # more than balance allows
    largest = min(max_tokens, twice_a_share)
    plans = []
    for sixteenths in LIMITS:
        cuts = cheapest_boundaries(widths, max(1, largest * sixteenths // 16), overhead)
        costs = np.diff(cuts) * _prices(widths[cuts[1:] - 1]) + overhead * ATTENTION_WIDTH
        time, dealt = deal(costs, num_processes)
        plans.append((time, dealt, cuts))
    fastest = min(time for time, _, _ in plans)
    fast_enough = [plan for plan in plans if (plan[0] - fastest) * LITTLE_TIME <= fastest]
    _, dealt, cuts = fast_enough[-1]  # of the smallest limit
    return [[order[cuts[i] : cuts[i + 1]] for i in share] for share in dealt]


def padded_tokens(plan: Plan, lengths: np.ndarray) -> int:
    """Return samples x padded width, summed over all micro-batches of a window."""
    return sum(len(m) * int(lengths[m].max()) for share in plan for m in share)


def _prices(widths: np.ndarray) -> np.ndarray:
    """Return the cost of one more sample in a micro-batch of that width."""
    return widths * (ATTENTION_WIDTH + widths)


def assign_longest_first(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Deal micro-batches to processes, longest first, each to the process that has least so far.

    The time is at most 4/3 of the best deal's (Graham 1969, Bounds on multiprocessing timing
    anomalies).

    Args:
        costs: Of each micro-batch.
        num_processes: How many processes there are.

    Returns:
        The time of the busiest process, and for each process its micro-batches, shortest first.
    """
    busy = [(0, process) for process in range(num_processes)]
    dealt = [[] for _ in range(num_processes)]
    for i in np.argsort(costs, kind="stable")[::-1].tolist():
        time, process = busy[0]
        dealt[process].append(i)
        heapq.heapreplace(busy, (time + int(costs[i]), process))
    longest_time, _ = max(busy)
    return longest_time, [share[::-1] for share in dealt]


def cheapest_boundaries(widths: np.ndarray, max_tokens: int, overhead: int) -> np.ndarray:
    """Find where to cut a window, shortest sample first, so that the sum of costs is least.

    Dynamic programming over where a micro-batch ends: with the last sample of its width, or because
    it is full. If neither, one sample more would make a later one smaller at no cost.

    Args:
        widths: Of the samples, in ascending order.
        max_tokens: Most padded tokens in one micro-batch.
        overhead: What a micro-batch costs however small it is, in tokens.

    Returns:
        Offsets 0 ... n; the micro-batches lie between two of them.
    """
    num = len(widths)
    fixed = overhead * ATTENTION_WIDTH
    best = np.zeros(num + 1, np.int64)
    begins = np.zeros(num + 1, np.int64)
    best[1:] = np.iinfo(np.int64).max // 4  # not reached yet
    is_last = np.append(widths[1:] != widths[:-1], True).tolist()
    sizes = np.arange(num, 0, -1)
    prices = _prices(widths).tolist()
    most = np.maximum(1, max_tokens // widths).tolist()
    for end, (price, limit) in enumerate(zip(prices, most, strict=True), start=1):
        if is_last[end - 1]:
            first = max(0, end - limit)
            costs = best[first:end] + sizes[first - end :] * price
            begin = int(costs.argmin())
            best[end] = costs[begin] + fixed
            begins[end] = first + begin
        elif end >= limit:
            best[end] = best[end - limit] + limit * price + fixed
            begins[end] = end - limit
    cuts = [num]
    while cuts[-1]:
        cuts.append(int(begins[cuts[-1]]))
    return _even_in_width(np.array(cuts[::-1]), widths)


def _even_in_width(cuts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Cut consecutive micro-batches of one width evenly, larger ones first: the same cost, less
    memory.
    """
    of_width = widths[cuts[1:] - 1]
    is_new_width = np.append(True, of_width[1:] != of_width[:-1])
    firsts = np.append(np.flatnonzero(is_new_width), len(of_width)).tolist()
    even_cuts = []
    for first, last in pairwise(firsts):
        samples = np.arange(cuts[first], cuts[last])
        parts = np.array_split(samples, last - first)
        even_cuts += [int(part[0]) for part in parts]
    return np.array([*even_cuts, int(cuts[-1])], np.int64)


def _in_turns(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Deal micro-batches to processes that wait for the longest in each turn.

    A rank without a micro-batch in the first turn, which has the cheapest, repeats its own first
    one (`Backend.equalize_calls`).

    Args:
        costs: Of each micro-batch.
        num_processes: How many processes there are.

    Returns:
        The time of all turns, and for each process its micro-batches, shortest first.
    """
    order = np.argsort(costs, kind="stable")[::-1]
    turns = [order[i : i + num_processes] for i in range(0, len(order), num_processes)]
    dealt = [
        [int(turn[process]) for turn in turns[::-1] if process < len(turn)]
        for process in range(num_processes)
    ]
    times = [int(costs[turn[0]]) for turn in turns]  # of the costliest in each turn
    if len(turns) > 1 and len(turns[-1]) < num_processes:
        *_, turn_before, cheapest_turn = turns
        repeated = turn_before[len(cheapest_turn)]  # the costliest that a rank repeats
        times[-1] = max(times[-1], int(costs[repeated]))
    return sum(times), dealt
