"""Suspected causes that can be switched off, one at a time."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_ga.check.subjects import Subject
from hf_ga.exact.override import override
from hf_ga.exact.window import Window
from hf_ga.proof.probes import same_shapes

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
    """Disable torch's dropout functions."""
    attention = F.scaled_dot_product_attention

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kw: Any,
    ) -> Tensor:
        return attention(q, k, v, attn_mask, 0.0, *args, **kw)

    def keep(x: Tensor, *args: Any, **kw: Any) -> Tensor:
        return x

    functions = dict.fromkeys(_DROPOUT_FUNCTIONS, keep) | {"scaled_dot_product_attention": attend}
    with override(F, **functions), override(torch, dropout=keep):
        yield


def without_batch_statistics() -> AbstractContextManager:
    """Let BatchNorm normalise by its running statistics without updating them."""
    return override(F, batch_norm=partial(_frozen_batch_norm, F.batch_norm))


def without_clipping() -> AbstractContextManager:
    """Make torch's clipping by norm, which Accelerate and Trainer also call, return the norm
    without clipping.
    """
    original = nn.utils.clip_grad_norm_

    def only_norm(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        return original(parameters, math.inf)

    return override(nn.utils, clip_grad_norm_=only_norm)


class Switch(NamedTuple):
    """A suspected cause.

    Attributes:
        name: Of the cause.
        text: What is wrong.
        applies: Whether it can affect a window.
        off: Context manager that switches it off.
    """

    name: str
    text: str
    applies: Callable[[Subject, Window], bool]
    off: Callable[[], AbstractContextManager]


def _has_unequal_widths(window: Window) -> bool:
    """Whether the rows of samples have other shapes in some micro-batches than in others."""
    first_rows = []
    for micro_batch in window.micro_batches:
        batch = micro_batch.batch
        first_rows.append(
            {name: v[:1] for name, v in batch.items() if isinstance(v, Tensor) and v.dim()}
        )
    return not all(same_shapes(first_rows[0], other) for other in first_rows)


SWITCHES = [
    Switch(
        "dropout",
        "dropout masks are not those of the full batch: they depend on the split",
        lambda subject, window: bool(subject.dropout.sites or subject.dropout.unkeyed),
        without_dropout,
    ),
    Switch(
        "BatchNorm",
        "BatchNorm normalises by the statistics of the micro-batch, not of the window",
        # Including those in evaluation mode: a step may put them into training mode.
        lambda subject, window: any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in subject.model.modules()
        ),
        without_batch_statistics,
    ),
    Switch(  # switched off by the window: all its micro-batches are padded to one width
        "padding width",
        "the loss of a sample depends on the width to which its micro-batch is padded",
        lambda subject, window: _has_unequal_widths(window),
        nullcontext,
    ),
    Switch(  # the trial finds out whether it is the step or the reference that is wrong
        "clipping",
        "the step correctly clips once per window, but the reference is not clipped: pass "
        "max_grad_norm",
        lambda subject, window: True,
        without_clipping,
    ),
]


def _frozen_batch_norm(
    original: Callable,
    x: Tensor,
    mean: Any,
    variance: Any,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Replace `F.batch_norm`: normalise by the running statistics, as in evaluation mode."""
    if mean is None:  # a layer without running statistics
        mean = torch.zeros(x.shape[1]).to(x)
        variance = torch.ones(x.shape[1]).to(x)
    default_eps = args[2] if len(args) > 2 else 1e-5
    eps = kwargs.get("eps", default_eps)
    return original(x, mean, variance, weight, bias, training=False, momentum=0.0, eps=eps)
