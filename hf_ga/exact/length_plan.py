"""One window -> who computes what, by length: least padding under a limit on padded tokens, all processes about equally long busy.

The window is sorted by length and cut: for any split into micro-batches there is one into consecutive samples of the sorted window
with as many samples in each and no greater width in any.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hf_ga.exact.costs import CPU, CostModel
from hf_ga.exact.plan import Plan

MORE_TURNS = 3  # micro-batches a process more than the limit asks for, that are tried for balance
# Smaller limits, which need less memory, are tried as long as the window takes at most 1/32 more time by the cost model. On one
# process only, as several share out the work in small micro-batches anyway. The second in sixteenths of the limit.
LITTLE_TIME, SMALLER_LIMITS = 32, (12, 10, 8, 6, 5, 4)
# How much more than its equal share of the cost (in 1/64) a micro-batch takes, so that padding finds room: the first that will do.
SLACK = (64, 65, 66, 68, 72, 80, 96, 128, 192)


@dataclass(frozen=True)
class ByLength:
    """The planner of loaders that know lengths.

    Attributes:
        micro_batch_size: samples that fit into one micro-batch however long they are.
        max_tokens: most padded tokens in one; None: as many as so many of the window's longest samples have.
        cost, in_step: see `plan_by_length`.
    """

    micro_batch_size: int
    max_tokens: int | None
    cost: CostModel
    in_step: bool

    def __call__(self, lengths: np.ndarray, num_processes: int) -> Plan:
        limit = self.max_tokens or self.micro_batch_size * int(self.cost.widths(lengths).max(initial=1))
        plan = self._plan(lengths, num_processes, limit)
        if num_processes == 1 and len(lengths):
            most = self._time(plan, lengths) * (LITTLE_TIME + 1)
            for sixteenths in SMALLER_LIMITS:
                smaller = self._plan(lengths, num_processes, max(1, limit * sixteenths // 16))
                if self._time(smaller, lengths) * LITTLE_TIME > most:
                    break
                plan = smaller
        return plan

    def _plan(self, lengths: np.ndarray, num_processes: int, limit: int) -> Plan:
        return plan_by_length(lengths, num_processes, limit, cost=self.cost, in_step=self.in_step)

    def _time(self, plan: Plan, lengths: np.ndarray) -> int:
        return int(self.cost.of_ranks(plan, lengths).max())


@dataclass(frozen=True)
class _Sorted:
    """A window, shortest sample first. A list of cuts, 0 ... n, means the micro-batches between them.

    Attributes:
        widths, prices: of each sample: its padded width, and what one sample in a micro-batch of that width costs.
        most: samples that a micro-batch of that width may have. fixed: cost of a micro-batch beside its samples'.
    """

    widths: np.ndarray
    prices: np.ndarray
    most: np.ndarray
    fixed: int

    def costs(self, cuts: np.ndarray) -> np.ndarray:
        return np.diff(cuts) * self.prices[cuts[1:] - 1] + self.fixed


def plan_by_length(
    lengths: np.ndarray, num_processes: int, max_tokens: int, *, cost: CostModel = CPU, in_step: bool = False
) -> Plan:
    """Split a window into micro-batches of samples of similar lengths, of at most `max_tokens` padded tokens.

    On one process the plan is the cheapest there is by the cost model. On several the slowest one counts, so several ways to cut
    are compared: the cheapest, and for a few numbers of micro-batches those of equal cost and of equal sizes. They are dealt out
    longest first, each to the process that has least.

    Args:
        lengths: tokens of each sample of the window.
        num_processes: at least 1; a process may get nothing.
        max_tokens: most samples x padded width in one micro-batch; a longer sample is alone in its own.
        cost: what is made least, and how widths are rounded.
        in_step: processes wait for each other in every micro-batch (FSDP), so the n-th ones must be of equal cost.

    Returns:
        for each process its micro-batches, cheapest first; together every offset once. A function of the arguments alone.

    Raises:
        ValueError: a number is below 1.

    >>> [m.tolist() for m in plan_by_length(np.array([90, 10, 95, 12]), 1, 200)[0]]
    [[1, 3], [0, 2]]
    """
    if num_processes < 1 or max_tokens < 1:
        raise ValueError(f"plan_by_length needs num_processes and max_tokens of at least 1, got {num_processes}, {max_tokens}")
    if not len(lengths):
        return [[] for _ in range(num_processes)]
    order = np.argsort(lengths, kind="stable")
    widths = cost.widths(lengths[order])
    window = _Sorted(widths, cost.prices(widths), np.maximum(1, max_tokens // widths), cost.fixed)
    deal = _in_turns if in_step else longest_first
    best: tuple[int, np.ndarray, list[list[int]]] | None = None
    for cuts in _ways_to_cut(window, num_processes):
        time, dealt = deal(window.costs(cuts), num_processes)
        if best is None or time < best[0]:
            best = time, cuts, dealt
    assert best is not None
    _, cuts, dealt = best
    return [[order[cuts[i] : cuts[i + 1]] for i in share] for share in dealt]


def longest_first(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Time of the busiest process, and the micro-batches of each, each dealt to the process that has least so far.

    At most 4/3 of the best deal (Graham 1969, Bounds on multiprocessing timing anomalies).
    """
    busy, dealt = [(0, process) for process in range(num_processes)], [[] for _ in range(num_processes)]
    for i in np.argsort(costs, kind="stable")[::-1].tolist():
        time, process = busy[0]
        dealt[process].append(i)
        heapq.heapreplace(busy, (time + int(costs[i]), process))
    return max(busy)[0], [share[::-1] for share in dealt]


def _ways_to_cut(window: _Sorted, num_processes: int) -> Iterator[np.ndarray]:
    cheapest = _even_in_width(_cheapest(window), window.widths)
    yield cheapest
    if num_processes == 1:
        return
    least = _least_number(window)
    turns = -(-least // num_processes)
    for number in (least, *range(turns * num_processes, (turns + MORE_TURNS) * num_processes, num_processes)):
        number = min(number, len(window.widths))
        yield from (cuts for cuts in (_of_equal_sizes(window, number), _of_equal_cost(window, number)) if cuts is not None)


def _cheapest(window: _Sorted) -> np.ndarray:
    """The cuts with the least sum of costs, by dynamic programming over where a micro-batch ends.

    It ends with the last sample of its width, or it is full: if neither, one sample more would make a later one smaller at no cost.
    """
    num = len(window.widths)
    best, begins = np.zeros(num + 1, np.int64), np.zeros(num + 1, np.int64)
    best[1:] = np.iinfo(np.int64).max // 4  # cannot be reached
    is_last = np.append(window.widths[1:] != window.widths[:-1], True).tolist()
    sizes, prices, most = np.arange(num, 0, -1), window.prices.tolist(), window.most.tolist()
    for end, (price, limit) in enumerate(zip(prices, most, strict=True), start=1):
        if is_last[end - 1]:
            first = max(0, end - limit)
            costs = sizes[first - end :] * price
            costs += best[first:end]
            begin = int(costs.argmin())
            best[end], begins[end] = costs[begin] + window.fixed, first + begin
        elif end >= limit:
            best[end], begins[end] = best[end - limit] + limit * price + window.fixed, end - limit
    cuts = [num]
    while cuts[-1]:
        cuts.append(int(begins[cuts[-1]]))
    return np.array(cuts[::-1])


def _even_in_width(cuts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The same with consecutive micro-batches of one width cut evenly, larger ones first: the same cost, less memory."""
    of_width = widths[cuts[1:] - 1]
    starts = np.append(np.flatnonzero(np.append(True, of_width[1:] != of_width[:-1])), len(of_width)).tolist()
    runs = [np.empty(0, np.int64)]
    for first, last in pairwise(starts):
        runs.append(_even_cuts(cuts[last] - cuts[first], last - first)[:-1] + cuts[first])
    return np.concatenate([*runs, cuts[-1:]]).astype(np.int64)


def _least_number(window: _Sorted) -> int:
    """Of micro-batches that the limit allows: from the longest sample, each as full as can be."""
    left, number, most = len(window.widths), 0, window.most.tolist()
    while left > 0:
        left, number = left - most[left - 1], number + 1
    return number


def _of_equal_sizes(window: _Sorted, number: int) -> np.ndarray | None:
    """None where the limit does not allow that."""
    cuts = _even_cuts(len(window.widths), number)
    return cuts if (np.diff(cuts) <= window.most[cuts[1:] - 1]).all() else None


def _of_equal_cost(window: _Sorted, number: int) -> np.ndarray | None:
    """At most `number` micro-batches of about the same cost, from the longest sample; None where the limit does not allow that."""
    before = np.append(0, np.cumsum(window.prices)).tolist()  # cost of all shorter samples
    prices, most = window.prices.tolist(), window.most.tolist()
    for slack in SLACK:
        cuts = [len(prices)]
        for left in range(number, 0, -1):
            end = cuts[-1]
            share = -(-before[end] * slack // (64 * left * prices[end - 1]))
            cuts.append(end - min(share, most[end - 1], end))
            if not cuts[-1]:
                return np.array(cuts[::-1])
    return None


def _even_cuts(size: int, parts: int) -> np.ndarray:
    """0 ... size: parts that differ by at most one, larger ones first."""
    small, larger = divmod(int(size), int(parts))
    return np.append(0, np.cumsum(np.repeat([small + 1, small], [larger, parts - larger])))


def _in_turns(costs: np.ndarray, num_processes: int) -> tuple[int, list[list[int]]]:
    """Time where all wait for the longest in each turn, and the micro-batches of each process.

    A rank without a micro-batch in the first turn, which has the cheapest, repeats its own first one (`Backend.equalize`).
    """
    order = np.argsort(costs, kind="stable")[::-1]
    turns = [order[i : i + num_processes] for i in range(0, len(order), num_processes)]
    dealt = [[int(turn[process]) for turn in turns[::-1] if process < len(turn)] for process in range(num_processes)]
    times = [int(costs[turn[0]]) for turn in turns]
    if len(turns) > 1 and len(turns[-1]) < num_processes:
        times[-1] = max(times[-1], int(costs[turns[-2][len(turns[-1])]]))
    return sum(times), dealt
