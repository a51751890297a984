"""All-reduces gradients after the backwards of a window, in buckets of many parameters."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

# As in DDP: large enough to use the full bandwidth.
BUCKET_BYTES = 25 * 2**20


def sum_gradients(
    parameters: Sequence[nn.Parameter],
    has_gradient: Sequence[bool],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Replace the `.grad` of parameters by the sums over all ranks, after the window's backwards.

    A rank without a gradient of a parameter adds zeros. The new gradients are views into the flat
    buckets that were all-reduced, so nothing is copied back.

    Args:
        parameters: The same on all ranks, in the same order.
        has_gradient: For each parameter, whether any rank has a gradient of it; the others are
            skipped. The same on all ranks.
        group: Process group to sum over. None: all ranks.
    """
    used = [p for p, is_used in zip(parameters, has_gradient, strict=True) if is_used]
    sent = []
    for indices in bucket_indices(used, BUCKET_BYTES):
        bucket = [used[index] for index in indices]
        flat = torch.cat([_gradient_or_zeros(parameter).reshape(-1) for parameter in bucket])
        sent.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in sent:
        work.wait()
        parts = flat.split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


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
