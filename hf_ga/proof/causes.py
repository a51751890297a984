"""The likely causes of a loss that is not additive over micro-batches, as text for error messages.

"Additive" means that the loss terms of the micro-batches of a window sum to the loss of one batch
with all samples of the window.
"""

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from hf_ga.exact.dropout import KeyedDropout
from hf_ga.proof.probes import TOLERANCE

UNKNOWN = (
    "a loss across samples (in-batch negatives), a sum of several means, or a mean over something "
    "else"
)


def batch_norm_cause(model: nn.Module) -> str | None:
    """Describe a BatchNorm in training mode, for the error message of a failed proof.

    It normalises with the mean and the variance of the micro-batch, so a sample's loss depends on
    the other samples of its micro-batch, and the loss is not additive over micro-batches.

    Returns:
        Text about the first such module, with its name and remedies. None if the model has no
        BatchNorm in training mode.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return (
                f"{name} ({type(module).__name__}) normalises by the statistics of the whole "
                "micro-batch: freeze it with module.eval(), or use GroupNorm instead"
            )
    return None


def changed_float_buffers(model: nn.Module, buffers_before: dict[str, Tensor]) -> list[str]:
    """Return the names of the floating-point buffers that the forwards of a proof have changed.

    Args:
        model: The model, after some training forwards.
        buffers_before: Copies of its buffers by name, from before these forwards.
    """
    changed = []
    for name, buffer in model.named_buffers():
        if name not in buffers_before or not buffer.is_floating_point():
            continue
        if not buffer.equal(buffers_before[name]):
            changed.append(name)
    return changed


def changed_integer_buffers(model: nn.Module, buffers_before: dict[str, Tensor]) -> list[str]:
    """Return the names of the integer and bool buffers that the forwards of a proof have changed.

    These are counters of steps or tokens, for example. The counters of norm layers
    (`num_batches_tracked`) are excluded, because no training forward reads them.

    Args:
        model: The model, after some training forwards.
        buffers_before: Copies of its buffers by name, from before these forwards.
    """
    changed = []
    for name, buffer in model.named_buffers():
        if name not in buffers_before or buffer.is_floating_point():
            continue
        if buffer.equal(buffers_before[name]) or is_norm_statistic(model, name):
            continue
        changed.append(name)
    return changed


def is_norm_statistic(model: nn.Module, buffer_name: str) -> bool:
    """Whether a buffer is a running statistic of a BatchNorm or InstanceNorm layer.

    Such a layer updates its running statistics in training mode, but reads them in evaluation mode
    only. So they cannot be the reason why a proof fails.

    Args:
        model: The model.
        buffer_name: The buffer's full name in the model, such as "layers.1.running_mean".
    """
    module_name = buffer_name.rpartition(".")[0]
    module = model.get_submodule(module_name)
    return isinstance(module, nn.modules.batchnorm._NormBase)


def power_iteration_buffers(model: nn.Module) -> list[str]:
    """Return the names of all buffers that spectral norms update in every training forward.

    `torch.nn.utils.spectral_norm` and `torch.nn.utils.parametrizations.spectral_norm` do one step
    of the power method on vectors u and v in each training forward, so the weights depend on the
    number of micro-batches, which a proof must report. Modules in evaluation mode are skipped:
    their vectors do not change.
    """
    names = []
    for module_name, module in model.named_modules():
        if not module.training:
            continue
        prefix = f"{module_name}." if module_name else ""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):  # torch.nn.utils.spectral_norm
                names += [f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"]
        is_parametrization = isinstance(module, nn.utils.parametrizations._SpectralNorm)
        if is_parametrization and hasattr(module, "_u"):  # one-dimensional weights have none
            names += [f"{prefix}_u", f"{prefix}_v"]
    return names


def changed_buffers_cause(model: nn.Module, buffer_names: list[str]) -> str:
    """Describe the buffers that training forwards change, for the error message of a failed proof.

    Args:
        model: The model.
        buffer_names: Full names of these buffers in the model. The text groups them by module.
    """
    modules = dict(model.named_modules())
    buffers_by_module: dict[str, list[str]] = {}
    for buffer_name in buffer_names:
        module_name, _, short_name = buffer_name.rpartition(".")
        buffers_by_module.setdefault(module_name, []).append(short_name)
    descriptions = [
        f"{module_name or 'the model'} "
        f"({type(modules[module_name]).__name__}: {', '.join(short_names)})"
        for module_name, short_names in buffers_by_module.items()
    ]
    return (
        f"each training forward changes the buffers of {'; '.join(descriptions)}, so the update "
        "depends on the number of micro-batches of a window"
    )


def repeated_rows_cause(dropout: KeyedDropout) -> str | None:
    """Describe dropout masks with several rows per sample, for the error message of a failed proof.

    Keyed dropout assumes that the rows of one sample are consecutive. A model that repeats its
    inputs with `torch.cat([x, x])` (R-Drop) breaks this, so its masks depend on the batch size.

    Args:
        dropout: The model's keyed dropout, with all dropout sites found.

    Returns:
        Text about the first dropout site with such masks. None if there is none.
    """
    sites = [site for site in dropout.sites.values() if site.rows_per_sample > 1]
    if not sites:
        return None
    site = sites[0]
    return (
        f"{site.name} draws a dropout mask of shape {list(site.shapes[0])} for 2 samples, and the "
        "rows of one sample do not follow each other, as after torch.cat([x, x]) in R-Drop. Repeat "
        "with x.repeat_interleave(2, dim=0), whose two passes are the rows 0::2 and 1::2"
    )


def weighted_loss_cause(model: nn.Module) -> str:
    """Describe class or sample weights as the reason why a loss is not a plain mean, for the error
    message of a failed proof.

    Returns:
        The name of the first loss module with a `weight` (such as `nn.CrossEntropyLoss(weight)`).
        If the model has none, all causes that cannot be seen on the model.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.loss._WeightedLoss) and module.weight is not None:
            return f"{name} ({type(module).__name__}) has weights"
    return f"weights of classes or samples, {UNKNOWN}"


def likely_cause(model: nn.Module, losses: dict[str, float] | None) -> str:
    """Describe the most likely reason why no counting rule makes the losses of micro-batches add up
    to the mean loss of all samples.

    Args:
        model: The model, in training mode.
        losses: Its losses of two batches, "A" and "B", and of both together, "A+B". None if they
            were not computed.

    Returns:
        Text for an error message: a BatchNorm in training mode, experts with a limited capacity, a
        loss that is a sum instead of a mean, or `UNKNOWN`.
    """
    batch_norm = batch_norm_cause(model)
    if batch_norm is not None:
        return batch_norm
    config = getattr(model, "config", None)
    if getattr(config, "expert_capacity", None):
        return (
            "expert_capacity limits the tokens of each expert over the whole micro-batch, so which "
            "tokens are dropped depends on the split"
        )
    if losses:
        difference = abs(losses["A"] + losses["B"] - losses["A+B"])
        if difference <= TOLERANCE * abs(losses["A+B"]):
            return "the loss is a sum, not a mean"
    return UNKNOWN
