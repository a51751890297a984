"""One window and a plan -> the request for this rank's part of it."""

from dataclasses import dataclass

import numpy as np

from hf_ga.exact.chunks import share_chunks
from hf_ga.exact.fetch import WindowRequest
from hf_ga.exact.layout import Layout
from hf_ga.exact.length_plan import ByLength
from hf_ga.exact.plan import Plan, Planner, check_plan


@dataclass(frozen=True)
class Splitter:
    """Makes requests: which part of a window this process computes, from what all processes know."""

    seed: int
    layout: Layout
    planner: Planner
    process_index: int
    in_chunks: bool = False

    def request(
        self, epoch: int, index: int, sample_ids: np.ndarray, lengths: np.ndarray, whole_window: bool = False
    ) -> WindowRequest:
        """The window with this number in its epoch. `sample_ids` and `lengths` are in the order of the epoch, shape (n,).

        Raises:
            ConfigError: the planner drops or repeats samples.
        """
        plan, chunks = self.plan(lengths, whole_window), None
        if self.in_chunks:
            plan, chunks = share_chunks(plan[0], lengths, self.layout.num_processes)
        check_plan(plan, len(sample_ids), self.layout.num_processes)
        positions = index * self.layout.window_size + np.arange(len(sample_ids))
        own, most = plan[self.process_index], max(map(len, plan))
        known = lengths if isinstance(self.planner, ByLength) else None
        return WindowRequest(self.seed, epoch, index, positions, sample_ids, own, whole_window, most, known, chunks)

    def plan(self, lengths: np.ndarray, whole_window: bool) -> Plan:
        """Who computes what; chunks are planned for a single process. Where all samples are padded to one width, a plan by length
        is one of equal lengths.
        """
        equal = whole_window and isinstance(self.planner, ByLength)
        num_processes = 1 if self.in_chunks else self.layout.num_processes
        return self.planner(np.full_like(lengths, lengths.max()) if equal else lengths, num_processes)

    def padded(self, request: WindowRequest) -> WindowRequest:
        """The same window, planned again for micro-batches as wide as its longest sample."""
        return self.request(request.epoch, request.index, request.sample_ids, request.lengths, whole_window=True)
