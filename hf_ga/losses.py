"""Cross entropy with class weights and label smoothing, as a `loss_fn`: (sum over the targets, how many they count for)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ga.batches import IGNORED_LABEL, Batch
from hf_ga.forward import LossFunction
from hf_ga.precision import at_least_float32


def make_loss_fn(label_smoothing: float, weights: Sequence[float] | None, *, shifted: bool) -> LossFunction | None:
    """The loss function for these settings; None where the head's own loss is what they ask for.

    Args:
        weights: one for each class. shifted: token t predicts label t + 1 (causal heads).
    """
    if not label_smoothing and weights is None:
        return None
    tensor = None if weights is None else torch.tensor(weights)
    return partial(cross_entropy_sum, label_smoothing=label_smoothing, weights=tensor, shifted=shifted)


def cross_entropy_sum(
    outputs: Any, batch: Batch, *, label_smoothing: float, weights: Tensor | None, shifted: bool
) -> tuple[Tensor, Tensor | int]:
    """Sum of the loss over the targets, and their number or, with weights, the sum of their weights.

    With smoothing s a target's loss is (1 - s) x (its negative log-likelihood) + s x (the mean of that over all classes), as in
    `torch.nn.functional.cross_entropy`, whose weighted mean is this sum divided by this number. A target of weight 0 is left out
    altogether: torch would still smooth it, although it counts for nothing, and a micro-batch of such targets has no mean.

    Args:
        outputs: `logits` of shape (..., classes). batch: `labels` of shape (...), -100 ignored. weights: shape (classes,).
    """
    logits, labels = outputs.logits, batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    logits, labels = at_least_float32(logits.reshape(-1, logits.shape[-1])), labels.reshape(-1)
    if weights is not None:
        weights = weights.to(logits.device, logits.dtype, non_blocking=True)
        labels = labels.masked_fill(weights[labels.clamp(min=0)] == 0, IGNORED_LABEL)
    loss = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=label_smoothing)
    counted = labels != IGNORED_LABEL
    return loss, counted.sum() if weights is None else (weights[labels.clamp(min=0)] * counted).sum()
