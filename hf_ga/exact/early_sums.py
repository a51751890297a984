"""All-reduces gradients in buckets, which may begin while the last backward of a window still runs.

Gradients are put into buckets in the order in which a backward computes them, which is the same on
all ranks. The all-reduce of a bucket starts as soon as all of its gradients are computed and all
earlier buckets have started. After the backward, the remaining all-reduces start, with zeros for
parameters without a gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# As in DDP: large enough to use the full bandwidth, small enough for the first bucket to be sent
# early.
BUCKET_BYTES = 25 * 2**20


class BucketedAllReduce:
    """Sums the gradients of one window over all ranks, in buckets of many parameters.

    Run the last backward within `during_backward` to overlap the all-reduces with it (optional).
    Then call `finish`, and `apply` or `drop`.

    Args:
        parameters: Parameters that any rank is expected to have a gradient of, in the order of
            `model.parameters()`; the same on all ranks.
        bucket_bytes: Minimum size of a bucket, except for the last bucket of a dtype.
        group: Process group to sum over. None: all ranks.

    Attributes:
        must_repeat: Whether a gradient changed after its all-reduce had started, so that all ranks
            must sum again (reentrant checkpointing of a module that is used twice does that).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Group the parameters into buckets for the all-reduces of a window; none starts yet."""
        self.group = group
        # A backward computes the gradients of the last parameters first.
        in_backward_order = list(reversed(parameters))
        self.buckets: list[list[nn.Parameter]] = [
            [in_backward_order[i] for i in indices]
            for indices in bucket_indices(in_backward_order, bucket_bytes)
        ]
        self.must_repeat = False
        # For each parameter, the index of its bucket.
        self._bucket_index = {
            parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket
        }
        # For each bucket, the parameters whose gradients are not computed yet.
        self._missing = [set(bucket) for bucket in self.buckets]
        # For each bucket whose all-reduce has started, its flat tensor and the handle to wait for.
        self._sent: list[tuple[Tensor, Any]] = []

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """All-reduce gradients while the window's last backward runs in the `with` block.

        Registers a hook at each parameter, and removes it on exit.
        """
        with ExitStack() as stack:
            for parameter in self._bucket_index:
                handle = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                stack.callback(handle.remove)
            yield

    def finish(self, *, has_failed: bool) -> None:
        """Start the gradient all-reduces that have not started during the window's last backward.

        Every rank must call this, even if it failed.

        Args:
            has_failed: Whether this rank failed in the window. If so, its gradients are dropped to
                free their memory, and it sends zeros. The other ranks learn about the failure
                afterwards.
        """
        if has_failed:
            for parameter in self._bucket_index:
                parameter.grad = None
        while len(self._sent) < len(self.buckets):
            self._send_next_bucket()

    def apply(self) -> None:
        """Wait for the window's all-reduces and set `.grad` of the parameters to the sums.

        The gradients are views into the flat buckets, so nothing is copied.
        """
        for bucket, (flat, work) in zip(self.buckets, self._sent, strict=True):
            work.wait()
            parts = flat.split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)

    def drop(self) -> None:
        """Wait for the window's gradient all-reduces and discard their results; `.grad` stays as it
        is.
        """
        for _, work in self._sent:
            work.wait()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Start the all-reduces of all buckets that are complete now; called when a parameter's
        `.grad` is computed in the window's last backward.

        Sets `must_repeat` if the all-reduce of the parameter's bucket has started already.
        """
        index = self._bucket_index[parameter]
        if index < len(self._sent):
            self.must_repeat = True
            return
        self._missing[index].discard(parameter)
        while len(self._sent) < len(self.buckets) and not self._missing[len(self._sent)]:
            self._send_next_bucket()

    def _send_next_bucket(self) -> None:
        """Start the asynchronous all-reduce of the next bucket of the window's gradients."""
        bucket = self.buckets[len(self._sent)]
        flat = torch.cat([_gradient_or_zeros(parameter).reshape(-1) for parameter in bucket])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self._sent.append((flat, work))


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    has_gradient: Sequence[bool],
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the `.grad` of parameters by the sums over all ranks, after the window's backwards.

    A rank without a gradient of a parameter adds zeros. The new gradients are views into the flat
    buckets that were all-reduced, so nothing is copied back.

    Args:
        parameters: The same on all ranks, in the same order.
        has_gradient: For each parameter, whether any rank has a gradient of it; the others are
            skipped. The same on all ranks.
        bucket_bytes: Minimum size of one all-reduce, if there are enough gradients.
        group: Process group to sum over. None: all ranks.
    """
    used = [p for p, is_used in zip(parameters, has_gradient, strict=True) if is_used]
    all_reduce = BucketedAllReduce(used, bucket_bytes, group)
    all_reduce.finish(has_failed=False)
    all_reduce.apply()


def bucket_indices(tensors: Sequence[Tensor], bucket_bytes: int) -> list[list[int]]:
    """Group consecutive gradients of the same dtype into buckets, to all-reduce each at once.

    Args:
        tensors: The tensors to group.
        bucket_bytes: A bucket is complete when it has at least this size. Smaller ones occur only
            where the dtype changes and at the end.

    Returns:
        For each bucket, the indices of its tensors.

    >>> bucket_indices([torch.zeros(2), torch.zeros(2), torch.zeros(1)], 12)
    [[0, 1], [2]]
    """
    grouped: list[list[int]] = []
    filled_bytes = bucket_bytes  # the first tensor starts a bucket
    for i, tensor in enumerate(tensors):
        if filled_bytes >= bucket_bytes or tensor.dtype != tensors[i - 1].dtype:
            grouped.append([])
            filled_bytes = 0
        grouped[-1].append(i)
        filled_bytes += tensor.nbytes
    return grouped


def _gradient_or_zeros(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter to all-reduce: zeros if this rank has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
