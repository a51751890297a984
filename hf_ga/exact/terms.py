"""The one owner of the divisor: what a micro-batch adds to the mean loss of its window.

    mean loss of the window = sum over its micro-batches of (mean loss x targets of the micro-batch) / targets of the window

and, for a head whose loss is a sum of several means, the same for each of them. (An own `loss_fn` counts in its forward: what
it sums is divided in `step.py`, at the window's end.) The proof and the step both call these functions:
what is proven is what runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import head_loss
from hf_ga.exact.parts import PARTS

Counts = tuple[int, ...]  # targets: one number, or one for each part of the loss


def count_shifted_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count, without the first column: a causal head predicts column 1 first."""
    return int((batch["labels"][..., 1:] != IGNORED_LABEL).sum())


def count_labels(batch: Batch, num_samples: int) -> int:
    """Labels that count."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def count_samples(batch: Batch, num_samples: int) -> int:
    """Samples."""
    return num_samples


def count_attended(batch: Batch, num_samples: int) -> int:
    """Tokens that are not padding, whatever their labels."""
    return int(batch["attention_mask"].sum())


RULES: dict[str, Callable[[Batch, int], int]] = {
    "shifted labels": count_shifted_labels,
    "labels": count_labels,
    "samples": count_samples,
    "attended tokens": count_attended,
}


def count_targets(rule: str, batch: Batch, num_samples: int) -> Counts:
    """Targets of a collated batch on the host, by a rule of `RULES` (one number) or of `PARTS` (one for each part)."""
    if rule in PARTS:
        return tuple(part.count(batch, num_samples) for part in PARTS[rule].parts)
    return (RULES[rule](batch, num_samples),)


def add_counts(rule: str, counts: Sequence[Counts]) -> Counts:
    """The targets of several batches together; of none, zeros."""
    size = len(PARTS[rule].parts) if rule in PARTS else 1
    return tuple(sum(count[i] for count in counts) for i in range(size))


def loss_sums(rule: str, outputs: Any, batch: Batch, counts: Counts, loss: Tensor | None = None) -> tuple[Tensor | float, ...]:
    """The loss summed over the targets of a batch: one scalar in float32 for each number of `counts`; 0.0 where there is no target.

    Args:
        outputs: of the model on `batch`, which lies on the model's device. counts: `count_targets` of the batch.
        loss: the mean loss of the batch, where it is not the head's own (not for a sum of means).

    Raises:
        LossNotAdditive: the model returned no loss.
    """
    if rule in PARTS:
        parts = zip(PARTS[rule].parts, counts, strict=True)
        return tuple(part.total(outputs, batch) if count else 0.0 for part, count in parts)
    if not counts[0]:  # the head's mean over nothing is 0 / 0
        return (0.0,)
    return ((head_loss(outputs) if loss is None else loss) * counts[0],)


def window_term(
    rule: str, outputs: Any, batch: Batch, counts: Counts, totals: Counts, loss: Tensor | None = None
) -> Tensor | float:
    """What one micro-batch adds to the mean loss of its window, a scalar in float32; 0.0 if it has no target.

    Args:
        totals: the sums of `counts` over the window, on all processes. The others: see `loss_sums`.
    """
    sums = loss_sums(rule, outputs, batch, counts, loss)
    return sum((part / total for part, count, total in zip(sums, counts, totals, strict=True) if count), start=0.0)
