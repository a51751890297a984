"""The one place where processes meet: one small status exchange and one sum of the gradients in a window.

What a process found in its share of a window is a `Share`. `meet` adds up the small numbers of all shares (float64, one
all-reduce) and tells everybody if one process failed; `sum_gradients` then adds up the gradients (float32, in buckets). No
factor of the number of processes enters anywhere, so processes may have different numbers of micro-batches, or none. FSDP has
its own gradient sum; there only the small numbers meet here.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather
from torch import Tensor, nn

from hf_ga.errors import ConfigError, ProcessFailed
from hf_ga.exact.memory import Size, TooLarge

if TYPE_CHECKING:
    from hf_ga.exact.windows import MicroBatch

SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)
BUCKET_BYTES = 25 * 2**20  # as DDP's own: large enough for the network's full rate, small enough to begin early
MESSAGE_BYTES = 1024


@dataclass
class Share:
    """What one process computed of a window, or, after `meet`, what all did.

    Attributes:
        loss: summed over the share, float64 scalar on the device.
        counts: targets, one number for each part of the loss.
        has_gradient: of each trainable parameter, whether the share gave it a gradient (after `meet`: whether any did).
        failure: what went wrong in the share.
        in_hand: the micro-batch that is computed. too_large: its size, where memory ran out. was_cut: whether micro-batches were
            cut to fit (after `meet`: on any process).
    """

    loss: Tensor
    counts: tuple[float, ...]
    has_gradient: tuple[bool, ...] = ()
    failure: Exception | None = None
    in_hand: "MicroBatch | None" = None
    too_large: Size | None = None
    was_cut: bool = False


def check_supported(accelerator: Accelerator) -> None:
    """Refuse what cannot be reduced exactly.

    Raises:
        ConfigError: a backend that owns the gradients in another way (DeepSpeed, Megatron-LM, ...), processes that do not know of
            each other, or that need the same samples (tensor, context, sequence parallelism).
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched > 1:
        raise ConfigError(
            f"all processes must train together, but {launched} were launched and Accelerate sees "
            f"{accelerator.num_processes}, so each would train alone. On a machine without GPU use Accelerator(cpu=True), or set "
            "ACCELERATE_USE_CPU=true."
        )
    sizes = getattr(accelerator, "parallelism_config", None)
    if any((getattr(sizes, f"{name}_size", 1) or 1) > 1 for name in ("tp", "cp", "sp")):
        raise ConfigError(
            "windows are split over all processes, but tensor, context and sequence parallelism need the same samples on several: "
            "leave tp_size, cp_size and sp_size at 1."
        )
    if accelerator.distributed_type not in SUPPORTED:
        raise ConfigError(
            f"gradients are summed exactly under {', '.join(t.value for t in SUPPORTED)}, but Accelerate runs under "
            f"{accelerator.distributed_type.value}, which divides and reduces them by itself: by processes and steps, not by "
            "targets. Launch with a profile of accelerate_configs/ (fsdp2.yaml shards weights and optimizer as ZeRO does)."
        )


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether parameters lie in shards (FSDP), so that each forward and backward is a meeting of all processes."""
    return accelerator.distributed_type == DistributedType.FSDP


def sum_over_processes(accelerator: Accelerator, numbers: Sequence[float]) -> tuple[float, ...]:
    """Sums in float64 (exact for integers up to 2**53); on one process the numbers themselves. Waits for the device."""
    if accelerator.num_processes == 1:
        return tuple(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64, device=accelerator.device)
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def gather_rows(accelerator: Accelerator, numbers: Sequence[float]) -> np.ndarray:
    """As many numbers of every process. Returns float64, shape (processes, len(numbers)). Waits for the device."""
    row = torch.tensor([numbers], dtype=torch.float64, device=accelerator.device)
    return gather(row).cpu().numpy()


def sum_tensors(accelerator: Accelerator, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums of tensors of the same shapes on all processes, in float64, back in their own types. Waits for no device."""
    if accelerator.num_processes == 1 or not tensors:
        return list(tensors)
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def meet(accelerator: Accelerator, share: Share) -> Share:
    """Add up the shares of all processes; on one process the share itself. Gradients are not touched.

    Raises:
        The share's own failure; ProcessFailed: another process's, with its message. TooLarge: memory ran out on a process.
        ConfigError: FSDP2 mixed up gradients.
    """
    if accelerator.num_processes == 1:
        if share.failure is not None:
            raise share.failure
        if share.too_large is not None:
            raise TooLarge(share.too_large)
        return share
    row = [share.failure is not None, share.too_large is not None, share.was_cut, 0.0, *share.counts, *share.has_gradient]
    sums = torch.tensor(row, dtype=torch.float64, device=accelerator.device)
    sums[3] = share.loss
    dist.all_reduce(sums)
    failed, too_large, cut, _, *numbers = sums.tolist()
    if failed:
        _raise_together(accelerator, share.failure)
    if too_large:
        raise TooLarge(_smallest(accelerator, share.too_large))
    counts, given = numbers[: len(share.counts)], numbers[len(share.counts) :]
    if accelerator.is_fsdp2 and any(0 < n < accelerator.num_processes for n in given):
        raise ConfigError(
            "some parameters got a gradient on some processes only, which FSDP2 of this torch mixes up: use torch 2.13 or newer, "
            "FSDP1 or DDP."
        )
    return replace(share, loss=sums[3], counts=tuple(counts), has_gradient=tuple(map(bool, given)), was_cut=bool(cut))


def sum_gradients(parameters: Sequence[nn.Parameter], has_gradient: Sequence[bool], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace each `.grad` by its sum over all processes; where one has none, it adds zero.

    The gradients become views of the buckets that were sent, so nothing is copied back.

    Args:
        parameters: the same on all processes, in the same order. has_gradient: of each, whether any process has a gradient.

    Raises:
        ConfigError: a sparse gradient.
    """
    used = [parameter for parameter, given in zip(parameters, has_gradient, strict=True) if given]
    under_way = []
    for bucket in _buckets(used, bucket_bytes):
        flat = torch.cat([_flat_gradient(parameter) for parameter in bucket])
        under_way.append(dist.all_reduce(flat, async_op=True))
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)
    for work in under_way:
        work.wait()


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters of one type up to a size, the last ones first: backward makes those first."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        if bucket and (size + parameter.nbytes > bucket_bytes or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.nbytes
    if bucket:
        yield bucket


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    if parameter.grad.layout != torch.strided:
        raise ConfigError(
            "gradients are summed over processes as dense tensors, but one is sparse: use nn.Embedding(..., sparse=False)."
        )
    return parameter.grad.reshape(-1)


def _smallest(accelerator: Accelerator, size: Size | None) -> Size:
    """Of the micro-batches that failed, where some did."""
    rows = gather_rows(accelerator, (np.inf, np.inf) if size is None else size)
    return Size(*map(int, min(rows.tolist())))


def _raise_together(accelerator: Accelerator, failure: Exception | None) -> None:
    """Every process raises: its own failure, or the message of the first one that failed."""
    text = f"{type(failure).__name__}: {failure}".encode(errors="replace")[:MESSAGE_BYTES] if failure is not None else b""
    row = torch.zeros(1, MESSAGE_BYTES, dtype=torch.uint8, device=accelerator.device)
    row[0, : len(text)] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)[: len(text)]
    messages = [bytes(message).rstrip(b"\0").decode(errors="replace") for message in gather(row).cpu().numpy()]
    if failure is not None:
        raise failure
    process, message = next((i, m) for i, m in enumerate(messages) if m)
    raise ProcessFailed(f"process {process} failed: {message}")
