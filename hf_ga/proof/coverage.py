"""Probe batches with other values than the few samples of a proof happen to have: all classes of a
small head, tokens from all over a vocabulary, the smallest and the largest weight in the data.

A loss that weights its classes, or its samples by a column, is the mean over its targets as long
as the samples have one class, or one weight.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import get_output
from hf_ga.proof.probes import NUM_IN_A, POSITIONS, SECOND_LABELS

MOST_ROUNDS = 10  # batches to show all classes of a head
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
NOT_A_TARGET = ("input_ids", "position_ids", "token_type_ids", *POSITIONS, *SECOND_LABELS)


def special_tokens(model: nn.Module) -> list[int]:
    """Return the special tokens that a model's config names; there may be several of a kind."""
    config = getattr(model, "config", None)
    found = set()
    for name in SPECIAL_TOKENS:
        value = getattr(config, name, None)
        found |= set(value) if isinstance(value, list | tuple) else {value}
    return sorted(token for token in found if isinstance(token, int))


def num_classes(outputs: Any, labels: Tensor) -> int | None:
    """Count the classes that a model scores for each label.

    Args:
        outputs: What the model returned.
        labels: Integers, of shape (...).

    Returns:
        The last size of its logits, of shape (..., classes). None if it returned none: a label that
        is not a class would end a GPU's process.
    """
    logits = get_output(outputs, "logits")
    if not isinstance(logits, Tensor) and isinstance(outputs, tuple) and len(outputs) > 1:
        logits = outputs[1]  # (loss, logits), as transformers returns without return_dict
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        return None
    return logits.shape[-1]


def with_other_labels(batch: Batch, classes: int, special: Collection[int]) -> Iterator[Batch]:
    """Yield the batch with other labels where it has any: together all classes, or spread-out ones
    if there are many. Those of A are smaller than those of B.

    Args:
        batch: Probe samples, those of A first.
        classes: Number of classes.
        special: Classes that are not used: special tokens.
    """
    labels = batch["labels"]
    rows = labels.reshape(len(labels), -1)
    is_target = rows != IGNORED_LABEL
    number = int(is_target.sum())
    allowed = np.setdiff1d(np.arange(classes), list(special))
    if number < 2 or len(allowed) < 2:
        return
    rounds = min(MOST_ROUNDS, -(-len(allowed) // number))
    if rounds == MOST_ROUNDS:
        spread = np.linspace(0, len(allowed) - 1, rounds * number)
        allowed = allowed[np.unique(spread.astype(int))]
    for part in np.array_split(allowed, rounds):
        values = part[np.linspace(0, len(part) - 1, number).round().astype(int)]
        if rounds == 1 and len(part) == 2:
            values = part[(np.arange(number) >= int(is_target[:NUM_IN_A].sum())).astype(int)]
        changed = rows.clone()
        changed[is_target] = torch.from_numpy(values).to(changed.dtype)
        yield {**batch, "labels": changed.view_as(labels)}


def with_extreme_values(batch: Batch, seen: Batch, names: Collection[str]) -> Iterator[Batch]:
    """Yield the batch with the smallest value that an entry has in the data for the samples of A,
    and the largest for the others; for one entry after the other.

    Args:
        batch: Probe samples, those of A first.
        seen: More samples of the data.
        names: Entries with a row for each sample, which the loss may depend on.
    """
    for name in sorted(names):
        value = batch.get(name)
        in_data = seen.get(name)
        if name in ("labels", *NOT_A_TARGET) or "mask" in name:
            continue
        if not isinstance(value, Tensor) or not isinstance(in_data, Tensor):
            continue
        has_one_each = value.dim() == 1
        has_weights_of_tokens = value.dim() == 2 and value.is_floating_point()
        if not has_one_each and not has_weights_of_tokens:
            continue
        is_weight = in_data.isfinite()
        if has_weights_of_tokens:
            is_weight &= in_data != 0  # padding has weight 0
        numbers = in_data[is_weight].unique()
        if len(numbers) < 2:
            continue
        changed = value.clone()
        changed[:NUM_IN_A] = numbers[0]
        changed[NUM_IN_A:] = numbers[-1]
        if has_weights_of_tokens:
            changed[value == 0] = 0
        yield {**batch, name: changed}
