"""Gradients of embeddings on a CPU: the rows that a micro-batch used, added to those before it.

torch's own gradient of an embedding is a table of zeros as large as the weight, with some rows filled in, and all of it is added:
time and memory for each micro-batch that depend on the vocabulary and not on the micro-batch. `torch.nn.Embedding` can give a
sparse gradient of the used rows instead, but adds sparse ones up to a longer and longer one, adds one to an output layer's part
in a table of its own, and few optimizers take it. So embeddings compute with a parameter that shares the weight's memory, and the
rows that it gets are added to the weight's gradient, a table, in place. The sums are the same: a row's terms in the order of the
tokens, then the micro-batches in their order.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from accelerate import Accelerator
from torch import nn

EXACT = (torch.float32, torch.float64)  # narrower types round sums of rows in another way than sums in a table
Tables = Sequence[tuple[nn.Parameter, nn.Parameter]]  # a weight, and the parameter that its embeddings compute with


@contextmanager
def row_gradients(accelerator: Accelerator, model: nn.Module) -> Iterator[Tables]:
    """The backwards inside give the model's embeddings gradients of rows; call `add_rows` with what is yielded after each.

    One process on a CPU only: on a GPU rows that occur twice are found with a wait for the device, and what sums gradients over
    processes wants them dense.
    """
    modules = list(model.modules())
    alone = accelerator.num_processes == 1 and accelerator.device.type == "cpu"
    compiled = any(m._compiled_call_impl is not None for m in modules)  # it would be compiled again for this
    wrapped = {id(m._modules.get("base_layer")) for m in modules}  # by PEFT, which looks other tables up in the way of this one
    usable = alone and not compiled
    embeddings = [m for m in modules if usable and isinstance(m, nn.Embedding) and id(m) not in wrapped and _takes_rows(m)]
    weights = {id(m.weight): m.weight for m in embeddings}  # some models have one table for two embeddings
    tables = {key: (weight, nn.Parameter(weight.data)) for key, weight in weights.items()}
    with ExitStack() as stack:
        for embedding in embeddings:
            stack.callback(_leave, embedding)
            # Beside the registered parameter, which stays the only one for whoever goes through `parameters()`.
            vars(embedding)["weight"], embedding.sparse = tables[id(embedding.weight)][1], True
        yield list(tables.values())


def add_rows(tables: Tables) -> None:
    """What the embeddings' own parameters got since the last call, to the gradients of the weights."""
    for weight, own in tables:
        rows, own.grad = own.grad, None
        if rows is None:
            continue
        if weight.grad is None:
            weight.grad = rows.to_dense()
        else:
            weight.grad.add_(rows)


def _leave(embedding: nn.Embedding) -> None:
    vars(embedding).pop("weight", None)
    embedding.sparse = False


def _takes_rows(embedding: nn.Embedding) -> bool:
    """Not where the gradient depends on how often a row occurs, nor where a hook would see it; a weight that is computed (by a
    parametrization) hands its gradient on."""
    weight = embedding._parameters.get("weight")
    if weight is None or not weight.requires_grad or weight.dtype not in EXACT or type(weight.data) is not torch.Tensor:
        return False
    watched = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return not (embedding.sparse or embedding.scale_grad_by_freq or watched)
