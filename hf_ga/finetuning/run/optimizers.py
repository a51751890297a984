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
ADAM = ("adamw", "adam", "nadam", "radam")  # optimizers with betas and epsilon
# Optimizers with a fused kernel on CPU and GPU that supports FSDP2's shards (SGD's does not).
FUSED = ("adamw", "adam")
FUSED_DEVICES = ("cpu", "cuda", "meta")  # a shard of a parameter on meta will be on one of them
# Schedules of `transformers.get_scheduler` that need only the numbers of steps.
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
    """The named optimizer over all trainable parameters.

    Weight decay applies to matrices (two or more axes), not to vectors (weights of norms and all
    biases). Shared parameters (tied embeddings) are counted once. `settings` are other arguments of
    the optimizer, such as `betas`.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = name in FUSED and all(
        p.device.type in FUSED_DEVICES and p.is_floating_point() for p in trainable
    )
    settings |= {"fused": True} if fused else {}
    return OPTIMIZERS[name](
        [group for group in groups if group["params"]], lr=learning_rate, **settings
    )
