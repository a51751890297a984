"""Instead of BatchNorm, which mixes the samples of a micro-batch and so has no exact split: group norm, or frozen statistics."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hf_ga.errors import ConfigError

MOST_GROUPS = 32  # as in Wu and He 2018, "Group Normalization"
FEWEST_CHANNELS = 8  # of a group: where an input has no further axes, two numbers normalised are +1 and -1, with no gradient


class FrozenBatchNorm(nn.Module):
    """Normalises by the running statistics that a BatchNorm had, in training mode too; scale and shift are trained on.

    Input and output: (samples, channels, ...).
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.eps, self.weight, self.bias = norm.eps, norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def replace_batch_norm(model: nn.Module, by: Literal["group_norm", "frozen"] = "group_norm") -> list[str]:
    """Replace every BatchNorm of the model in place. Its scale and shift are kept as they are, the same parameters.

    Group norm (Wu and He 2018) normalises each sample by itself over groups of channels: as many groups as divide the channels,
    at most 32, of at least eight channels each (else one group). It is another function than the BatchNorm was: the model must be
    trained on.
    Frozen statistics are what the BatchNorm computes in evaluation mode: right for a model that is trained already.

    Args:
        by: "group_norm" or "frozen".

    Returns:
        the names of the modules that were replaced; none if the model has no BatchNorm.

    Raises:
        ConfigError: "frozen" where there are no running statistics, or another word; nothing is replaced.

    Example:
        hf_ga.replace_batch_norm(model)   # before the optimizer is built and the model is prepared
    """
    if by not in ("group_norm", "frozen"):
        raise ConfigError(f"replace_batch_norm replaces by 'group_norm' or 'frozen', not by {by!r}.")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if by == "frozen" and (missing := [name for name, norm in norms.items() if norm.running_mean is None]):
        raise ConfigError(
            f"{missing[0]} ({type(norms[missing[0]]).__name__}) has no running statistics to freeze "
            "(track_running_stats=False): replace it by 'group_norm'."
        )
    if "" in norms:
        raise ConfigError("the model itself is a BatchNorm, which cannot be replaced in place: put it into a module.")
    replaced = {norm: _group_norm(norm) if by == "group_norm" else FrozenBatchNorm(norm) for norm in norms.values()}
    for parent in list(model.modules()):  # a norm that is used in several places has several parents
        for attribute, norm in list(parent._modules.items()):
            if norm in replaced:
                setattr(parent, attribute, replaced[norm].train(norm.training))
    return list(norms)


def _group_norm(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    groups = max(g for g in range(1, MOST_GROUPS + 1) if channels % g == 0 and (g == 1 or channels // g >= FEWEST_CHANNELS))
    new = nn.GroupNorm(groups, channels, norm.eps, affine=norm.affine)
    if norm.affine:
        new.weight, new.bias = norm.weight, norm.bias
    return new.to(next(norm.parameters(), torch.empty(0)).device)
