"""Gradients of embeddings on a CPU: the rows that a micro-batch used, added to those before it.

torch's own gradient of an embedding is a table of zeros as large as the weight, with some rows filled in, and all of it is added:
time and memory for each micro-batch that depend on the vocabulary and not on the micro-batch. `torch.nn.Embedding` can give a
sparse gradient of the used rows instead, but adds sparse ones up to a longer and longer one, and few optimizers take it; so the
first is made dense, to which the next are added in place. The sums are the same: a row's terms in the order of the tokens, then
the micro-batches in their order.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

EXACT = (torch.float32, torch.float64)  # narrower types round sums of rows in another way than sums in a table


@contextmanager
def row_gradients(accelerator: Accelerator, model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The backwards inside give the model's embeddings gradients of rows; call `make_dense` with what is yielded after each.

    Not those whose weight is the output layer's too: its part of the gradient is a table anyway, and torch makes another one to add
    rows to it. One process on a CPU only: on a GPU rows that occur twice are found with a wait for the device, and what sums
    gradients over processes wants them dense.
    """
    modules = list(model.modules())
    alone = accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    compiled = any(m._compiled_call_impl is not None for m in modules)  # it would be compiled again for this
    wrapped = {id(m._modules.get("base_layer")) for m in modules}  # by PEFT, which looks other tables up in the way of this one
    owners = Counter(id(p) for m in modules for p in m._parameters.values())
    embeddings = [m for m in modules if isinstance(m, nn.Embedding) and id(m) not in wrapped and _takes_rows(m)]
    embeddings = [m for m in embeddings if owners[id(m.weight)] == 1] if alone and not compiled else []
    for embedding in embeddings:
        embedding.sparse = True
    try:
        yield [embedding.weight for embedding in embeddings]
    finally:
        for embedding in embeddings:
            embedding.sparse = False


def make_dense(weights: list[nn.Parameter]) -> None:
    """Gradients that are of rows become tables; the next backward adds its rows to them."""
    for weight in weights:
        if weight.grad is not None and weight.grad.is_sparse:
            weight.grad = weight.grad.to_dense()


def _takes_rows(embedding: nn.Embedding) -> bool:
    """Not where the gradient depends on how often a row occurs, nor where a hook would see it; a weight that is computed (by a
    parametrization) hands its gradient on."""
    weight = embedding._parameters.get("weight")
    if weight is None or not weight.requires_grad or weight.dtype not in EXACT or type(weight.data) is not torch.Tensor:
        return False
    watched = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return not (embedding.sparse or embedding.scale_grad_by_freq or watched)
