"""Same bits: a window cut into chunks that no layout changes, and one order in which their
gradients are added.

Floating-point sums depend on their order, so ranks that add up what they happen to compute agree to
1e-7 only. Here a window's
chunks depend on its samples alone, and a binary tree over them determines all sums: each rank
    computes consecutive chunks, adds
up the subtrees within them, and the ranks' subtrees are added along the same tree.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

Node = tuple[int, int]  # the chunks from the first to before the second


@dataclass(frozen=True)
class Chunks:
    """The chunks of a window, their tree, and who computes them.

    A node is cut where its halves cost most nearly the same; two ranks share a window at the root's
    cut.

    Attributes:
        costs: of each chunk, in any unit, at least 1.

    >>> chunks = Chunks((1, 1, 2, 2), num_processes=2)
    >>> chunks.runs, chunks.roots
    ([range(0, 2), range(2, 4)], [[(0, 2)], [(2, 4)]])
    """

    costs: tuple[int, ...]
    num_processes: int

    @cached_property
    def _ends(self) -> np.ndarray:
        """Cost of the first 0, 1, 2, ... chunks."""
        return np.concatenate([[0], np.cumsum(self.costs)])

    @cached_property
    def runs(self) -> list[range]:
        """The chunks of each process: consecutive, of about equal cost."""
        total, num = int(self._ends[-1]), self.num_processes
        cuts = [
            int(np.abs(self._ends * num - total * process).argmin()) for process in range(num + 1)
        ]
        return [range(start, stop) for start, stop in pairwise(cuts)]

    @cached_property
    def children(self) -> dict[tuple[Node, Node], Node]:
        """(left, right) -> the node that they make."""
        found, nodes = {}, [(0, len(self.costs))]
        for start, stop in nodes:  # grows
            if stop - start > 1:
                ends = self._ends[start + 1 : stop]
                middle = (
                    start
                    + 1
                    + int(np.abs(2 * ends - self._ends[start] - self._ends[stop]).argmin())
                )
                found[(start, middle), (middle, stop)] = (start, stop)
                nodes += [(start, middle), (middle, stop)]
        return found

    @cached_property
    def roots(self) -> list[list[Node]]:
        """Of each process, the nodes whose sums it computes by itself: the largest that consist of
        its chunks.
        """
        trees = [TreeSum(self, lambda left, right: None) for _ in self.runs]
        for tree, run in zip(trees, self.runs, strict=True):
            for chunk in run:
                tree.add((chunk, chunk + 1), None)
        return [[node for node, _ in tree.nodes] for tree in trees]


class TreeSum:
    """Adds up the values of consecutive nodes, two at a time wherever they are the children of one
    node.

    So the sum of a node is computed from the same two numbers on every rank.

    Args:
        plus: (left, right) -> their sum. It may use the memory of both.

    Attributes:
        nodes: what could not be added up further, first chunks first.
    """

    def __init__(self, chunks: Chunks, plus: Callable) -> None:
        self.children, self.plus = chunks.children, plus
        self.nodes: list = []

    def add(self, node: Node, value: object) -> None:
        """Add a node that begins where the last one ended."""
        self.nodes.append((node, value))
        while len(self.nodes) > 1 and (
            parent := self.children.get((self.nodes[-2][0], self.nodes[-1][0]))
        ):
            (_, left), (_, right) = self.nodes[-2:]
            self.nodes[-2:] = [(parent, self.plus(left, right))]
