"""Suspected causes of a wrong gradient that can be switched off, one at a time: dropout, BatchNorm,
clipping.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ga.check.steps import CheckContext
from hf_ga.exact.override import override

_DROPOUT_FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Run the block with torch's dropout functions as no-ops, and attention without dropout. The
    equivalence check tries in this way whether dropout causes a wrong gradient.
    """
    original_attention = F.scaled_dot_product_attention

    def attention_without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Call `scaled_dot_product_attention` with a dropout probability of 0, in a trial of the
        equivalence check without dropout.
        """
        return original_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def identity(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the first argument unchanged, in place of a dropout function, in a trial of the
        equivalence check without dropout.
        """
        return x

    functions = dict.fromkeys(_DROPOUT_FUNCTIONS, identity)
    functions["scaled_dot_product_attention"] = attention_without_dropout
    with override(F, **functions), override(torch, dropout=identity):
        yield


def without_batch_statistics() -> AbstractContextManager:
    """Patch `torch.nn.functional.batch_norm` within the block: BatchNorm normalises by its running
    statistics and does not update them, as in evaluation mode.

    The equivalence check uses this to test whether BatchNorm causes a wrong gradient.
    """
    return override(F, batch_norm=partial(_eval_mode_batch_norm, F.batch_norm))


def without_clipping() -> AbstractContextManager:
    """Within the block, torch's `clip_grad_norm_`, which Accelerate and Trainer also call, only
    returns the norm and does not clip. The equivalence check uses this to test whether clipping
    causes a wrong gradient.
    """
    original = nn.utils.clip_grad_norm_

    def norm_without_clipping(
        parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the L2 norm of the gradients, which are left unchanged: `clip_grad_norm_` in a
        trial of the equivalence check without clipping.
        """
        return original(parameters, math.inf)

    return override(nn.utils, clip_grad_norm_=norm_without_clipping)


class Suspect(NamedTuple):
    """A suspected cause of a gradient that differs from the full batch's, and how to switch it off
    during a trial of the diagnosis.

    Attributes:
        name: Name of the cause in the report.
        text: What the training step does wrong if this is the cause.
        applies: Returns whether the suspect can affect this model.
        switched_off: Returns a context manager that switches the suspect off.
    """

    name: str
    text: str
    applies: Callable[[CheckContext], bool]
    switched_off: Callable[[], AbstractContextManager]


def _has_dropout(context: CheckContext) -> bool:
    """Return whether the reference of an equivalence check drew dropout masks."""
    return any("dropout" in function for function in context.draws.places)


def _has_batch_norm(context: CheckContext) -> bool:
    """Return whether the model of an equivalence check has a BatchNorm layer, which may cause a
    wrong gradient.

    Layers in evaluation mode count too, as a step may put them into training mode.
    """
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in context.model.modules()
    )


SUSPECTS = [
    Suspect(
        "dropout",
        "dropout masks are not those of the full batch: they depend on the split",
        applies=_has_dropout,
        switched_off=without_dropout,
    ),
    Suspect(
        "BatchNorm",
        "BatchNorm normalises by the statistics of the micro-batch, not of the window",
        applies=_has_batch_norm,
        switched_off=without_batch_statistics,
    ),
    # The trial finds out whether the step is wrong, or the reference, which does not clip.
    Suspect(
        "clipping",
        "the step correctly clips once per window, but the reference is not clipped: pass "
        "max_grad_norm",
        applies=lambda context: True,
        switched_off=without_clipping,
    ),
]


def _eval_mode_batch_norm(
    original: Callable,
    x: Tensor,
    mean: Any,
    variance: Any,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Replacement for `F.batch_norm`, in a trial of the equivalence check without the statistics of
    micro-batches: normalises by the running statistics, as in evaluation mode.

    Args:
        original: `F.batch_norm` itself.
        x: Shape (batch, channels, ...).
        mean: Running mean, shape (channels,). None (a layer without running statistics): 0.
        variance: Running variance, shape (channels,). None: 1.
        weight: As for `F.batch_norm`.
        bias: As for `F.batch_norm`.
        args: `training`, `momentum` and `eps` of `F.batch_norm`; only `eps` is used.
        kwargs: The same by name.
    """
    if mean is None:
        mean = torch.zeros(x.shape[1]).to(x)
        variance = torch.ones(x.shape[1]).to(x)
    default_eps = args[2] if len(args) > 2 else 1e-5
    eps = kwargs.get("eps", default_eps)
    return original(x, mean, variance, weight, bias, training=False, momentum=0.0, eps=eps)
