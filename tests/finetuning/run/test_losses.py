"""Label smoothing against the formula in plain Python. tests/finetuning/run/test_generation.py has the
gradient of a split.
"""

import math
from types import SimpleNamespace

import helpers as h
import pytest
import torch

from hf_ga.finetuning.run.losses import WeightedCrossEntropy


def computed(logits, labels, smoothing, shifted):
    loss_fn = WeightedCrossEntropy(smoothing, shifted)
    batch = {"labels": labels}
    loss, count = loss_fn(SimpleNamespace(logits=logits), batch)
    return loss, float(count)


def by_formula(logits, labels, smoothing, shifted):
    """(sum, count), one target at a time."""
    if shifted:
        logits = logits[:, :-1]
        labels = labels[:, 1:]
    total = count = 0.0
    for row, label in zip(
        logits.double().flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True
    ):
        if label != h.IGNORED:
            log_sum = math.log(sum(math.exp(v) for v in row))
            of_classes = [log_sum - v for v in row]
            total += (1 - smoothing) * of_classes[label] + smoothing * sum(of_classes) / len(row)
            count += 1.0
    return total, count


def data(shape, ignored_share=0.3):
    logits = 3 * torch.randn(*shape, h.NUM_CLASSES)
    labels = torch.randint(h.NUM_CLASSES, shape)
    labels[torch.rand(shape) < ignored_share] = h.IGNORED
    return logits, labels


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sum_and_count(smoothing, shifted, dtype):
    logits, labels = data((8, 9))
    logits = logits.to(dtype)
    loss, count = computed(logits, labels, smoothing, shifted)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.dim() == 0
    total, number = by_formula(logits, labels, smoothing, shifted)
    assert (float(loss), count) == (
        pytest.approx(total, rel=1e-6 if dtype != torch.float64 else 1e-12),
        number,
    )
    assert abs(by_formula(logits, labels, smoothing + 0.01, shifted)[0] - total) > 1e-3, "control"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_classes_are_those_of_torch(smoothing):
    """The weighted mean of torch; a row of weight w counts as w rows."""
    logits, labels = data((6, 5))
    logits = logits.double()
    class_weights = (0.5, 1.0, 20.0)
    loss_fn = WeightedCrossEntropy(smoothing, False, class_weights)
    loss, weight = loss_fn(SimpleNamespace(logits=logits), {"labels": labels})
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        labels.flatten(),
        torch.tensor(class_weights, dtype=torch.float64),
        label_smoothing=smoothing,
    )
    assert float(loss / weight) == pytest.approx(float(expected), rel=1e-12)
    numbers = [0, 1, 3, 1, 2, 0]
    weighted = {"labels": labels, "row_weights": torch.tensor(numbers, dtype=torch.float32)}
    repeated = [row for row, number in enumerate(numbers) for _ in range(number)]
    for found, exact in zip(
        loss_fn(SimpleNamespace(logits=logits), weighted),
        loss_fn(SimpleNamespace(logits=logits[repeated]), {"labels": labels[repeated]}),
        strict=True,
    ):
        assert float(found) == pytest.approx(float(exact), rel=1e-12)
        assert float(found) != pytest.approx(float(loss), rel=1e-2), "control: without weights"


@pytest.mark.parametrize(
    ("shape", "shifted"), [((5,), False), ((3, 4), True), ((3, 1), True), ((0,), False)], ids=str
)
def test_no_target_at_all(shape, shifted):
    logits, labels = data(shape, ignored_share=1.1)
    if shape == (3, 1):
        labels[:] = 1  # but nothing predicts column 0
    loss, count = computed(logits.requires_grad_(), labels, 0.1, shifted)
    loss.backward()
    assert (float(loss.detach()), count) == (0.0, 0.0)
    assert (logits.grad == 0).all()
