"""Cross entropy with class weights and label smoothing, as a `loss_fn`: (sum over the targets, how many they count for)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import LossFunction
from hf_ga.exact.precision import at_least_float32


def make_loss_fn(label_smoothing: float, weights: Sequence[float] | None, *, shifted: bool) -> LossFunction | None:
    """The loss function for these settings; None where the head's own loss is what they ask for.

    Args:
        weights: one for each class. shifted: token t predicts label t + 1 (causal heads).
    """
    if not label_smoothing and weights is None:
        return None
    return CrossEntropySum(label_smoothing, None if weights is None else torch.tensor(weights), shifted)


@dataclass(frozen=True, eq=False)
class CrossEntropySum:
    """Sum of the loss over the targets, and their number or, with weights, the sum of their weights.

    With smoothing s a target's loss is (1 - s) x (its negative log-likelihood) + s x (the mean of that over all classes), as in
    `torch.nn.functional.cross_entropy`, whose weighted mean is this sum divided by this number. A target of weight 0 is left out
    altogether: torch would still smooth it, although it counts for nothing, and a micro-batch of such targets has no mean.

    Attributes:
        weights: None, or shape (classes,). shifted: token t predicts label t + 1.
    """

    label_smoothing: float
    weights: Tensor | None
    shifted: bool

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of `outputs.logits` of shape (..., classes) and `batch["labels"]` of shape (...), -100 ignored. Returns two scalars."""
        logits = outputs.logits[:, :-1] if self.shifted else outputs.logits
        logits = at_least_float32(logits.reshape(-1, logits.shape[-1]))
        weights = None if self.weights is None else self.weights.to(logits.device, logits.dtype, non_blocking=True)
        labels = self._labels(batch, weights)
        loss = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=self.label_smoothing)
        return loss, _count(labels, weights)

    def count_targets(self, batch: Batch) -> float:
        """The number alone, which no forward is needed for: of a batch on the host without a wait for the device."""
        weights = None if self.weights is None else self.weights.double()
        return float(_count(self._labels(batch, weights), weights))

    def _labels(self, batch: Batch, weights: Tensor | None) -> Tensor:
        """Of all targets, those of weight 0 ignored."""
        labels = (batch["labels"][:, 1:] if self.shifted else batch["labels"]).reshape(-1)
        return labels if weights is None else labels.masked_fill(weights[labels.clamp(min=0)] == 0, IGNORED_LABEL)


def _count(labels: Tensor, weights: Tensor | None) -> Tensor:
    counted = labels != IGNORED_LABEL
    return counted.sum() if weights is None else (weights[labels.clamp(min=0)] * counted).sum()
