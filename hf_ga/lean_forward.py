"""What a forward of a transformers model need not do while it is trained: the same function, with less work and less memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation


@contextmanager
def lean_forwards(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` without a cache for generation and with GPT-2's activation in one pass. Nothing is left behind.

    A cache copies all keys and values (transformers' Trainer switches it off too). `gelu_new` is written out there as eight
    operations, five of which keep a tensor for the backward pass; torch's kernel of the same formula,
    x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2), keeps
    its input only. Only here, so what is saved still says what it said.
    """
    caching = [m.config for m in model.modules() if isinstance(m, PreTrainedModel) and getattr(m.config, "use_cache", False)]
    written_out = NewGELUActivation.forward
    NewGELUActivation.forward = _fused_gelu
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        NewGELUActivation.forward = written_out
        for config in caching:
            config.use_cache = True


def _fused_gelu(self: nn.Module, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")
