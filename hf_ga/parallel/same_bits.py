"""The backend for same bits: gradients do not depend on the number of processes, not even in bits.

The window is split into chunks (see `hf_ga.order.chunks`), whose gradients are summed in a fixed
order (see `hf_ga.engine.sums.chunk_sums`).
"""

import warnings

import torch
from torch import Tensor, nn

from hf_ga.parallel.backend import Backend

ALIGNMENT = 64  # bytes; torch's CPU allocator aligns all tensors to that


class ChunkBackend(Backend):
    """Backend for one process or DDP in which every micro-batch is a chunk of the window."""

    reason_not_to_split = (
        "It is a chunk of same_bits, whose size is part of the result: turn on "
        "gradient_checkpointing, use a device with more memory, or start a different run with a "
        "smaller same_bits"
    )

    def begin(self, model: nn.Module) -> None:
        """Prepare a window: align weights and buffers in memory.

        Warns if a CPU process has several threads, as the bits then depend on their number.
        """
        super().begin(model)
        if self.device.type == "cpu" and torch.get_num_threads() > 1:
            warnings.warn(
                f"bits depend on the number of threads, {torch.get_num_threads()} in this "
                "process: call torch.set_num_threads(1), or use the same number in every process "
                "and run.",
                stacklevel=2,
            )
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = aligned(tensor.data)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is aligned to 64 bytes: the tensor itself or a copy; for windows
    with the same bits on any number of processes.

    The bits of MKL's matrix products depend on the alignment of the matrices, and weights that were
    loaded from a safetensors file may begin anywhere. (Batches are copied in `place`.)
    """
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
