"""One window -> who computes what. A plan consists of integers only: offsets in the window,
lengths, limits; no tensors.
"""

from collections.abc import Callable, Sequence

import numpy as np

from hf_ga.errors import ConfigError

# micro-batches[process][i]: the 0-based offsets in the window of one micro-batch.
Plan = list[list[np.ndarray]]
# A planner gets the window's lengths (one integer per sample, or ones where lengths are unknown)
# and the number of processes.
Planner = Callable[[np.ndarray, int], Plan]


def plan_window(window_size: int, num_processes: int, micro_batch_size: int) -> Plan:
    """Split a window evenly over processes, then every share into as few micro-batches as the limit
    allows.

    Sizes that do not divide give uneven micro-batches, never dropped or repeated samples: 64
    samples in micro-batches of at most 10 are 10 + 9 + 9 + 9 + 9 + 9 + 9.

    Args:
        window_size: Samples in the window.
        num_processes: At least 1; a process may get nothing.
        micro_batch_size: Maximum samples in one micro-batch, at least 1.

    Returns:
        For each process its micro-batches; together every offset 0 ... window_size - 1 once.

    Raises:
        ValueError: If a size is below its least value.
    """
    if window_size < 0 or num_processes < 1 or micro_batch_size < 1:
        sizes = f"{window_size}, {num_processes}, {micro_batch_size}"
        raise ValueError(
            "plan_window needs window_size >= 0, num_processes >= 1 and micro_batch_size >= 1, "
            f"got {sizes}"
        )
    shares = np.array_split(np.arange(window_size), num_processes)  # larger ones first
    return [
        np.array_split(share, -(-len(share) // micro_batch_size)) if len(share) else []
        for share in shares
    ]


def plan_by_sizes(lengths: np.ndarray, num_processes: int, sizes: Sequence[int]) -> Plan:
    """Sort a window by length (shortest first) and cut it into micro-batches of the given sizes,
    dealt out in turn.

    The sizes repeat until the window is used up, so `sizes=[5, 11]` gives uneven micro-batches of
    similar lengths. Since any split of a window is the same update, this trains the same model as
    `plan_window`.

    >>> [m.tolist() for m in plan_by_sizes(np.array([9, 1, 5]), 1, [2])[0]]
    [[1, 2], [0]]
    """
    if min(sizes, default=0) < 1:
        raise ValueError(f"sizes must be integers of at least 1, got {list(sizes)}")
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1, got {num_processes}")
    ends = np.cumsum(np.resize(sizes, len(lengths)))
    micro_batches = []
    if len(lengths):
        by_length = np.argsort(lengths, kind="stable")
        micro_batches = np.split(by_length, ends[ends < len(lengths)])
    return [micro_batches[process::num_processes] for process in range(num_processes)]


def check_plan(plan: Plan, window_size: int, num_processes: int) -> None:
    """Check a plan of the user's own making.

    Args:
        plan: The plan.
        window_size: Samples in the window.
        num_processes: How many lists it must have.

    Raises:
        ConfigError: If it is for another number of processes, has an empty micro-batch, or offsets
            that do not occur exactly once.
    """
    offsets = [np.asarray(micro_batch) for share in plan for micro_batch in share]
    if len(plan) != num_processes or not all(len(o) for o in offsets):
        raise ConfigError(
            f"a plan needs {num_processes} lists (one per process) of non-empty micro-batches, "
            f"got {plan}."
        )
    planned = np.sort(np.concatenate([np.empty(0, np.int64), *offsets]))
    if not np.array_equal(planned, np.arange(window_size)):
        raise ConfigError(
            f"a plan must contain each of the offsets 0 ... {window_size - 1} once: the planner "
            "drops or repeats samples."
        )
