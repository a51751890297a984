"""Optimizers by name, with no weight decay on norms and biases; names of the schedules."""

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
# Those with one kernel for all parameters on a CPU as on a GPU, which works on FSDP2's shards too (SGD's does not).
FUSED = ("adamw", "adam")
FUSED_DEVICES = ("cpu", "cuda")
# Those of `transformers.get_scheduler` that need nothing beyond the numbers of steps.
SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", "polynomial", "inverse_sqrt")


def build_optimizer(model: nn.Module, name: str, learning_rate: float, weight_decay: float) -> torch.optim.Optimizer:
    """The named optimizer over all trainable parameters.

    Matrices (two or more axes) decay; vectors, which are the norms' weights and all biases, do not. A parameter that is shared
    (tied embeddings) counts once.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = name in FUSED and all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in trainable)
    return OPTIMIZERS[name]([group for group in groups if group["params"]], lr=learning_rate, **{"fused": True} if fused else {})
