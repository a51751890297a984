"""The most memory that tensors take at a time."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most memory that tensors had at a time, above what they had before."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:  # torch 2.11 warns else
        function()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    level = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        top = max(top, level)
    return top
