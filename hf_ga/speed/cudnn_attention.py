"""cuDNN's attention, which plans itself anew for each shape of its inputs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Let `scaled_dot_product_attention` choose among its other kernels in the block.

    Shapes vary from micro-batch to micro-batch, and cuDNN's plan for a new one takes milliseconds
    on the host. A backward uses the kernel of its forward, so the block must contain the forward.
    The setting is that of the process; the user's own is restored after the block.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
