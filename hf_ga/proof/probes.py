"""The probe batches of a proof, masked so that counting rules give different numbers, and the
comparison of their results.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_ga.errors import LossNotAdditive
from hf_ga.exact.batches import IGNORED_LABEL, Batch, is_padding_mask

# Limits of rounding errors. A parameter with a small gradient is compared with FLOOR times the norm
# over all parameters.
TOLERANCE = 2e-5
FLOOR = 1e-2
NUM_PROBE_SAMPLES = 6
NUM_IN_A = 2  # BatchNorm has no statistics of 1 sample
MANY_TARGETS = 4  # three of them are kept in B
POSITIONS = ("start_positions", "end_positions")
SECOND_LABELS = ("next_sentence_label", "sentence_order_label")


class Probe(NamedTuple):
    """The result of a forward and backward of a probe batch.

    Attributes:
        loss: The mean loss; with a `loss_fn` its sum.
        number: Targets that `loss_fn` counted; 0.0 without one.
        gradients: Of each trainable parameter.
    """

    loss: float
    number: float
    gradients: list[Tensor]


def separating_labels(batch: Batch, num_samples: int) -> dict[str, Any]:
    """Mask labels in a copy so that the rules count differently: samples of A keep column 0 and one
    more label, the others three labels without column 0. With one label per sample, the last
    sample's is masked. Float labels are unchanged.
    """
    labels = batch.get("labels")
    if (
        not isinstance(labels, Tensor)
        or labels.dim() == 0
        or labels.is_floating_point()
        or len(labels) != num_samples
    ):
        return dict(batch)
    labels = labels.clone()
    if labels[0].numel() == 1:
        labels[-1] = IGNORED_LABEL
        return {**batch, "labels": labels}
    of_samples = labels.view(num_samples, -1)  # labels may have several axes (pixels)
    for row, values in enumerate(of_samples):
        kept = (values[1:] != IGNORED_LABEL).nonzero().flatten() + 1
        kept = kept[: 1 if row < NUM_IN_A else 3]
        masked = torch.full_like(values, IGNORED_LABEL)
        masked[kept] = values[kept]
        if row < NUM_IN_A and len(kept):
            masked[0] = values[0] if values[0] != IGNORED_LABEL else values[kept[0]]
        values.copy_(masked)
    return {**batch, "labels": labels}


def separating_means(batch: Batch, num_samples: int) -> dict[str, Any]:
    """Mask also, in a copy, targets of a second mean, in different samples than the first: a start
    beyond the text in A, an end beyond it and a sentence label of -100 in B.

    A batch without such entries is unchanged.
    """
    input_ids = batch.get("input_ids")
    beyond = input_ids.shape[1] if isinstance(input_ids, Tensor) else 0
    start, end = POSITIONS
    masked = [(start, 0, beyond), (end, -1, beyond)]
    masked += [(name, -1, IGNORED_LABEL) for name in SECOND_LABELS]
    changed = dict(batch)
    for name, row, value in masked:
        targets = batch.get(name)
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            continue
        if len(targets) == num_samples:
            changed[name] = targets.clone()
            changed[name][row] = value
    return changed


def targets_per_row(batch: Batch, num_samples: int) -> np.ndarray:
    """Count the targets of each sample: labels that are not ignored, without column 0 if there are
    columns.
    """
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return np.ones(num_samples, np.int64)
    if len(labels) != num_samples:
        return np.ones(num_samples, np.int64)
    is_target = (labels != IGNORED_LABEL).reshape(num_samples, -1)
    if is_target.shape[1] > 1:
        is_target = is_target[:, 1:]
    return is_target.sum(1).numpy()


def has_enough_targets(batch: Batch, num_samples: int) -> bool:
    """Whether there are enough samples, and a quarter of them have enough targets to distinguish
    the rules.
    """
    if num_samples < 4 * NUM_PROBE_SAMPLES:
        return False
    labels = batch.get("labels")
    has_one_each = not isinstance(labels, Tensor) or labels.dim() == 1
    needed = 1 if has_one_each else MANY_TARGETS
    counts = np.sort(targets_per_row(batch, num_samples))
    return bool(counts[-num_samples // 4] >= needed)


def rows_with_targets(batch: Batch, num_samples: int, most: int) -> np.ndarray:
    """Choose rows with targets, as different as possible: of all lengths, and of all labels where
    each sample has one.

    Args:
        batch: Rows that are sorted by length.
        num_samples: Rows of the batch.
        most: How many to choose at most.

    Returns:
        Indices, in ascending order.

    Raises:
        LossNotAdditive: If no row has a target.
    """
    useful = np.flatnonzero(targets_per_row(batch, num_samples))
    if not len(useful):
        raise LossNotAdditive(
            f"none of {num_samples} samples has a target (all labels are {IGNORED_LABEL}): pass "
            "other samples."
        )
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.dim() == 1:
        values = labels.numpy()[useful]
        num_earlier_with_label = [int((values[:i] == values[i]).sum()) for i in range(len(values))]
        in_turns = useful[np.argsort(num_earlier_with_label, kind="stable")]
        return np.sort(in_turns[:most])
    return useful[np.unique(np.linspace(0, len(useful) - 1, most).astype(int))]


def applicable_rules(arguments: Batch) -> list[str]:
    """List the rules of `loss.COUNTING_RULES` that apply to these arguments of the model."""
    labels = arguments.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return ["samples"]
    if labels.dim() == 1:
        return ["labels", "samples"]
    attended = ["attended tokens"] if is_padding_mask(arguments.get("attention_mask")) else []
    return ["shifted labels", "labels", "samples", *attended]


def residual_of(probes: list[Probe], counts: Sequence[float], is_sum: bool) -> float:
    """Relative error of the weighted sum of A and B against the weighted A+B."""
    # A sum may have number 0 (class weights, signed weights), a mean may not.
    counted = any(counts) if is_sum else all(counts)
    scale = max(map(abs, counts))
    if not counted or (is_sum and abs(counts[0] + counts[1] - counts[2]) > TOLERANCE * scale):
        return float("inf")
    weights = [1.0] * 3 if is_sum else list(map(float, counts))
    a, b, whole = (loss * weight for (loss, _, _), weight in zip(probes, weights, strict=True))
    pairs = (  # one parameter at a time: weighted copies of all gradients need too much memory
        (of_a * weights[0] + of_b * weights[1], of_whole * weights[2])
        for of_a, of_b, of_whole in zip(*(gradients for _, _, gradients in probes), strict=True)
    )
    return _largest_error(a + b, whole, pairs)


def relative_error(probe: Probe, reference: Probe) -> float:
    """The largest relative difference of the loss and of every parameter's gradient (with the
    floor); a NaN counts as infinite.
    """
    pairs = zip(probe[2], reference[2], strict=True)
    return _largest_error(probe[0], reference[0], pairs)


def _largest_error(
    loss: float, reference: float, gradients: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """See `relative_error`. gradients: of each parameter, with the one to compare it with."""
    of_loss = abs(loss - reference) / max(abs(reference), 1e-12)
    norms = [torch.stack([(a - b).norm(), b.norm()]) for a, b in gradients]
    distance, size = torch.stack(norms).double().cpu().unbind(1)
    scale = size + FLOOR * size.norm()
    worst = torch.maximum(
        (distance / scale.clamp(min=1e-30)).max(), torch.tensor(of_loss).double()
    )  # propagates NaN, unlike max()
    return float(worst.nan_to_num(nan=float("inf")))


def same_shapes(batch: Batch, other: Batch) -> bool:
    """Whether all tensors of two batches have equal shapes."""
    return all(
        not isinstance(v, Tensor) or v.shape == getattr(other.get(name), "shape", None)
        for name, v in batch.items()
    )
