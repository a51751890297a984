"""Heads whose loss is a sum of several means over different targets: each mean is recomputed from
the logits.

No single weight of a micro-batch is right for such a head, because each mean has another divisor.
Whether a model's head computes these means is proven on the model, not assumed from its class.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import get_output
from hf_ga.exact.precision import at_least_float32


@dataclass(frozen=True)
class LabelMean:
    """One mean of a head's loss: the cross entropy of logits (..., classes) with labels (...),
    averaged over the labels other than -100.

    Attributes:
        labels: Name of the batch entry with the labels.
        logits: Name of the model output with the logits.
        count_depends_on_padded_length: Whether the number of targets depends on the padded length
            of the batch.
    """

    labels: str
    logits: str
    count_depends_on_padded_length = False

    def count(self, batch: Batch) -> int:
        """Count the targets of one mean of a head's loss in a batch, on the host: the labels other
        than -100.
        """
        return int((batch[self.labels] != IGNORED_LABEL).sum())

    def total(self, outputs: Any, batch: Batch) -> Tensor:
        """Sum the cross entropy of one mean of a head's loss over the targets of a batch: a scalar
        of at least float32.
        """
        logits = self.logits_of(outputs)
        rows = logits.reshape(-1, logits.shape[-1])
        return F.cross_entropy(rows, batch[self.labels].reshape(-1), reduction="sum")

    def logits_of(self, outputs: Any) -> Tensor:
        """Return the logits of one mean of a head's loss from the model's outputs, in at least
        float32.

        Raises:
            LossNotAdditive: If the outputs do not contain them.
        """
        logits = get_output(outputs, self.logits)
        if logits is None:
            raise LossNotAdditive(
                f"the model returned no {self.logits}, from which one mean of its loss is computed."
            )
        return at_least_float32(logits)


class PositionMean(LabelMean):
    """One of the two means of an extractive question answering head: half the cross entropy of the
    start (or end) position of the answer, with one class per token of the padded batch.

    As in transformers, an answer beyond the padded length is not a target, and a negative position
    counts as 0.
    """

    count_depends_on_padded_length = True

    def count(self, batch: Batch) -> int:
        """Count the targets of a question answering head's mean in a batch: the samples whose
        answer position is within the padded length.
        """
        return int((batch[self.labels] < batch["input_ids"].shape[1]).sum())

    def total(self, outputs: Any, batch: Batch) -> Tensor:
        """Sum half the cross entropy of the answer's position (question answering) over the samples
        whose answer is within the padded length. The other half is that of the other position.

        Raises:
            LossNotAdditive: If the logits do not have shape (samples, padded length).
        """
        logits = self.logits_of(outputs)
        if logits.dim() != 2:
            raise LossNotAdditive(
                f"{self.logits} have shape {list(logits.shape)}, not (samples, tokens)."
            )
        padded_length = logits.shape[1]
        # An answer beyond the padded length is clamped to it, the index that is ignored.
        positions = batch[self.labels].reshape(-1).clamp(0, padded_length)
        total = F.cross_entropy(logits, positions, ignore_index=padded_length, reduction="sum")
        return total / 2


# The means of each kind of head, by its name in reports.
SUM_OF_MEANS_HEADS: dict[str, tuple[LabelMean, ...]] = {
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


def find_sum_of_means(entries: Batch) -> str | None:
    """Return the name of the kind of head, among those whose loss is a sum of several means, for
    which a batch has all labels. None if there is no such kind.

    Args:
        entries: The entries of the batch that the model's forward accepts.
    """
    # Answer positions are compared with the padded length of the text.
    has_input_ids = "input_ids" in entries
    for name, means in SUM_OF_MEANS_HEADS.items():
        has_labels = all(mean.labels in entries for mean in means)
        needs_input_ids = any(mean.count_depends_on_padded_length for mean in means)
        if has_labels and (has_input_ids or not needs_input_ids):
            return name
    return None
