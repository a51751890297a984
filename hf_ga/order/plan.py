"""Plans: which process computes which samples of a window, in which micro-batches.

A plan consists of integers only (offsets of samples in the window) and needs no tensors.
"""

from collections.abc import Callable, Sequence

import numpy as np

from hf_ga.errors import ConfigError

# plan[process][i] is one micro-batch: the 0-based offsets of its samples in the window.
Plan = list[list[np.ndarray]]
# (tokens of each sample of the window, or ones if lengths are unknown; number of processes) -> plan
Planner = Callable[[np.ndarray, int], Plan]


def plan_window(window_size: int, num_processes: int, micro_batch_size: int) -> Plan:
    """Split a window evenly over processes, by number of samples.

    Each process's samples are split evenly into as few micro-batches as `micro_batch_size` allows.
    If the sizes do not divide, micro-batches are uneven, but no sample is dropped or repeated: 64
    samples in micro-batches of at most 10 become 10 + 9 + 9 + 9 + 9 + 9 + 9.

    Args:
        window_size: Number of samples in the window, at least 0.
        num_processes: At least 1. If there are more processes than samples, some get none.
        micro_batch_size: Maximum number of samples in one micro-batch, at least 1.

    Returns:
        For each process, the list of its micro-batches, each an array of offsets of samples in the
        window. Every offset from 0 to window_size - 1 occurs exactly once.
    """
    plan = []
    for share in np.array_split(np.arange(window_size), num_processes):  # larger ones first
        num_micro_batches = -(-len(share) // micro_batch_size)  # rounded up
        plan.append(np.array_split(share, num_micro_batches) if num_micro_batches else [])
    return plan


def plan_by_sizes(lengths: np.ndarray, num_processes: int, sizes: Sequence[int]) -> Plan:
    """Split a window into micro-batches of the given sizes, assigned to processes round-robin.

    The samples are sorted by length first (shortest first), so that a micro-batch holds samples of
    similar lengths. Since any split of a window is the same update, this trains the same model as
    `plan_window`.

    Args:
        lengths: Number of tokens of each sample, shape (samples of the window,).
        num_processes: At least 1.
        sizes: Numbers of samples of consecutive micro-batches, at least 1 each, repeated as often
            as needed: `[5, 11]` gives 5, 11, 5, 11, ... The last micro-batch may be smaller.

    Returns:
        For each process, the list of its micro-batches, each an array of offsets of samples in the
        window.

    >>> [m.tolist() for m in plan_by_sizes(np.array([9, 1, 5]), 1, [2])[0]]
    [[1, 2], [0]]
    """
    micro_batches = []
    if len(lengths):
        by_length = np.argsort(lengths, kind="stable")
        repeated_sizes = np.resize(sizes, len(lengths))
        boundaries = np.cumsum(repeated_sizes)
        micro_batches = np.split(by_length, boundaries[boundaries < len(lengths)])
    return [micro_batches[process::num_processes] for process in range(num_processes)]


def check_plan(plan: Plan, window_size: int, num_processes: int) -> None:
    """Check that a plan, which may come from the user's own planner, covers a window exactly.

    Args:
        plan: For each process, the list of its micro-batches (offsets of samples in the window).
        window_size: Number of samples in the window.
        num_processes: Number of processes that the plan must be for.

    Raises:
        ConfigError: If the plan is for another number of processes, has an empty micro-batch, or
            does not contain each offset from 0 to window_size - 1 exactly once.
    """
    offsets = [np.asarray(micro_batch) for share in plan for micro_batch in share]
    has_empty_micro_batch = any(len(micro_batch) == 0 for micro_batch in offsets)
    if len(plan) != num_processes or has_empty_micro_batch:
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
