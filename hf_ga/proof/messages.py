"""Why a model is unsupported: the messages of `LossNotAdditive`."""

from torch import nn

from hf_ga.proof.probes import TOLERANCE


def likely_cause(model: nn.Module, losses: dict[str, float] | None) -> str:
    """The most likely reason why a loss is not additive."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return (
                f"{name} ({type(module).__name__}) normalises by the statistics of the whole micro-batch: freeze them with "
                "module.eval(), or use GroupNorm instead"
            )
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return "the router's auxiliary loss (output_router_logits) is a product of means over the micro-batch"
    if getattr(config, "expert_capacity", None):
        return "each expert takes at most a number of tokens (expert_capacity) of the whole micro-batch"
    if losses and abs(losses["A"] + losses["B"] - losses["A+B"]) <= TOLERANCE * abs(losses["A+B"]):
        return "the loss is a sum, not a mean"
    return "a loss across samples (in-batch negatives), a sum of several means, or a mean over something else"


def no_single_rule(
    model: nn.Module, fitting: list[str], residuals: dict[str, float], counts: dict[str, list], losses: dict[str, float]
) -> str:
    """No counting rule fits, or more than one."""
    if fitting:
        return (
            f"several ways of counting targets fit and cannot be told apart on these samples: {', '.join(fitting)}. Give "
            "prove_targets more samples of different lengths, or pass loss_fn."
        )
    shown = ", ".join(f"{name} {loss:.4g}" for name, loss in losses.items())
    numbers = "; ".join(f"{rule}: {counts[rule]} targets in A, B, A+B, relative error {residuals[rule]:.1e}" for rule in residuals)
    return (
        f"the loss of a batch is not the mean over its targets for any way of counting them ({numbers}; losses "
        f"{shown}). Likely cause: {likely_cause(model, losses)}. "
        "Remedy: pass loss_fn(outputs, batch) -> (sum of the loss over the targets, number of targets)."
    )


def unlike_in_another_order(model: nn.Module, loss: float, rounding: float, limit: float) -> str:
    """The loss of the same samples in another order is another."""
    cause = likely_cause(model, None) if loss == loss else "the loss is NaN, a mean over nothing"
    return (
        f"the loss or its gradient depends on the order of the samples in a batch, by {rounding:.1e} relative (limit "
        f"{limit:.0e}). Likely cause: {cause}, or computing in low precision."
    )


def unknown_router_loss(residual: float) -> str:
    """The router's auxiliary loss is not the load-balancing loss of Switch Transformer."""
    return (
        f"the router's auxiliary loss is not the one that is known (relative error {residual:.1e}). Set "
        "output_router_logits=False (the load is then not balanced), or pass loss_fn."
    )


def unlike_without_padding(error: float) -> str:
    """Not even one padded width for all micro-batches is enough."""
    return (
        f"a batch without any padding is computed in another way than one with padding (relative error {error:.1e}), so a "
        "micro-batch of equal lengths differs from the same samples among shorter ones. Likely cause: an argument that the model's "
        "own processor gives is missing (token_type_ids), or its attention mask is left out where it is all ones. Remedy: give it, "
        "or let the collate function pad every batch to one width, larger than the longest sample."
    )
