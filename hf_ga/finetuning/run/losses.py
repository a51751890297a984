"""Cross entropy with label smoothing, class weights and row weights, as a `loss_fn` that returns
the weighted sum of the losses and the sum of the weights.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor
from torch.nn import functional as F

from hf_ga.errors import ConfigError, DataError
from hf_ga.finetuning.data.data import PreparedData
from hf_ga.finetuning.data.encoding.collation import ROW_WEIGHTS
from hf_ga.finetuning.run.flags.config import BALANCED, FinetuneConfig
from hf_ga.loading.batches import IGNORED_LABEL
from hf_ga.model.forward import Batch
from hf_ga.model.precision import at_least_float32, sum_dtype


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """The loss of runs with class weights or row weights: a `loss_fn` that returns the weighted sum
    of the cross entropies of all targets, and the sum of their weights.

    The weight of a target is the weight of its class times the weight of its row (the batch's
    `row_weights`), each 1 if there is none. Without row weights, the quotient of the two sums is
    `torch.nn.functional.cross_entropy(logits, labels, class_weights, label_smoothing=...)`.

    Attributes:
        label_smoothing: The smoothing s: the loss of a target is (1 - s) x (its negative
            log-likelihood) + s x (the mean of the negative log-likelihoods of all classes, each
            times the weight of the class).
        shifted: Whether token t predicts label t + 1, as in causal language models.
        class_weights: The weight of each class, or None if all are 1.
    """

    label_smoothing: float
    shifted: bool
    class_weights: tuple[float, ...] | None = None

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the cross entropies of a batch with the class weights, row weights and label
        smoothing of a fine-tuning run.

        Args:
            outputs: The model's outputs with `logits`, shape (samples, ..., classes).
            batch: The batch with `labels`, shape (samples, ...), where -100 is ignored, and
                optionally `row_weights`, float32 of shape (samples,).

        Returns:
            The weighted sum of the losses and the sum of the weights, two scalars.
        """
        logits = outputs.logits
        labels = batch["labels"]
        if self.shifted:
            logits = logits[:, :-1]
            labels = labels[:, 1:]
        logits = at_least_float32(logits.reshape(-1, logits.shape[-1]))
        weights = (labels != IGNORED_LABEL).float()
        if ROW_WEIGHTS in batch:
            other_dims = [1] * (labels.dim() - 1)
            weights = weights * batch[ROW_WEIGHTS].reshape(-1, *other_dims)
        class_weights: Tensor | None = None
        if self.class_weights is not None:
            class_weights = torch.tensor(self.class_weights, dtype=logits.dtype)
            class_weights = class_weights.to(labels.device, non_blocking=True)
        losses = F.cross_entropy(
            logits,
            labels.reshape(-1),
            class_weights,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        loss = (losses * weights.reshape(-1)).sum()
        if class_weights is not None:
            # The weight of an ignored label stays 0, whichever class weight is looked up for it.
            weights = weights * class_weights[labels.clamp(min=0)]
        return loss, weights.to(sum_dtype(labels.device)).sum()


def weights_of_classes(config: FinetuneConfig, data: PreparedData) -> dict[str, float]:
    """Return the weight of each class that the flag `class_weights` sets.

    With `balanced`, it is computed from the training rows as in scikit-learn's
    `compute_class_weight`: targets / (classes x targets of the class) (after King and Zeng 2001,
    Logistic Regression in Rare Events Data).

    Args:
        config: The configuration of the run.
        data: The prepared data with its labels.

    Returns:
        Label -> weight, in the order of the labels; empty without the flag.

    Raises:
        ConfigError: If the flag has more or fewer numbers than there are labels.
        DataError: If the weights are `balanced`, and a label is in no training row.
    """
    weights = config.class_weights
    if weights is None:
        return {}
    if weights == BALANCED:
        weights = _balanced_weights(data.splits["train"], data.labels)
    if len(weights) != len(data.labels):
        raise ConfigError(
            f"class_weights has {len(weights)} numbers for {len(data.labels)} labels: give one for "
            f"each, in this order: {', '.join(data.labels)}."
        )
    return dict(zip(data.labels, map(float, weights), strict=True))


def _balanced_weights(train: Dataset, labels: list[str]) -> list[float]:
    """Compute the weights of the flag `class_weights balanced`: targets / (classes x targets of the
    class), so that all classes have the same total weight in the loss.
    """
    targets = np.hstack(train["label"][:])
    targets = targets[targets != IGNORED_LABEL]
    classes = np.arange(len(labels))
    missing = [labels[i] for i in np.setdiff1d(classes, targets)]
    if missing:
        raise DataError(
            f"class_weights balanced divides by the number of targets of each class, but no train "
            f"row has the label {', '.join(missing)}: add such rows, or give class_weights "
            f"{len(labels)} numbers."
        )
    return compute_class_weight("balanced", classes=classes, y=targets).tolist()
