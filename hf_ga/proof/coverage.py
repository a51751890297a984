"""Probe batches with labels and weights that the few samples of a proof happen not to have: all
classes of a small head, tokens from all over a vocabulary, the smallest and the largest weight.

A loss with class weights or sample weights looks like a plain mean over its targets as long as all
samples have the same class or the same weight. So the proof repeats its test on these batches.
"""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ga.exact.batches import IGNORED_LABEL, Batch
from hf_ga.exact.forward import get_output
from hf_ga.proof.probes import ANSWER_POSITIONS, NUM_IN_A, SENTENCE_LABELS, is_target

MAX_LABEL_BATCHES = 10  # maximum number of batches to show the classes of a head
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
# Batch entries that cannot be sample weights.
NEVER_WEIGHTS = ("input_ids", "position_ids", "token_type_ids", *ANSWER_POSITIONS, *SENTENCE_LABELS)


def special_tokens(model: nn.Module) -> list[int]:
    """Return the sorted ids of the special tokens in a model's config (`pad_token_id`, ...).

    The proof does not use them as labels of its trial batches. A config entry may be one id, a list
    of ids, or None. Empty for a model without a config.
    """
    config = getattr(model, "config", None)
    token_ids = set()
    for name in SPECIAL_TOKENS:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple):
            token_ids |= set(value)
        else:
            token_ids.add(value)
    return sorted(token_id for token_id in token_ids if isinstance(token_id, int))


def num_classes(outputs: Any, labels: Tensor) -> int | None:
    """Return the number of classes that a model scores for each label, for a proof that then tests
    labels of all classes.

    Args:
        outputs: The outputs of the model.
        labels: Integer labels of the batch, of any shape.

    Returns:
        The last size of the logits, whose shape is (*labels.shape, classes). None if the model
        returned no logits of this shape. A caller must not guess then: a label that is not a class
        triggers a device-side assert on a GPU, which ends the process.
    """
    logits = get_output(outputs, "logits")
    if not isinstance(logits, Tensor) and isinstance(outputs, tuple) and len(outputs) > 1:
        logits = outputs[1]  # (loss, logits), as transformers returns without return_dict
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        return None
    return logits.shape[-1]


def with_other_labels(
    batch: Batch, num_classes: int, excluded_classes: Collection[int]
) -> Iterator[Batch]:
    """Yield copies of a probe batch in which every target has another label.

    Together, the copies contain all classes, or `MAX_LABEL_BATCHES` batches of evenly spaced
    classes if there are more. Labels increase over the batch, so the first samples (group A of a
    proof) have other classes than the last ones (group B). Ignored labels (-100) stay.

    Args:
        batch: The probe batch, with integer "labels" of shape (samples, ...).
        num_classes: Number of classes of the model's head.
        excluded_classes: Classes that are not used as labels, such as special tokens.

    Yields:
        Batches. None at all if there are fewer than two targets or two classes.
    """
    labels = batch["labels"]
    rows = labels.reshape(len(labels), -1)
    is_counted = rows != IGNORED_LABEL
    num_targets = int(is_counted.sum())
    num_targets_in_a = int(is_counted[:NUM_IN_A].sum())
    allowed_classes = np.setdiff1d(np.arange(num_classes), list(excluded_classes))
    if num_targets < 2 or len(allowed_classes) < 2:
        return
    batches_for_all_classes = -(-len(allowed_classes) // num_targets)  # rounded up
    num_batches = min(MAX_LABEL_BATCHES, batches_for_all_classes)
    if num_batches == MAX_LABEL_BATCHES:
        indices = np.linspace(0, len(allowed_classes) - 1, num_batches * num_targets)
        allowed_classes = allowed_classes[np.unique(indices.astype(int))]
    for classes in np.array_split(allowed_classes, num_batches):
        if num_batches == 1 and len(classes) == 2:  # two classes: one for A, one for B
            is_in_b = np.arange(num_targets) >= num_targets_in_a
            new_labels = classes[is_in_b.astype(int)]
        else:
            indices = np.linspace(0, len(classes) - 1, num_targets).round().astype(int)
            new_labels = classes[indices]
        changed = rows.clone()
        changed[is_counted] = torch.from_numpy(new_labels).to(changed.dtype)
        yield {**batch, "labels": changed.view_as(labels)}


def with_sorted_labels(batch: Batch, ignored_label: int) -> Batch:
    """Return a copy of a probe batch whose labels are sorted: the first samples get the smallest.

    Group A of a proof then has other classes than group B, although the classes of the head are
    unknown. Ignored labels stay.

    Args:
        batch: The probe batch, with integer "labels" of shape (samples, ...).
        ignored_label: The label that the head ignores, -100 or 0.
    """
    labels = batch["labels"].clone()
    targets = is_target(labels, ignored_label)
    labels[targets] = labels[targets].sort().values
    return {**batch, "labels": labels}


def with_extreme_values(batch: Batch, data: Batch, names: Collection[str]) -> Iterator[Batch]:
    """Yield copies of a probe batch with extreme values of one entry that may weight the loss.

    In each copy, one entry has its smallest value in the data for the first samples (group A of a
    proof), and its largest value for the others (group B). Entries are tried in alphabetical order.
    An entry may be a weight if it has one number per sample, or a floating-point number per token,
    whose zeros (padding) stay zeros.

    Args:
        batch: The probe batch.
        data: A collated batch of more samples, for the smallest and the largest values.
        names: The entries to try, each with one row per sample.

    Yields:
        Batches. Entries that have a single value in the data, labels, masks and token ids are
        skipped.
    """
    for name in sorted(names):
        value = batch.get(name)
        value_in_data = data.get(name)
        if name in ("labels", *NEVER_WEIGHTS) or "mask" in name:
            continue
        if not isinstance(value, Tensor) or not isinstance(value_in_data, Tensor):
            continue
        is_per_sample = value.dim() == 1
        is_per_token = value.dim() == 2 and value.is_floating_point()
        if not is_per_sample and not is_per_token:
            continue
        is_weight = value_in_data.isfinite()
        if is_per_token:
            is_weight &= value_in_data != 0  # padding has weight 0
        distinct_weights = value_in_data[is_weight].unique()  # sorted
        if len(distinct_weights) < 2:
            continue
        changed = value.clone()
        changed[:NUM_IN_A] = distinct_weights[0]
        changed[NUM_IN_A:] = distinct_weights[-1]
        if is_per_token:
            changed[value == 0] = 0
        yield {**batch, name: changed}
