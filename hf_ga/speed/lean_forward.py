"""What a forward of a transformers model need not do while it is trained: the same function, with less work and less memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import apply_chunking_to_forward

CHUNKING = apply_chunking_to_forward.__name__


@contextmanager
def lean_forwards(model: nn.Module) -> Iterator[None]:
    """Forwards of `model` without a cache for generation, with GPT-2's activation in one pass, and without a look at signatures.

    A cache copies all keys and values (transformers' Trainer switches it off too). `gelu_new` is written out there as eight
    operations, five of which keep a tensor for the backward pass; torch's kernel of the same formula,
    x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2), keeps
    its input only. BERT and its kin look in each layer at the signature of a method of theirs, also where it gets its input in one
    piece: 6 % of the Python of a window, measured. Only here, so what is saved still says what it said, and nothing is left behind.
    """
    modules = list(model.modules())
    caching = [m.config for m in modules if isinstance(m, PreTrainedModel) and getattr(m.config, "use_cache", False)]
    sources = [sys.modules.get(name) for name in {type(m).__module__ for m in modules}]
    chunking = [source for source in sources if getattr(source, CHUNKING, None) is apply_chunking_to_forward]
    replaced = [
        (NewGELUActivation, "forward", _fused_gelu),
        *((config, "use_cache", False) for config in caching),
        *((source, CHUNKING, _in_one_piece) for source in chunking),
    ]
    originals = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


def _fused_gelu(self: nn.Module, input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def _in_one_piece(forward_fn: Callable[..., Tensor], chunk_size: int, chunk_dim: int, *inputs: Tensor) -> Tensor:
    """`apply_chunking_to_forward`; cut only where the configuration asks for it."""
    return apply_chunking_to_forward(forward_fn, chunk_size, chunk_dim, *inputs) if chunk_size else forward_fn(*inputs)
