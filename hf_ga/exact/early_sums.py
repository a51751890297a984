"""Sums gradients over the ranks while the last backward of a window still runs.

Gradients are put into buckets in the order in which a backward makes them, the same on all ranks. A
bucket is sent as soon as all of its gradients, and all buckets before it, are there. What no
backward made is sent at the end, as zeros.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# As DDP's own: large enough for the network's full rate, small enough to begin early.
BUCKET_BYTES = 25 * 2**20


class BucketedAllReduce:
    """The sums of one window.

    Args:
        parameters: Those that are expected to have a gradient, in the order of the model; the same
            on all ranks.
        bucket_bytes: Of one message, at least.
        group: The ranks. None: all of them.

    Attributes:
        must_repeat: A gradient changed after it was sent (reentrant checkpointing of a module that
            is used twice), so all ranks must sum again.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        in_order = list(reversed(parameters))  # a backward makes the last gradients first
        self.buckets = [[in_order[i] for i in part] for part in buckets(in_order, bucket_bytes)]
        self.must_repeat = False
        self._bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self._waits_for = [set(bucket) for bucket in self.buckets]
        self._sent: list[tuple[Tensor, Any]] = []

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Around the last backward of a window on this rank."""
        with ExitStack() as stack:
            for parameter in self._bucket_of:
                handle = parameter.register_post_accumulate_grad_hook(self._note)
                stack.callback(handle.remove)
            yield

    def finish(self, *, has_failed: bool) -> None:
        """Send what was not sent yet.

        Args:
            has_failed: This rank failed. Its gradients are dropped, which frees their memory; the
                other ranks learn of it after the sums.
        """
        if has_failed:
            for parameter in self._bucket_of:
                parameter.grad = None
        while len(self._sent) < len(self.buckets):
            self._send()

    def apply(self) -> None:
        """Wait for the sums, which take the place of the gradients."""
        for bucket, (flat, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            parts = flat.split([p.numel() for p in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def drop(self) -> None:
        """Wait for the sums, and leave the gradients as they are."""
        for _, work in self._sent:
            work.wait()

    def _note(self, parameter: nn.Parameter) -> None:
        """Called when a backward made the gradient of a parameter."""
        index = self._bucket_of[parameter]
        if index < len(self._sent):
            self.must_repeat = True
            return
        self._waits_for[index].discard(parameter)
        while len(self._sent) < len(self.buckets) and not self._waits_for[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        flat = torch.cat([_gradient_of(parameter).reshape(-1) for parameter in bucket])
        self._sent.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    has_gradient: Sequence[bool],
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace each `.grad` by its sum over all ranks; a rank without one adds zero.

    The gradients become views of the buckets that were sent, so nothing is copied back.

    Args:
        parameters: The same on all ranks, in the same order.
        has_gradient: Of each, whether any rank has a gradient.
        bucket_bytes: Of one message, at least.
        group: The ranks. None: all of them.
    """
    used = [p for p, is_used in zip(parameters, has_gradient, strict=True) if is_used]
    sums = BucketedAllReduce(used, bucket_bytes, group)
    sums.finish(has_failed=False)
    sums.apply()


def buckets(tensors: Sequence[Tensor], num_bytes: int) -> list[list[int]]:
    """Group consecutive tensors of one type, which together fill at least `num_bytes`, or are the
    last ones.

    >>> buckets([torch.zeros(2), torch.zeros(2), torch.zeros(1)], 12)
    [[0, 1], [2]]
    """
    found: list[list[int]] = []
    filled = num_bytes
    for i, tensor in enumerate(tensors):
        if filled >= num_bytes or tensor.dtype != tensors[i - 1].dtype:
            found.append([])
            filled = 0
        found[-1].append(i)
        filled += tensor.nbytes
    return found


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
