"""The probe batches of a proof, with labels masked so that counting rules give different numbers of
targets, and the comparison of losses and gradients.

A probe batch has `NUM_PROBE_SAMPLES` samples: the first `NUM_IN_A` are group A, the others are
group B. A proof compares the losses and gradients of A, of B, and of both together (A+B).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch, is_padding_mask
from hf_ga.exact.loss import POSITIVE_LABELS

# Maximum relative error of a loss or a gradient that may be rounding. The error of a parameter's
# gradient is relative to its own norm plus FLOOR times the norm of the gradient of all parameters.
TOLERANCE = 2e-5
FLOOR = 1e-2
NUM_PROBE_SAMPLES = 6
NUM_IN_A = 2  # BatchNorm has no statistics of 1 sample
# Targets of each sample that are kept in group B, where samples have several.
NUM_TARGETS_IN_B = 3
MANY_TARGETS = NUM_TARGETS_IN_B + 1
ANSWER_POSITIONS = ("start_positions", "end_positions")
SENTENCE_LABELS = ("next_sentence_label", "sentence_order_label")


class ProbeResult(NamedTuple):
    """Loss and gradient of one forward and backward of a probe batch, a trial batch of a proof.

    Attributes:
        loss: The mean loss of the model's head; with a `loss_fn` the sum that it returned.
        num_targets: The number of targets that `loss_fn` returned; 0.0 without a `loss_fn`.
        gradients: The gradient of each trainable parameter.
    """

    loss: float
    num_targets: float
    gradients: list[Tensor]


def integer_labels(batch: Batch, num_samples: int) -> Tensor | None:
    """Return the "labels" of a batch if they are integers with one row per sample, else None."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return None
    return labels if len(labels) == num_samples else None


def separating_labels(
    batch: Batch, num_samples: int, ignored_label: int = IGNORED_LABEL
) -> dict[str, Any]:
    """Mask some labels of a probe batch, so that counting rules find different numbers of targets.

    With several labels per sample, a sample of group A keeps its label in column 0 and one more; a
    sample of group B keeps three labels outside of column 0. (A causal language model does not
    predict column 0, so "shifted labels" counts fewer targets in A than "labels" does.) With one
    label per sample, the last sample's label is masked.

    Args:
        batch: The probe batch of a proof. It is not changed.
        num_samples: Its number of samples.
        ignored_label: The label that the head ignores, -100 or 0 (see `is_target`).

    Returns:
        A copy with masked labels. They are -100, or 0 if the head ignores that and the batch has no
        labels of -100, which the head may not support. Unchanged if it has no labels, if they are
        floating-point, or if they do not have one row per sample.
    """
    labels = integer_labels(batch, num_samples)
    if labels is None:
        return dict(batch)
    labels = labels.clone()
    has_masked_labels = bool((labels == IGNORED_LABEL).any())
    mask_label = IGNORED_LABEL if has_masked_labels else ignored_label
    if labels[0].numel() == 1:
        labels[-1] = mask_label
        return {**batch, "labels": labels}
    labels_by_sample = labels.view(num_samples, -1)  # labels may have several dims (pixels)
    for sample, row in enumerate(labels_by_sample):
        is_in_a = sample < NUM_IN_A
        kept_columns = is_target(row[1:], ignored_label).nonzero().flatten() + 1
        kept_columns = kept_columns[: 1 if is_in_a else NUM_TARGETS_IN_B]
        masked = torch.full_like(row, mask_label)
        masked[kept_columns] = row[kept_columns]
        if is_in_a and len(kept_columns):
            has_first_label = is_target(row[0], ignored_label)
            masked[0] = row[0] if has_first_label else row[kept_columns[0]]
        row.copy_(masked)  # a view: changes `labels`
    return {**batch, "labels": labels}


def separating_means(batch: Batch, num_samples: int) -> dict[str, Any]:
    """Mask targets of a head whose loss is a sum of two means, so that both count differently.

    For a question-answering head: the start position of the first sample (group A) and the end
    position of the last sample (group B) are set beyond the text, where they are ignored. For a
    pre-training head: the sentence label of the last sample is set to -100.

    Args:
        batch: The probe batch of a proof. It is not changed.
        num_samples: Its number of samples.

    Returns:
        A copy with masked targets. Unchanged if the batch has none of these entries.
    """
    input_ids = batch.get("input_ids")
    beyond_text = input_ids.shape[1] if isinstance(input_ids, Tensor) else 0
    start, end = ANSWER_POSITIONS
    masked_targets = [(start, 0, beyond_text), (end, -1, beyond_text)]
    masked_targets += [(name, -1, IGNORED_LABEL) for name in SENTENCE_LABELS]
    changed = dict(batch)
    for name, sample, new_target in masked_targets:
        targets = batch.get(name)
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            continue
        if len(targets) == num_samples:
            changed[name] = targets.clone()
            changed[name][sample] = new_target
    return changed


def is_target(labels: Tensor, ignored_label: int) -> Tensor:
    """Return which labels are targets, as a bool tensor of the same shape: those that are not -100,
    or, if the head ignores 0, those greater than 0.
    """
    return labels > 0 if ignored_label == 0 else labels != ignored_label


def targets_per_sample(
    batch: Batch, num_samples: int, ignored_label: int = IGNORED_LABEL
) -> np.ndarray:
    """Count the targets of each sample of a batch: the labels that the head does not ignore.

    A proof chooses its samples by this count. Where samples have several labels, column 0 is not
    counted, because a causal language model does not predict it.

    Args:
        batch: The batch.
        num_samples: Its number of samples.
        ignored_label: The label that the head ignores, -100 or 0 (see `is_target`).

    Returns:
        int64, of shape (samples,). All ones if the batch has no integer labels with one row per
        sample: then each sample counts as one target.
    """
    labels = integer_labels(batch, num_samples)
    if labels is None:
        return np.ones(num_samples, np.int64)
    counted = is_target(labels, ignored_label).reshape(num_samples, -1)
    if counted.shape[1] > 1:
        counted = counted[:, 1:]
    return counted.sum(1).numpy()


def has_enough_targets(batch: Batch, num_samples: int, ignored_label: int = IGNORED_LABEL) -> bool:
    """Whether the samples of a batch suffice to choose the probe samples of a proof from.

    That takes at least four times as many samples as a probe batch has. A quarter of them must have
    enough targets for `separating_labels`: one, or `MANY_TARGETS` if samples have several labels.
    """
    if num_samples < 4 * NUM_PROBE_SAMPLES:
        return False
    labels = batch.get("labels")
    has_one_label_each = not isinstance(labels, Tensor) or labels.dim() == 1
    min_targets = 1 if has_one_label_each else MANY_TARGETS
    sorted_counts = np.sort(targets_per_sample(batch, num_samples, ignored_label))
    return bool(sorted_counts[-num_samples // 4] >= min_targets)


def rows_with_targets(
    batch: Batch, num_samples: int, max_rows: int, ignored_label: int = IGNORED_LABEL
) -> np.ndarray:
    """Choose the probe samples of a proof: rows of a batch with targets, as different as possible.

    With one label per sample, labels are chosen round-robin, so that all classes are present if
    there is room for them. Otherwise the rows are evenly spaced, so that all lengths are present.

    Args:
        batch: A collated batch whose samples are sorted by length.
        num_samples: Its number of samples.
        max_rows: The maximum number of rows to choose.
        ignored_label: The label that the head ignores, -100 or 0 (see `is_target`).

    Returns:
        Row indices in ascending order.

    Raises:
        LossNotAdditive: If no row has a target.
    """
    candidates = np.flatnonzero(targets_per_sample(batch, num_samples, ignored_label))
    if not len(candidates):
        raise LossNotAdditive(
            f"none of {num_samples} samples has a target (all labels are {ignored_label}): pass "
            "other samples."
        )
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 1:
        values = labels.numpy()[candidates]
        # How often the label of each candidate occurs before it: 0 for the first of each label,
        # 1 for the second, and so on. Sorted by this number, labels are round-robin.
        num_before = [int((values[:i] == values[i]).sum()) for i in range(len(values))]
        round_robin = candidates[np.argsort(num_before, kind="stable")]
        return np.sort(round_robin[:max_rows])
    evenly_spaced = np.linspace(0, len(candidates) - 1, max_rows).astype(int)
    return candidates[np.unique(evenly_spaced)]


def applicable_rules(arguments: Batch, ignored_label: int = IGNORED_LABEL) -> list[str]:
    """List the rules by which a model's head may count its targets; a proof tests each of them.

    Args:
        arguments: The arguments of the model's forward by name. Shape and dtype of "labels" decide,
            and whether "attention_mask" is a 0/1 mask of tokens.
        ignored_label: The label that the head ignores. If 0, only the labels greater than 0 can be
            its targets.

    Returns:
        Keys of `loss.COUNTING_RULES`.
    """
    if ignored_label == 0:
        return [POSITIVE_LABELS]
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return ["samples"]
    if labels.dim() == 1:
        return ["labels", "samples"]
    rules = ["shifted labels", "labels", "samples"]
    if is_padding_mask(arguments.get("attention_mask")):
        rules.append("attended tokens")
    return rules


def additivity_error(
    results: Sequence[ProbeResult], num_targets: Sequence[float], is_sum: bool
) -> float:
    """Compute the relative error of a counting rule in a proof: do A and B add up to A+B?

    A and B are two groups of samples, A+B is both together. Tests n(A+B) loss(A+B) = n(A) loss(A) +
    n(B) loss(B), where n is the number of targets, and the same for the gradient of each parameter.
    Losses that are sums are added without n.

    Args:
        results: Losses and gradients of the probe batches A, B and A+B.
        num_targets: The numbers of targets of A, B and A+B by the counting rule under test.
        is_sum: Whether the losses are sums over targets (of a `loss_fn`), not means.

    Returns:
        The largest relative error of the loss and of any parameter's gradient. Infinity if a mean
        is over no targets, or if the numbers of targets of sums do not add up themselves.
    """
    # A sum may have 0 targets (class weights of 0, weights of both signs), a mean may not.
    are_valid = any(num_targets) if is_sum else all(num_targets)
    if not are_valid:
        return float("inf")
    in_a, in_b, in_both = num_targets
    largest = max(map(abs, num_targets))
    if is_sum and abs(in_a + in_b - in_both) > TOLERANCE * largest:
        return float("inf")
    weights = [1.0] * 3 if is_sum else list(map(float, num_targets))
    weight_a, weight_b, weight_both = weights
    a, b, both = results
    loss = a.loss * weight_a + b.loss * weight_b
    expected_loss = both.loss * weight_both
    # Lazily, one parameter at a time: weighted copies of all gradients need too much memory.
    gradient_pairs = (
        (grad_a * weight_a + grad_b * weight_b, grad_both * weight_both)
        for grad_a, grad_b, grad_both in zip(a.gradients, b.gradients, both.gradients, strict=True)
    )
    return _largest_error(loss, expected_loss, gradient_pairs)


def relative_error(result: ProbeResult, reference: ProbeResult) -> float:
    """Return the largest relative error of a probe batch's loss and of any parameter's gradient.

    The error of a gradient is relative to its own norm plus `FLOOR` times the norm over all
    parameters, so that the rounding of a tiny gradient does not count. NaN counts as infinity.
    """
    gradient_pairs = zip(result.gradients, reference.gradients, strict=True)
    return _largest_error(result.loss, reference.loss, gradient_pairs)


def _largest_error(
    loss: float, reference_loss: float, gradient_pairs: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Compute what `relative_error` returns.

    Args:
        loss: The loss.
        reference_loss: The loss to compare it with.
        gradient_pairs: For each parameter, its gradient and the one to compare it with.
    """
    loss_error = abs(loss - reference_loss) / max(abs(reference_loss), 1e-12)
    norms = [
        torch.stack([(gradient - reference).norm(), reference.norm()])
        for gradient, reference in gradient_pairs
    ]
    distances, sizes = torch.stack(norms).double().cpu().unbind(1)
    scales = sizes + FLOOR * sizes.norm()
    gradient_error = (distances / scales.clamp(min=1e-30)).max()
    # torch.maximum propagates NaN, unlike Python's max.
    worst = torch.maximum(gradient_error, torch.tensor(loss_error).double())
    return float(worst.nan_to_num(nan=float("inf")))


def same_shapes(batch: Batch, other: Batch) -> bool:
    """Whether each tensor of a batch has the same shape as the entry of that name in another
    batch.
    """
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            continue
        other_shape = getattr(other.get(name), "shape", None)
        if value.shape != other_shape:
            return False
    return True
