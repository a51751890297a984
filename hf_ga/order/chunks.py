"""Same bits: how a window is split into chunks, and the fixed order in which their gradients are
summed.

The sum of floating-point numbers depends on the order of summation, so ranks that sum whatever they
happen to compute agree to about 1e-7 only. For the same bits on any number of ranks, a window is
split into chunks (groups of samples that are computed in one forward) that depend on its samples
alone. A binary tree over the chunks fixes the order of summation: each rank computes consecutive
chunks and sums the subtrees that consist of its own chunks, and the sums of the ranks are summed
along the same tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

# A node of the tree, as (index of its first chunk, index after its last chunk).
Node = tuple[int, int]


@dataclass(frozen=True)
class ChunkTree:
    """The binary tree over the chunks of a window, and which rank computes which chunks.

    A chunk is a group of the window's samples that is computed in one forward. A node of the tree
    is a run of consecutive chunks; its two children are the halves of that run whose costs are
    closest to equal. The tree depends on `costs` only, not on the number of ranks.

    Attributes:
        costs: Cost of each chunk in any unit, at least 1.
        num_ranks: Number of ranks that share the window.

    >>> tree = ChunkTree((1, 1, 2, 2), num_ranks=2)
    >>> tree.chunks_per_rank
    [range(0, 2), range(2, 4)]
    >>> tree.subtrees_per_rank
    [[(0, 2)], [(2, 4)]]
    """

    costs: tuple[int, ...]
    num_ranks: int

    @cached_property
    def _cumulative_costs(self) -> np.ndarray:
        """The cost of the first 0, 1, 2, ... chunks of the window, shape (chunks + 1,)."""
        return np.concatenate([[0], np.cumsum(self.costs)])

    @cached_property
    def chunks_per_rank(self) -> list[range]:
        """For each rank, the indices of the consecutive chunks of the window that it computes.

        All ranks get about the same cost. With two ranks, they split where the root of the tree
        does.
        """
        total = int(self._cumulative_costs[-1])
        boundaries = []
        for rank in range(self.num_ranks + 1):
            # Where the cumulative cost is closest to total * rank / num_ranks, in integers.
            difference = np.abs(self._cumulative_costs * self.num_ranks - total * rank)
            boundaries.append(int(difference.argmin()))
        return [range(start, stop) for start, stop in pairwise(boundaries)]

    @cached_property
    def parents(self) -> dict[tuple[Node, Node], Node]:
        """The binary tree over the window's chunks, which fixes the order in which their gradients
        are summed: a map from two siblings (left child, right child) to their parent.
        """
        parents = {}
        pending = [(0, len(self.costs))]
        while pending:
            start, stop = pending.pop()
            if stop - start == 1:
                continue
            middle = self._middle(start, stop)
            left = (start, middle)
            right = (middle, stop)
            parents[left, right] = (start, stop)
            pending += [left, right]
        return parents

    def _middle(self, start: int, stop: int) -> int:
        """Return the first chunk of the right half of a node of the tree, which has the chunks from
        `start` up to `stop`, so that its halves cost about the same.
        """
        ends = self._cumulative_costs[start + 1 : stop]
        difference = np.abs(2 * ends - self._cumulative_costs[start] - self._cumulative_costs[stop])
        return start + 1 + int(difference.argmin())

    @cached_property
    def subtrees_per_rank(self) -> list[list[Node]]:
        """For each rank, the largest subtrees that consist of its own chunks only.

        A rank can sum the gradients of these locally. They are in the order of the chunks.
        """
        return [self._subtrees(chunks) for chunks in self.chunks_per_rank]

    def _subtrees(self, chunks: range) -> list[Node]:
        """Return the largest subtrees that consist only of the given consecutive chunks of the
        window: what one rank can sum locally.
        """
        # Merges nodes as for a sum, but without values.
        tree_sum = TreeSum(self, lambda left, right: None)
        for chunk in chunks:
            tree_sum.add((chunk, chunk + 1), None)
        return [node for node, _ in tree_sum.nodes]


class TreeSum:
    """Sums gradients of a window in the order that the binary tree over its chunks fixes.

    The value of a node of the tree is the sum of the gradients of its chunks. Two values are added
    only if their nodes are the two children of one node. So the value of a node is the sum of the
    same two numbers on every rank, and has the same bits.

    Args:
        chunk_tree: The tree over the chunks of the window.
        add_values: A function (left value, right value) -> their sum. It may overwrite both.

    Attributes:
        nodes: The pairs (node, value) that have no sibling to be added to yet, from the first chunk
            to the last. When all chunks of the window are added, only the root is left.
    """

    def __init__(self, chunk_tree: ChunkTree, add_values: Callable[[Any, Any], Any]) -> None:
        """Start with an empty sum of gradients over the chunks of a window."""
        self.parents = chunk_tree.parents
        self.add_values = add_values
        self.nodes: list[tuple[Node, Any]] = []

    def add(self, node: Node, value: object) -> None:
        """Append a node of the tree over a window's chunks, and add its gradients to those of the
        nodes to its left, as far as the tree allows.

        Args:
            node: It must begin at the chunk at which the previous node ended.
            value: The value of the node: the summed gradients of its chunks.
        """
        while self.nodes:
            left, left_value = self.nodes[-1]
            parent = self.parents.get((left, node))
            if parent is None:
                break
            self.nodes.pop()
            node = parent
            value = self.add_values(left_value, value)
        self.nodes.append((node, value))
