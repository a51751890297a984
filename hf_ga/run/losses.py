"""Cross entropy with label smoothing, as a `loss_fn`: (sum over the targets, their number)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.precision import at_least_float32


@dataclass(frozen=True)
class SmoothedCrossEntropy:
    """Sum of the loss over the targets, and their number.

    With smoothing s the loss of a target is (1 - s) x (its negative log-likelihood) + s x (the mean
    of this over all classes), as in `torch.nn.functional.cross_entropy`.

    Attributes:
        shifted: token t predicts label t + 1 (causal heads).
    """

    label_smoothing: float
    shifted: bool

    def __call__(self, outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """`outputs.logits`: shape (..., classes); `batch["labels"]`: shape (...), -100 ignored.
        Returns two scalars.
        """
        logits = outputs.logits[:, :-1] if self.shifted else outputs.logits
        logits, labels = at_least_float32(logits.reshape(-1, logits.shape[-1])), self._labels(batch)
        loss = F.cross_entropy(
            logits, labels, reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss, (labels != IGNORED_LABEL).sum()

    def count_targets(self, batch: Batch) -> float:
        """The number of targets alone, without a forward; without device synchronization for a
        batch on the host.
        """
        return float((self._labels(batch) != IGNORED_LABEL).sum())

    def _labels(self, batch: Batch) -> Tensor:
        return (batch["labels"][:, 1:] if self.shifted else batch["labels"]).reshape(-1)
