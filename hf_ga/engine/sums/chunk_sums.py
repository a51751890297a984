"""Sums the gradients of a window's chunks in a fixed order, for the same bits on any number of
processes.

Each micro-batch is a chunk: a group of samples that does not depend on the number of processes. A
process keeps one copy of the gradients for each subtree of the window's `ChunkTree` that it has not
yet merged, about log2(chunks) of them at most. The sums of all processes are then added along the
same tree.
"""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from hf_ga.order.chunks import ChunkTree, TreeSum
from hf_ga.parallel.gradient_sums import BUCKET_BYTES, bucket_indices


class ChunkSums:
    """Sums lists of tensors over the chunks of one window.

    Args:
        tree: The tree over the chunks of the window.
        process_index: Index of this process.
    """

    def __init__(self, tree: ChunkTree, process_index: int) -> None:
        """Start without any chunk."""
        self._tree = tree
        self._next = tree.chunks_per_rank[process_index].start
        self._sum = TreeSum(tree, _add_in_place)

    def add(self, tensors: list[Tensor]) -> None:
        """Add what the next chunk of this process contributes.

        Args:
            tensors: As many tensors, of the same shapes, for every chunk. They are changed.
        """
        self._sum.add((self._next, self._next + 1), tensors)
        self._next += 1

    def total(self, templates: Sequence[Tensor], num_processes: int) -> list[Tensor]:
        """Return the sums over all chunks of all processes. A collective.

        Args:
            templates: Tensors of the same shapes, as this process may have no chunk.
            num_processes: Number of processes.
        """
        own = [tensors for _, tensors in self._sum.nodes]
        if num_processes == 1:
            (total,) = own
            return total
        # They share no memory: views into a bucket may be misaligned, and the result of a kernel
        # may depend on the alignment.
        totals = [torch.empty_like(template) for template in templates]
        for indices in bucket_indices(templates, BUCKET_BYTES):
            sizes = [templates[index].numel() for index in indices]
            flat = [torch.cat([tensors[i].reshape(-1) for i in indices]) for tensors in own]
            rows = torch.stack(flat) if flat else templates[indices[0]].new_empty(0, sum(sizes))
            parts = all_reduce_in_tree_order(rows, self._tree).split(sizes)
            for index, part in zip(indices, parts, strict=True):
                totals[index].copy_(part.view(totals[index].shape))
        return totals


def all_reduce_in_tree_order(local_sums: Tensor, tree: ChunkTree) -> Tensor:
    """All-reduce gradients in a fixed order of summation, for the same bits on any number of ranks.

    Like a ring all-reduce, in two steps: an all-to-all gives each rank one slice of the elements
    from all ranks, which it sums in the order of the tree; an all-gather collects the sums. If
    every rank has one subtree, as much data is sent as in an ordinary all-reduce.

    Args:
        local_sums: One row per subtree that this rank summed locally, shape (subtrees, elements).
        tree: The tree over the window's chunks.

    Returns:
        The sum over all subtrees of all ranks, shape (elements,), the same on all ranks.
    """
    num_ranks = dist.get_world_size()
    num_local_subtrees, num_elements = local_sums.shape
    slice_size = -(-num_elements // num_ranks)  # rounded up
    padding = num_ranks * slice_size - num_elements
    padded = torch.nn.functional.pad(local_sums, (0, padding))
    # Rows to send, first those for rank 0: shape (ranks, subtrees, slice_size).
    slices = padded.view(num_local_subtrees, num_ranks, slice_size).transpose(0, 1)

    subtrees_per_rank = tree.subtrees_per_rank
    num_received = [len(subtrees) for subtrees in subtrees_per_rank]
    num_sent = [num_local_subtrees] * num_ranks
    received = local_sums.new_empty(sum(num_received), slice_size)
    dist.all_to_all_single(received, slices.reshape(-1, slice_size), num_received, num_sent)

    tree_sum = TreeSum(tree, Tensor.add_)
    for node, value in zip(chain.from_iterable(subtrees_per_rank), received, strict=True):
        tree_sum.add(node, value)
    ((_, summed_slice),) = tree_sum.nodes  # the root of the tree
    summed_slices = [local_sums.new_empty(slice_size) for _ in range(num_ranks)]
    dist.all_gather(summed_slices, summed_slice)
    return torch.cat(summed_slices)[:num_elements]


def _add_in_place(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Add the tensors of `right` to those of `left` in place, and return `left`."""
    torch._foreach_add_(left, right)
    return left
