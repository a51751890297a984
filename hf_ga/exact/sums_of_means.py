"""Heads whose loss is a sum of several means over different targets: each mean is recomputed from
the logits.

No single weight of a micro-batch is right for such a head: each mean needs its own divisor. Whether
the means here are what a model's head computes is proven on the model, not assumed from its name.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import output_of
from hf_ga.exact.precision import at_least_float32


@dataclass(frozen=True)
class LabelMean:
    """The mean cross entropy of logits (..., classes) with labels (...), those of -100 left out.

    Attributes:
        labels: Name of the entry of the batch.
        logits: Name of the entry of the model's outputs.
        one_width: The counts depend on the padded width.
    """

    labels: str
    logits: str
    one_width = False

    def count(self, batch: Batch) -> int:
        """Count the targets of a batch on the host."""
        return int((batch[self.labels] != IGNORED_LABEL).sum())

    def total(self, outputs: Any, batch: Batch) -> Tensor:
        """Sum the loss over the targets: a scalar of at least float32."""
        scores = self.scores(outputs)
        rows = scores.reshape(-1, scores.shape[-1])
        return F.cross_entropy(rows, batch[self.labels].reshape(-1), reduction="sum")

    def scores(self, outputs: Any) -> Tensor:
        """Return the logits in at least float32."""
        logits = output_of(outputs, self.logits)
        if logits is None:
            raise LossNotAdditive(
                f"the model returned no {self.logits}, from which one mean of its loss is computed."
            )
        return at_least_float32(logits)


class PositionMean(LabelMean):
    """Half the mean cross entropy over the positions of a text; an answer beyond its end is left
    out, one before its begin is at 0.
    """

    one_width = True

    def count(self, batch: Batch) -> int:
        return int((batch[self.labels] < batch["input_ids"].shape[1]).sum())

    def total(self, outputs: Any, batch: Batch) -> Tensor:
        scores = self.scores(outputs)
        if scores.dim() != 2:
            raise LossNotAdditive(
                f"{self.logits} have shape {list(scores.shape)}, not (samples, tokens)."
            )
        width = scores.shape[1]
        positions = batch[self.labels].reshape(-1).clamp(0, width)
        total = F.cross_entropy(scores, positions, ignore_index=width, reduction="sum")
        return total / 2


KINDS: dict[str, tuple[LabelMean, ...]] = {
    "start and end positions": (
        PositionMean("start_positions", "start_logits"),
        PositionMean("end_positions", "end_logits"),
    ),
    "masked tokens and next sentences": (
        LabelMean("labels", "prediction_logits"),
        LabelMean("next_sentence_label", "seq_relationship_logits"),
    ),
    "masked tokens and sentence orders": (
        LabelMean("labels", "prediction_logits"),
        LabelMean("sentence_order_label", "sop_logits"),
    ),
}


def kind_of(entries: Batch) -> str | None:
    """Return the name of the kind of head for a batch; None if it has not all labels of any.

    Args:
        entries: Those of the batch that the model takes.
    """
    has_text = "input_ids" in entries  # its width is the one that positions are compared with
    for name, means in KINDS.items():
        has_labels = all(mean.labels in entries for mean in means)
        needs_text = any(mean.one_width for mean in means)
        if has_labels and (has_text or not needs_text):
            return name
    return None
