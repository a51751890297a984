"""Optimizers by name, without weight decay on norms and biases; names of the schedules."""

from typing import Any

import torch
from torch import nn

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
# Optimizers that have the settings betas and epsilon.
ADAM = ("adamw", "adam", "nadam", "radam")
# Optimizers with a fused kernel on CPU and GPU that supports FSDP2's shards (SGD's does not).
FUSED = ("adamw", "adam")
# Schedules of `transformers.get_scheduler` whose only arguments are the numbers of warmup steps and
# of training steps.
SCHEDULES = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)


def build_optimizer(
    model: nn.Module, name: str, learning_rate: float, weight_decay: float, **settings: Any
) -> torch.optim.Optimizer:
    """Build the optimizer of a fine-tuning run over the trainable parameters of its model, in two
    groups: matrices with weight decay; vectors, which are norms' weights and all biases, without.

    A parameter shared by two modules (tied embeddings) is optimized once. AdamW and Adam use their
    fused kernels.

    Args:
        model: The model. Parameters with `requires_grad=False` are excluded.
        name: The flag `optim`, a key of OPTIMIZERS, such as "adamw".
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of parameters with two or more dims.
        settings: Other keyword arguments of the optimizer, such as `betas`.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() >= 2]
    vectors = [p for p in trainable if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    not_empty = [group for group in groups if group["params"]]
    if name in FUSED:
        settings["fused"] = True
    return OPTIMIZERS[name](not_empty, lr=learning_rate, **settings)
