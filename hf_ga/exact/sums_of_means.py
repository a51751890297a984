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
        labels: entry of the batch. logits: entry of the model's outputs.
        one_width: the counts depend on the padded width.
    """

    labels: str
    logits: str
    one_width = False

    def count(self, batch: Batch) -> int:
        """Targets of a batch on the host."""
        return int((batch[self.labels] != IGNORED_LABEL).sum())

    def total(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss summed over the targets, a scalar of at least float32."""
        scores = self.scores(outputs)
        return F.cross_entropy(
            scores.reshape(-1, scores.shape[-1]), batch[self.labels].reshape(-1), reduction="sum"
        )

    def scores(self, outputs: Any) -> Tensor:
        """The logits in at least float32."""
        if (logits := output_of(outputs, self.logits)) is None:
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
        return (
            F.cross_entropy(
                scores,
                batch[self.labels].reshape(-1).clamp(0, width),
                ignore_index=width,
                reduction="sum",
            )
            / 2
        )


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
    """The name of the kind of head for a batch with these entries (those that the model takes), if
    there is one.
    """
    has_text = "input_ids" in entries  # its width is the one that positions are compared with
    found = (
        name
        for name, means in KINDS.items()
        if all(m.labels in entries and (has_text or not m.one_width) for m in means)
    )
    return next(found, None)
