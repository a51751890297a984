"""Heads whose loss is a sum of several means over different targets: each mean is recomputed from the logits.

No single weight of a micro-batch is right for such a head: each mean needs its own divisor. Whether the means here are what a
model's head computes is proven on the model, not assumed from its name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.precision import at_least_float32


@dataclass(frozen=True)
class Mean:
    """One mean of a head's loss.

    Attributes:
        count: batch on the host -> targets of this mean.
        total: (outputs, batch on the model's device) -> sum of the loss over these targets, a scalar tensor of at least float32.
    """

    count: Callable[[Batch], int]
    total: Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class MultiLossHead:
    """A kind of head: `entries` are the columns of a batch by which it is recognised, `means` its means.

    `one_width`: the counts depend on the padded width, so all micro-batches of a window need the same.
    """

    entries: frozenset[str]
    means: tuple[Mean, ...]
    one_width: bool = False


def _count_labels(batch: Batch, labels: str) -> int:
    return int((batch[labels] != IGNORED_LABEL).sum())


def _logits(outputs: Any, name: str) -> Tensor:
    logits = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    if logits is None:
        raise LossNotAdditive(f"the model returned no {name}, from which one mean of its loss is computed.")
    return at_least_float32(logits)


def _label_loss(outputs: Any, batch: Batch, labels: str, logits: str) -> Tensor:
    """Cross entropy of logits (..., classes) with labels (...), those of -100 left out."""
    scores = _logits(outputs, logits)
    return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), batch[labels].reshape(-1), reduction="sum")


def _count_positions(batch: Batch, positions: str) -> int:
    return int((batch[positions] < batch["input_ids"].shape[1]).sum())


def _position_loss(outputs: Any, batch: Batch, positions: str, logits: str) -> Tensor:
    """Half the cross entropy over the positions of a text; an answer beyond its end is left out, one before its begin is at 0."""
    scores = _logits(outputs, logits)
    if scores.dim() != 2:
        raise LossNotAdditive(f"{logits} have shape {list(scores.shape)}, not (samples, tokens).")
    width = scores.shape[1]
    return F.cross_entropy(scores, batch[positions].reshape(-1).clamp(0, width), ignore_index=width, reduction="sum") / 2


def _labelled(labels: str, logits: str) -> Mean:
    return Mean(partial(_count_labels, labels=labels), partial(_label_loss, labels=labels, logits=logits))


def _positioned(positions: str, logits: str) -> Mean:
    return Mean(partial(_count_positions, positions=positions), partial(_position_loss, positions=positions, logits=logits))


KINDS: dict[str, MultiLossHead] = {
    "start and end positions": MultiLossHead(
        frozenset({"input_ids", "start_positions", "end_positions"}),
        (_positioned("start_positions", "start_logits"), _positioned("end_positions", "end_logits")),
        one_width=True,
    ),
    "masked tokens and next sentences": MultiLossHead(
        frozenset({"labels", "next_sentence_label"}),
        (_labelled("labels", "prediction_logits"), _labelled("next_sentence_label", "seq_relationship_logits")),
    ),
    "masked tokens and sentence orders": MultiLossHead(
        frozenset({"labels", "sentence_order_label"}),
        (_labelled("labels", "prediction_logits"), _labelled("sentence_order_label", "sop_logits")),
    ),
}


def kind_of(entries: Batch) -> str | None:
    """The name of the kind of head for a batch with these entries (those that the model takes), if there is one."""
    return next((name for name, head in KINDS.items() if head.entries <= entries.keys()), None)
