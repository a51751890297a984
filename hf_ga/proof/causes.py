"""The likely causes of a loss that is not additive, as clauses for error messages."""

from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from hf_ga.exact.dropout import KeyedDropout
from hf_ga.proof.probes import TOLERANCE

UNKNOWN = (
    "a loss across samples (in-batch negatives), a sum of several means, or a mean over something "
    "else"
)


def normalisation(model: nn.Module) -> str | None:
    """Find a BatchNorm in training mode."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return (
                f"{name} ({type(module).__name__}) normalises by the statistics of the whole "
                "micro-batch: freeze it with module.eval(), or use GroupNorm instead"
            )
    return None


def changed_buffers(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Return the names of the floating-point buffers with other values than before."""
    return [
        name
        for name, buffer in model.named_buffers()
        if name in before and buffer.is_floating_point() and not buffer.equal(before[name])
    ]


def changed_counters(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """Return the names of other buffers with other values than before, without those of norms."""
    return [
        name
        for name, buffer in model.named_buffers()
        if name in before
        and not buffer.is_floating_point()
        and not buffer.equal(before[name])
        and not is_running_statistic(model, name)
    ]


def is_running_statistic(model: nn.Module, name: str) -> bool:
    """Whether a buffer belongs to a norm, which does not read it in training."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, nn.modules.batchnorm._NormBase)


def power_iterations(model: nn.Module) -> list[str]:
    """Return the names of the buffers of spectral norms that iterate in each training forward."""
    found = []
    for name, module in model.named_modules():
        if not module.training:
            continue
        prefix = f"{name}." if name else ""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found += [f"{prefix}{hook.name}_u", f"{prefix}{hook.name}_v"]
        if isinstance(module, nn.utils.parametrizations._SpectralNorm) and hasattr(module, "_u"):
            found += [f"{prefix}_u", f"{prefix}_v"]
    return found


def state(model: nn.Module, names: list[str]) -> str:
    """Describe state that training forwards change.

    Args:
        names: Of the buffers that are changed.
    """
    modules = dict(model.named_modules())
    buffers: dict[str, list[str]] = {}
    for name in names:
        owner, _, buffer = name.rpartition(".")
        buffers.setdefault(owner, []).append(buffer)
    shown = "; ".join(
        f"{owner or 'the model'} ({type(modules[owner]).__name__}: {', '.join(own)})"
        for owner, own in buffers.items()
    )
    return (
        f"each training forward changes the buffers of {shown}, so the update depends on the "
        "number of micro-batches of a window"
    )


def apart(dropout: KeyedDropout) -> str | None:
    """Describe masks of several rows for each sample that do not follow each other; None if there
    are none of several rows.
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


def weights(model: nn.Module) -> str:
    """Describe the weights of a module, or any."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.loss._WeightedLoss) and module.weight is not None:
            return f"{name} ({type(module).__name__}) has weights"
    return f"weights of classes or samples, {UNKNOWN}"


def likely_cause(model: nn.Module, losses: dict[str, float] | None) -> str:
    """Describe the most likely cause that the model itself shows."""
    cause = normalisation(model)
    if cause is not None:
        return cause
    config = getattr(model, "config", None)
    if getattr(config, "expert_capacity", None):
        return (
            "the capacity of an expert (expert_capacity) limits its tokens over the whole "
            "micro-batch"
        )
    if losses and abs(losses["A"] + losses["B"] - losses["A+B"]) <= TOLERANCE * abs(losses["A+B"]):
        return "the loss is a sum, not a mean"
    return UNKNOWN
