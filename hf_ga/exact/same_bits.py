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
from hf_ga.exact.chunks import Chunks, TreeSum
from hf_ga.exact.early_sums import BUCKET_BYTES, buckets
from hf_ga.exact.hooks import Call, Counts
from hf_ga.exact.loss import Loss
from hf_ga.exact.precision import sum_dtype
from hf_ga.exact.window import Window

ALIGNMENT = 64  # bytes


class ChunkBackend(Backend):
    """One process or DDP. Keeps the gradient of each subtree that this rank computes, about
    log2(chunks) of them at most.
    """

    can_sum_early = False
    reason_not_to_cut = (
        "It is a chunk of same_bits, whose size is part of the result: turn on "
        "gradient_checkpointing, use a device with more "
        "memory, or start a different run with a smaller same_bits"
    )

    def begin(self, model: nn.Module, loss: Loss) -> None:
        super().begin(model, loss)
        if self.device.type == "cpu" and torch.get_num_threads() > 1:
            warnings.warn(
                f"bits depend on the number of threads, {torch.get_num_threads()} in this "
                "process: call "
                "torch.set_num_threads(1), or use the same number in every process and run.",
                stacklevel=2,
            )
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = aligned(tensor.data)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.used = [False] * len(self.parameters)
        self.num_counts = loss.num_means if loss.counts_in_forward else 0
        self.chunks: Chunks | None = None  # until the window has targets

    def equalize(self, window: Window, calls: list[Call], loss: Loss) -> list[Call]:
        """Begin the sums of a window with targets. Ranks make different numbers of forwards."""
        batches = [
            {name: aligned(value) for name, value in call.micro_batch.batch.items()}
            for call in calls
        ]
        calls = [
            replace(c, micro_batch=replace(c.micro_batch, batch=batch))
            for c, batch in zip(calls, batches, strict=True)
        ]
        self.chunks = window.request.chunks
        self.run = self.chunks.runs[self.process_index]
        self.sum = TreeSum(self.chunks, _added)
        return calls

    def collect(self, call: Call, loss: Tensor, counts: Counts, status: RankStatus) -> None:
        """Take the chunk's gradient from `.grad` and add it along the tree, with its loss and
        counts.
        """
        chunk = self.run.start + call.index
        self._add_zeros(until=chunk)
        self.used = [
            used or p.grad is not None for used, p in zip(self.used, self.parameters, strict=True)
        ]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        numbers = torch.stack(
            [torch.as_tensor(number).to(status.loss) for number in (loss, *counts)]
        )
        self.sum.add((chunk, chunk + 1), [numbers, *gradients])
        for parameter in self.parameters:
            parameter.grad = None

    def all_reduce_status(self, status: RankStatus) -> RankStatus:
        """See the base class. Integers have the same sum in any order.

        Raises:
            ConfigError: counts that are not whole numbers.
        """
        if not all(float(count).is_integer() for count in status.counts):
            raise ConfigError(
                f"same_bits needs whole numbers from loss_fn.count_targets, got {status.counts}: "
                "their sum would depend on its "
                "order. Remove that method; what loss_fn itself counts may be any number."
            )
        return super().all_reduce_status(replace(status, has_gradient=self.used))

    def reduce_gradients(
        self, model: nn.Module, status: RankStatus, unused: Collection[str]
    ) -> None:
        """Sum gradients, loss and counts over all ranks along the tree."""
        if self.chunks is None:
            return
        self._add_zeros(until=self.run.stop)
        roots = [value for _, value in self.sum.nodes]
        like = [
            torch.zeros(1 + self.num_counts, dtype=status.loss.dtype, device=status.loss.device),
            *self.parameters,
        ]
        numbers, *gradients = self._over_ranks(roots, like) if self.num_processes > 1 else roots[0]
        status.loss = numbers[0]
        if self.num_counts:
            status.counts = tuple(numbers[1:].tolist())
        for parameter, gradient, is_used in zip(
            self.parameters, gradients, status.has_gradient, strict=True
        ):
            parameter.grad = gradient if is_used else None

    def _add_zeros(self, until: int) -> None:
        """For chunks without targets, which are not computed."""
        device, begin = (
            self.device,
            self.sum.nodes[-1][0][1] if self.sum.nodes else self.run.start,
        )
        for chunk in range(begin, until):
            numbers = torch.zeros(1 + self.num_counts, dtype=sum_dtype(device), device=device)
            self.sum.add((chunk, chunk + 1), [numbers, *map(torch.zeros_like, self.parameters)])

    def _over_ranks(
        self, roots: Sequence[Sequence[Tensor]], like: Sequence[Tensor]
    ) -> list[Tensor]:
        """The sums over all ranks. like: tensors with the shapes and types of each root's; their
        sums are separate tensors, as the result of a kernel may depend on their alignment.
        """
        sums = [torch.empty_like(tensor) for tensor in like]
        for indices in buckets(like, BUCKET_BYTES):
            flat = [torch.cat([root[i].reshape(-1) for i in indices]) for root in roots]
            size = sum(like[i].numel() for i in indices)
            own = torch.stack(flat) if flat else like[indices[0]].new_empty(0, size)
            parts = sum_along_tree(own, self.chunks).split([like[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                sums[i].copy_(part.view(sums[i].shape))
        return sums


def sum_along_tree(own: Tensor, chunks: Chunks) -> Tensor:
    """The sum over the roots of all ranks: each rank adds up one slice. With one root a rank, as
    much is sent as in an all-reduce.

    Args:
        own: this rank's roots, shape (roots, n).

    Returns:
        shape (n,), the same on all ranks.
    """
    num_ranks, (num_roots, size) = dist.get_world_size(), own.shape
    width = -(-size // num_ranks)
    slices = (
        torch.nn.functional.pad(own, (0, num_ranks * width - size))
        .view(num_roots, num_ranks, width)
        .transpose(0, 1)
    )
    sizes = [len(of_rank) for of_rank in chunks.roots]
    received = own.new_empty(sum(sizes), width)
    dist.all_to_all_single(received, slices.reshape(-1, width), sizes, [num_roots] * num_ranks)
    tree = TreeSum(chunks, Tensor.add_)
    for node, value in zip(chain.from_iterable(chunks.roots), received, strict=True):
        tree.add(node, value)
    parts = [own.new_empty(width) for _ in range(num_ranks)]
    dist.all_gather(parts, tree.nodes[0][1])
    return torch.cat(parts)[:size]


def aligned(value: Any) -> Any:
    """A tensor as torch allocates it on a CPU; other values unchanged.

    MKL's products depend on where a matrix begins, and weights that were loaded from safetensors
    begin anywhere.
    """
    return value.clone() if isinstance(value, Tensor) and value.data_ptr() % ALIGNMENT else value


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left
