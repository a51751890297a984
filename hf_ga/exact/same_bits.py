"""The backend for same bits: gradients do not depend on the number of processes, not even in bits.

The window is split into chunks (see `hf_ga.exact.chunks`), and gradients are summed in a fixed
order.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_ga.errors import ConfigError
from hf_ga.exact.backend import Backend, RankStatus
from hf_ga.exact.chunks import ChunkTree, TreeSum
from hf_ga.exact.early_sums import BUCKET_BYTES, bucket_indices
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.window import Window

ALIGNMENT = 64  # bytes; torch's CPU allocator aligns all tensors to that


class ChunkBackend(Backend):
    """Backend for one process or DDP that sums gradients in an order fixed by the window's chunks.

    Every micro-batch is one chunk of the window, which is a group of samples that does not depend
    on the number of ranks. Gradients of chunks are summed along a binary tree (`ChunkTree`). A rank
    keeps one copy of the gradients for each subtree that it has not yet merged, about log2(chunks)
    of them at most.
    """

    can_overlap_all_reduce = False
    reason_not_to_split = (
        "It is a chunk of same_bits, whose size is part of the result: turn on "
        "gradient_checkpointing, use a device with more memory, or start a different run with a "
        "smaller same_bits"
    )

    def begin(self, model: nn.Module, loss: Loss) -> None:
        """Prepare a window for same bits: align weights and buffers in memory, and reset the sums.

        Warns if a CPU process has several threads, as the bits then depend on their number.
        """
        super().begin(model, loss)
        if self.device.type == "cpu" and torch.get_num_threads() > 1:
            warnings.warn(
                f"bits depend on the number of threads, {torch.get_num_threads()} in this "
                "process: call torch.set_num_threads(1), or use the same number in every process "
                "and run.",
                stacklevel=2,
            )
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = aligned(tensor.data)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        # For each parameter, whether a chunk of this rank had a gradient of it.
        self.has_gradient = [False] * len(self.parameters)
        # How many numbers of targets a forward counts. 0 if they are counted before.
        self.num_counts = loss.num_means if loss.counts_in_forward else 0
        self.chunk_tree: ChunkTree | None = None  # stays None if the window has no targets

    def equalize_calls(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Start the sums of gradients for a window that has targets, and return its forwards.

        No forwards are added: under DDP, ranks may run different numbers of them. The tensors of
        the batches are aligned in memory, so that the result does not depend on the alignment.
        """
        self.chunk_tree = window.request.chunk_tree
        self.local_chunks = self.chunk_tree.chunks_per_rank[self.process_index]
        self.tree_sum = TreeSum(self.chunk_tree, _add_in_place)
        return [_with_aligned_batch(call) for call in calls]

    def after_backward(self, call: Call, loss: Tensor, counts: Counts, status: RankStatus) -> None:
        """Move the gradients of a chunk from `.grad` into the sum over the chunks of this rank.

        The chunk's loss and target counts are summed with them, in the same fixed order.

        Args:
            call: The forward and backward of the chunk (a micro-batch that does not depend on the
                number of ranks).
            loss: The chunk's term of the window's mean loss, a scalar.
            counts: Numbers of targets that the forward counted, if it counts them.
            status: Only its dtype is used. The window's loss is set in `reduce_gradients`.
        """
        chunk = self.local_chunks.start + call.index
        self._add_zeros(until=chunk)
        gradients = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                gradients.append(torch.zeros_like(parameter))
            else:
                gradients.append(parameter.grad)
                self.has_gradient[index] = True
            parameter.grad = None
        numbers = [torch.as_tensor(number).to(status.loss) for number in (loss, *counts)]
        loss_and_counts = torch.stack(numbers)
        self.tree_sum.add((chunk, chunk + 1), [loss_and_counts, *gradients])

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """All-reduce the status of a window, as in the base class, after checking that its target
        counts are whole numbers.

        The sum of whole numbers does not depend on the order of summation.

        Raises:
            ConfigError: If a count is not a whole number.
        """
        if not all(float(count).is_integer() for count in status.counts):
            raise ConfigError(
                f"same_bits needs whole numbers from loss_fn.count_targets, got {status.counts}: "
                "their sum would depend on its order. Remove that method; what loss_fn itself "
                "counts may be any number."
            )
        return super().all_reduce_status(replace(status, has_gradient=self.has_gradient))

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Sum gradients, loss and target counts over all ranks in a fixed order, for the same bits.

        Sets `.grad` of all trainable parameters (None if no rank has a gradient), `status.loss`,
        and `status.counts` if the forwards count targets. Does nothing if the window has no
        targets.
        """
        if self.chunk_tree is None:
            return
        self._add_zeros(until=self.local_chunks.stop)
        sums = [value for _, value in self.tree_sum.nodes]
        if self.num_processes > 1:
            templates = [self._zero_loss_and_counts(status.loss.dtype), *self.parameters]
            loss_and_counts, *gradients = self._sum_over_ranks(sums, templates)
        else:
            loss_and_counts, *gradients = sums[0]
        status.loss = loss_and_counts[0]
        if self.num_counts:
            status.counts = tuple(loss_and_counts[1:].tolist())
        for index, parameter in enumerate(self.parameters):
            parameter.grad = gradients[index] if status.has_gradient[index] else None

    def _add_zeros(self, until: int) -> None:
        """Add zero gradients to the sum for chunks of samples that had no forward (no targets).

        Args:
            until: Zeros are added for the chunks after the last one that was added, up to but not
                including this index.
        """
        begin = self.local_chunks.start
        if self.tree_sum.nodes:
            (_, begin), _ = self.tree_sum.nodes[-1]
        for chunk in range(begin, until):
            loss_and_counts = self._zero_loss_and_counts(sum_dtype(self.device))
            gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
            self.tree_sum.add((chunk, chunk + 1), [loss_and_counts, *gradients])

    def _zero_loss_and_counts(self, dtype: torch.dtype) -> Tensor:
        """Return zeros for the loss and the target counts of some chunks of the window (for same
        bits), shape (1 + num_counts,).
        """
        return torch.zeros(1 + self.num_counts, dtype=dtype, device=self.device)

    def _sum_over_ranks(
        self, local_sums: Sequence[Sequence[Tensor]], templates: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sum loss, target counts and gradients of a window over all ranks, in an order that does
        not depend on the number of ranks.

        The tensors are sent in large buckets.

        Args:
            local_sums: For each subtree that this rank summed, its list of tensors.
            templates: Tensors with the shapes and dtypes of such a list, as a rank may have no
                subtree.

        Returns:
            The list of sums. They do not share memory, as views into a bucket may be misaligned,
            and the result of a kernel may depend on the alignment.
        """
        sums = [torch.empty_like(tensor) for tensor in templates]
        for indices in bucket_indices(templates, BUCKET_BYTES):
            sizes = [templates[i].numel() for i in indices]
            flat_subtrees = [
                torch.cat([tensors[i].reshape(-1) for i in indices]) for tensors in local_sums
            ]
            if flat_subtrees:
                local = torch.stack(flat_subtrees)
            else:
                local = templates[indices[0]].new_empty(0, sum(sizes))
            parts = all_reduce_in_tree_order(local, self.chunk_tree).split(sizes)
            for i, part in zip(indices, parts, strict=True):
                sums[i].copy_(part.view(sums[i].shape))
        return sums


def all_reduce_in_tree_order(local_sums: Tensor, chunk_tree: ChunkTree) -> Tensor:
    """All-reduce gradients in a fixed order of summation, for the same bits on any number of ranks.

    Like a ring all-reduce, in two steps: an all-to-all gives each rank one slice of the elements
    from all ranks, which it sums in the order of the tree; an all-gather collects the sums. If
    every rank has one subtree, as much data is sent as in an ordinary all-reduce.

    Args:
        local_sums: One row per subtree that this rank summed locally, shape (subtrees, elements).
        chunk_tree: The binary tree over the window's chunks of samples (each is computed in one
            forward). It fixes the order of summation.

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

    subtrees_per_rank = chunk_tree.subtrees_per_rank
    num_received = [len(subtrees) for subtrees in subtrees_per_rank]
    num_sent = [num_local_subtrees] * num_ranks
    received = local_sums.new_empty(sum(num_received), slice_size)
    dist.all_to_all_single(received, slices.reshape(-1, slice_size), num_received, num_sent)

    tree_sum = TreeSum(chunk_tree, Tensor.add_)
    for node, value in zip(chain.from_iterable(subtrees_per_rank), received, strict=True):
        tree_sum.add(node, value)
    ((_, summed_slice),) = tree_sum.nodes  # the root of the tree
    summed_slices = [local_sums.new_empty(slice_size) for _ in range(num_ranks)]
    dist.all_gather(summed_slices, summed_slice)
    return torch.cat(summed_slices)[:num_elements]


def aligned(value: Any) -> Any:
    """Return a tensor whose memory is aligned to 64 bytes: the tensor itself or a copy; for windows
    with the same bits on any number of processes.

    The bits of MKL's matrix products depend on the alignment of the matrices, and weights that were
    loaded from a safetensors file may begin anywhere. Values that are not tensors are returned
    unchanged.
    """
    if isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT:
        return value.clone()
    return value


def _with_aligned_batch(call: Call) -> Call:
    """Return a copy of a planned forward whose batch on the host has only aligned tensors (see
    `aligned`), for the same bits on any number of processes.
    """
    batch = {name: aligned(value) for name, value in call.micro_batch.batch.items()}
    return replace(call, micro_batch=replace(call.micro_batch, batch=batch))


def _add_in_place(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Add the gradients (list `right`) of some chunks of a window to those of others (list `left`)
    in place, tensor by tensor, and return `left`.
    """
    torch._foreach_add_(left, right)
    return left
