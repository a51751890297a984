"""The backend of windows that are cut into chunks: gradients with the same bits on any number of
processes.
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
from hf_ga.exact.early_sums import BUCKET_BYTES, buckets
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.window import Window

ALIGNMENT = 64  # bytes


class ChunkBackend(Backend):
    """One process or DDP, with gradients that are added along the tree of chunks.

    Keeps the gradient of each subtree that this rank computes, about log2(chunks) of them at most.
    """

    can_overlap_all_reduce = False
    reason_not_to_split = (
        "It is a chunk of same_bits, whose size is part of the result: turn on "
        "gradient_checkpointing, use a device with more memory, or start a different run with a "
        "smaller same_bits"
    )

    def begin(self, model: nn.Module, loss: Loss) -> None:
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
        self.used = [False] * len(self.parameters)
        self.num_counts = loss.num_means if loss.counts_in_forward else 0
        self.chunks: ChunkTree | None = None  # until the window has targets

    def equalize_calls(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Begin the sums of a window with targets. Ranks make different numbers of forwards."""
        self.chunks = window.request.chunks
        self.own_chunks = self.chunks.chunks_per_rank[self.process_index]
        self.sum = TreeSum(self.chunks, _added)
        return [_with_aligned_batch(call) for call in calls]

    def collect(self, call: Call, loss: Tensor, counts: Counts, status: RankStatus) -> None:
        """Take the chunk's gradient from `.grad` and add it along the tree, with its loss and
        counts.
        """
        chunk = self.own_chunks.start + call.index
        self._add_zeros(until=chunk)
        gradients = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                gradients.append(torch.zeros_like(parameter))
            else:
                gradients.append(parameter.grad)
                self.used[index] = True
            parameter.grad = None
        numbers = [torch.as_tensor(number).to(status.loss) for number in (loss, *counts)]
        self.sum.add((chunk, chunk + 1), [torch.stack(numbers), *gradients])

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """See the base class. Whole numbers have the same sum in any order.

        Raises:
            ConfigError: If counts are not whole numbers.
        """
        if not all(float(count).is_integer() for count in status.counts):
            raise ConfigError(
                f"same_bits needs whole numbers from loss_fn.count_targets, got {status.counts}: "
                "their sum would depend on its order. Remove that method; what loss_fn itself "
                "counts may be any number."
            )
        return super().all_reduce_status(replace(status, has_gradient=self.used))

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Sum gradients, loss and counts over all ranks along the tree."""
        if self.chunks is None:
            return
        self._add_zeros(until=self.own_chunks.stop)
        sums = [value for _, value in self.sum.nodes]
        if self.num_processes > 1:
            like = [self._no_numbers(status.loss.dtype), *self.parameters]
            numbers, *gradients = self._over_ranks(sums, like)
        else:
            numbers, *gradients = sums[0]
        status.loss = numbers[0]
        if self.num_counts:
            status.counts = tuple(numbers[1:].tolist())
        is_used = status.has_gradient
        for index, parameter in enumerate(self.parameters):
            parameter.grad = gradients[index] if is_used[index] else None

    def _add_zeros(self, until: int) -> None:
        """Add zeros for chunks without targets, which are not computed."""
        begin = self.own_chunks.start
        if self.sum.nodes:
            (_, begin), _ = self.sum.nodes[-1]
        for chunk in range(begin, until):
            numbers = self._no_numbers(sum_dtype(self.device))
            gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
            self.sum.add((chunk, chunk + 1), [numbers, *gradients])

    def _no_numbers(self, dtype: torch.dtype) -> Tensor:
        """Make zeros for the loss and the counts of a node."""
        return torch.zeros(1 + self.num_counts, dtype=dtype, device=self.device)

    def _over_ranks(
        self, own_sums: Sequence[Sequence[Tensor]], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """Sum over all ranks, in buckets of many tensors.

        Args:
            own_sums: For each subtree of this rank, its tensors.
            like: Tensors with the shapes and types of each subtree's.

        Returns:
            The sums as separate tensors, as the result of a kernel may depend on their alignment.
        """
        sums = [torch.empty_like(tensor) for tensor in like]
        for indices in buckets(like, BUCKET_BYTES):
            sizes = [like[i].numel() for i in indices]
            flat = [torch.cat([tensors[i].reshape(-1) for i in indices]) for tensors in own_sums]
            own = torch.stack(flat) if flat else like[indices[0]].new_empty(0, sum(sizes))
            parts = sum_along_tree(own, self.chunks).split(sizes)
            for i, part in zip(indices, parts, strict=True):
                sums[i].copy_(part.view(sums[i].shape))
        return sums


def sum_along_tree(own: Tensor, chunks: ChunkTree) -> Tensor:
    """Sum the subtrees of all ranks along the tree. Each rank adds up one slice of the elements.

    With one subtree a rank, as much is sent as in an all-reduce.

    Args:
        own: This rank's subtrees, of shape (subtrees, n).
        chunks: The chunks of the window.

    Returns:
        A tensor of shape (n,), the same on all ranks.
    """
    num_ranks = dist.get_world_size()
    num_roots, size = own.shape
    width = -(-size // num_ranks)
    padded = torch.nn.functional.pad(own, (0, num_ranks * width - size))
    slices = padded.view(num_roots, num_ranks, width).transpose(0, 1)
    subtrees = chunks.subtrees_per_rank
    sizes = [len(of_rank) for of_rank in subtrees]
    received = own.new_empty(sum(sizes), width)
    dist.all_to_all_single(received, slices.reshape(-1, width), sizes, [num_roots] * num_ranks)
    tree = TreeSum(chunks, Tensor.add_)
    for node, value in zip(chain.from_iterable(subtrees), received, strict=True):
        tree.add(node, value)
    ((_, whole),) = tree.nodes
    parts = [own.new_empty(width) for _ in range(num_ranks)]
    dist.all_gather(parts, whole)
    return torch.cat(parts)[:size]


def aligned(value: Any) -> Any:
    """Return a tensor as torch allocates it on a CPU; other values unchanged.

    MKL's products depend on where a matrix begins, and weights that were loaded from safetensors
    begin anywhere.
    """
    if isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT:
        return value.clone()
    return value


def _with_aligned_batch(call: Call) -> Call:
    batch = {name: aligned(value) for name, value in call.micro_batch.batch.items()}
    return replace(call, micro_batch=replace(call.micro_batch, batch=batch))


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
