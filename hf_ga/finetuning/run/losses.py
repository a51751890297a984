"""Cross entropy with label smoothing, class weights and weights of rows, as a `loss_fn`: (sum of
weights x losses, sum of weights).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn import functional as F

from hf_ga.errors import ConfigError, DataError
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.precision import at_least_float32, sum_dtype
from hf_ga.finetuning.data.collation import ROW_WEIGHTS
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.run.config import BALANCED, FinetuneConfig


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Sum of weights x losses over the targets, and the sum of the weights.

    The weight of a target is the weight of its class times the weight of its row (the batch's
    `row_weights`), each 1 if there is none. Without weights of rows, sum / weights is the loss of
    `torch.nn.functional.cross_entropy(logits, labels, class_weights, label_smoothing=...)`.

    Attributes:
        label_smoothing: With smoothing s the loss of a target is (1 - s) x (its negative
            log-likelihood) + s x (the mean of this over all classes, each times its own weight).
        shifted: Token t predicts label t + 1 (causal heads).
        class_weights: One number per class. None: 1 for each.
    """

    label_smoothing: float
    shifted: bool
    class_weights: tuple[float, ...] | None = None

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the two sums.

        Args:
            outputs: The model's outputs with `logits`, shape (samples, ..., classes).
            batch: `labels`, shape (samples, ...), -100 ignored; optionally `row_weights`, float32
                of shape (samples,).

        Returns:
            The sum of weights x losses and the sum of the weights, two scalars.
        """
        logits = outputs.logits[:, :-1] if self.shifted else outputs.logits
        logits = at_least_float32(logits.reshape(-1, logits.shape[-1]))
        labels = self._labels(batch)
        of_rows = _of_targets(batch, labels)
        losses = F.cross_entropy(
            logits,
            labels.reshape(-1),
            self._of_classes(logits.device, logits.dtype),
            reduction="sum" if of_rows is None else "none",
            label_smoothing=self.label_smoothing,
        )
        if of_rows is not None:
            losses = (losses * of_rows.reshape(-1)).sum()
        return losses, self._sum_of_weights(batch)

    def _sum_of_weights(self, batch: Batch) -> Tensor:
        """Add the weights of all targets: of class times row. A scalar."""
        labels = self._labels(batch)
        weights = (labels != IGNORED_LABEL).float()
        of_classes = self._of_classes(labels.device, torch.float32)
        if of_classes is not None:
            weights = weights * of_classes[labels.clamp(min=0)]
        of_rows = _of_targets(batch, labels)
        if of_rows is not None:
            weights = weights * of_rows
        return weights.to(sum_dtype(labels.device)).sum()

    def _labels(self, batch: Batch) -> Tensor:
        """Return the labels that are predicted: for a causal head, all but the first token's."""
        return batch["labels"][:, 1:] if self.shifted else batch["labels"]

    def _of_classes(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """Return the weight of each class, shape (classes,). None: all are 1."""
        if self.class_weights is None:
            return None
        weights = torch.tensor(self.class_weights, dtype=torch.float32)
        return weights.to(device, dtype, non_blocking=True)


@dataclass(frozen=True)
class SmoothedCrossEntropy(WeightedCrossEntropy):
    """The same without weights: the sum of the losses, and the number of targets."""

    def count_targets(self, batch: Batch) -> float:
        """Count the targets without a forward, and without device synchronization for a batch on
        the host.
        """
        return float(self._sum_of_weights(batch))


def _of_targets(batch: Batch, labels: Tensor) -> Tensor | None:
    """Return the weight of each target's row, in the shape of the labels. None: all are 1."""
    if ROW_WEIGHTS not in batch:
        return None
    other_axes = [1] * (labels.dim() - 1)
    weights = batch[ROW_WEIGHTS].reshape(-1, *other_axes)
    return weights.expand_as(labels)


def weights_of_classes(config: FinetuneConfig, data: PreparedData) -> dict[str, float]:
    """Return the weight of each class for the flag `class_weights`.

    `balanced` is that of scikit-learn's `compute_class_weight` (after King and Zeng 2001, Logistic
    Regression in Rare Events Data): targets / (classes x targets of the class), over the training
    rows.

    Args:
        config: The configuration of the run.
        data: The prepared data with its labels.

    Returns:
        Label -> weight, in the order of the labels. Empty: the flag is not set.

    Raises:
        ConfigError: If there are more or fewer numbers than labels.
        DataError: If the weights are `balanced`, and no training row has one of the labels.
    """
    given = config.class_weights
    if given is None:
        return {}
    if given == BALANCED:
        given = _balanced(data.splits["train"], data.labels)
    if len(given) != len(data.labels):
        raise ConfigError(
            f"class_weights has {len(given)} numbers for {len(data.labels)} labels: give one for "
            f"each, in this order: {', '.join(data.labels)}."
        )
    return dict(zip(data.labels, map(float, given), strict=True))


def _balanced(train: Dataset, labels: list[str]) -> list[float]:
    """Compute targets / (classes x targets of the class) for each class.

    Raises:
        DataError: If no training row has one of the labels.
    """
    counts = np.zeros(len(labels), np.int64)
    for rows in train.select_columns(["label"]).iter(batch_size=1000):
        targets = np.hstack(rows["label"])
        targets = targets[targets != IGNORED_LABEL]
        counts += np.bincount(targets, minlength=len(labels))
    missing = [label for label, count in zip(labels, counts, strict=True) if not count]
    if missing:
        raise DataError(
            f"class_weights balanced divides by the number of targets of each class, but no train "
            f"row has the label {', '.join(missing)}: add such rows, or give class_weights "
            f"{len(labels)} numbers."
        )
    return [float(counts.sum() / (len(labels) * count)) for count in counts]
