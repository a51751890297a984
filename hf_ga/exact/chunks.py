"""Same bits: a window cut into chunks that no layout changes, and one order in which their
gradients are added.

Floating-point sums depend on their order, so ranks that add up what they happen to compute agree to
1e-7 only. Here a window's chunks depend on its samples alone, and a binary tree over them
determines all sums: each rank computes consecutive chunks and adds up the subtrees within them, and
the ranks' subtrees are added along the same tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

Node = tuple[int, int]  # the chunks from the first to before the second


@dataclass(frozen=True)
class ChunkTree:
    """The chunks of a window, their tree, and which rank computes which of them.

    A node is cut where its halves cost most nearly the same; two ranks share a window at the root's
    cut.

    Attributes:
        costs: Of each chunk, in any unit, at least 1.
        num_processes: Ranks that share the window.

    >>> chunks = ChunkTree((1, 1, 2, 2), num_processes=2)
    >>> chunks.chunks_per_rank
    [range(0, 2), range(2, 4)]
    >>> chunks.subtrees_per_rank
    [[(0, 2)], [(2, 4)]]
    """

    costs: tuple[int, ...]
    num_processes: int

    @cached_property
    def _ends(self) -> np.ndarray:
        """The cost of the first 0, 1, 2, ... chunks."""
        return np.concatenate([[0], np.cumsum(self.costs)])

    @cached_property
    def chunks_per_rank(self) -> list[range]:
        """For each rank, the chunks that it computes: consecutive, of about equal cost."""
        total = int(self._ends[-1])
        num = self.num_processes
        cuts = [int(np.abs(self._ends * num - total * rank).argmin()) for rank in range(num + 1)]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    @cached_property
    def parents(self) -> dict[tuple[Node, Node], Node]:
        """For each two siblings of the tree, (left, right), their parent."""
        parents = {}
        waiting = [(0, len(self.costs))]
        while waiting:
            start, stop = waiting.pop()
            if stop - start == 1:
                continue
            middle = self._middle(start, stop)
            left = (start, middle)
            right = (middle, stop)
            parents[left, right] = (start, stop)
            waiting += [left, right]
        return parents

    def _middle(self, start: int, stop: int) -> int:
        """Find where the node of these chunks is cut: its halves cost most nearly the same."""
        ends = self._ends[start + 1 : stop]
        difference = np.abs(2 * ends - self._ends[start] - self._ends[stop])
        return start + 1 + int(difference.argmin())

    @cached_property
    def subtrees_per_rank(self) -> list[list[Node]]:
        """For each rank, the largest subtrees that it can sum locally."""
        return [self._subtrees(chunks) for chunks in self.chunks_per_rank]

    def _subtrees(self, chunks: range) -> list[Node]:
        tree = TreeSum(self, lambda left, right: None)
        for chunk in chunks:
            tree.add((chunk, chunk + 1), None)
        return [node for node, _ in tree.nodes]


class TreeSum:
    """Adds up the values of consecutive nodes, two at a time wherever they are the children of one
    node.

    So the sum of a node is computed from the same two numbers on every rank.

    Args:
        chunks: The chunks of the window.
        plus: (left, right) -> their sum. It may use the memory of both.

    Attributes:
        nodes: Pairs (node, value) that could not be added up further, first chunks first.
    """

    def __init__(self, chunks: ChunkTree, plus: Callable) -> None:
        self.parents = chunks.parents
        self.plus = plus
        self.nodes: list[tuple[Node, Any]] = []

    def add(self, node: Node, value: object) -> None:
        """Add a node that begins where the last one ended."""
        while self.nodes:
            left, left_value = self.nodes[-1]
            parent = self.parents.get((left, node))
            if parent is None:
                break
            self.nodes.pop()
            node = parent
            value = self.plus(left_value, value)
        self.nodes.append((node, value))
