"""Label smoothing against the formula in plain Python, and over splits of a window against torch's own mean in float64."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from windows import one_window, window_gradient

from hf_ga.exact.plan import plan_by_sizes
from hf_ga.run.losses import SmoothedCrossEntropy

WINDOW = 16


def computed(logits, labels, smoothing, shifted):
    loss_fn, batch = SmoothedCrossEntropy(smoothing, shifted), {"labels": labels}
    loss, count = loss_fn(SimpleNamespace(logits=logits), batch)
    assert loss_fn.count_targets(batch) == float(count)
    return loss, float(count)


def by_formula(logits, labels, smoothing, shifted):
    """(sum, count), one target at a time."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = count = 0.0
    for row, label in zip(logits.double().flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True):
        if label != h.IGNORED:
            log_sum = math.log(sum(math.exp(v) for v in row))
            of_classes = [log_sum - v for v in row]
            total += (1 - smoothing) * of_classes[label] + smoothing * sum(of_classes) / len(row)
            count += 1.0
    return total, count


def data(shape, ignored_share=0.3):
    logits, labels = 3 * torch.randn(*shape, h.NUM_CLASSES), torch.randint(h.NUM_CLASSES, shape)
    labels[torch.rand(shape) < ignored_share] = h.IGNORED
    return logits, labels


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sum_and_count(smoothing, shifted, dtype):
    logits, labels = data((8, 9))
    logits = logits.to(dtype)
    loss, count = computed(logits, labels, smoothing, shifted)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.dim() == 0
    total, number = by_formula(logits, labels, smoothing, shifted)
    assert (float(loss), count) == (pytest.approx(total, rel=1e-6 if dtype != torch.float64 else 1e-12), number)
    assert abs(by_formula(logits, labels, smoothing + 0.01, shifted)[0] - total) > 1e-3, "control"


@pytest.mark.parametrize(("shape", "shifted"), [((5,), False), ((3, 4), True), ((3, 1), True), ((0,), False)], ids=str)
def test_no_target_at_all(shape, shifted):
    logits, labels = data(shape, ignored_share=1.1)
    if shape == (3, 1):
        labels[:] = 1  # but nothing predicts column 0
    loss, count = computed(logits.requires_grad_(), labels, 0.1, shifted)
    loss.backward()
    assert (float(loss.detach()), count) == (0.0, 0.0) and (logits.grad == 0).all()


LAYOUTS = {"1x16": 16, "16x1": 1, "uneven": partial(plan_by_sizes, sizes=[7, 1, 5, 3])}


def few_targets():
    """Whole micro-batches without a target, and one class in three only."""
    samples = h.tag_samples(WINDOW)
    return [h.without_targets(s) if 3 <= i < 8 else s for i, s in enumerate(samples)]


CASES = {"tags, few targets": (h.bert_token_classifier, few_targets), "GPT-2": (h.gpt2, partial(h.token_samples, WINDOW))}


def of_torch(smoothing, shifted):
    """torch's own mean for the helpers, in the precision of the logits."""
    cut = slice(None, -1) if shifted else slice(None)
    return lambda outputs, batch: (
        F.cross_entropy(outputs.logits[:, cut].flatten(0, 1), batch["labels"][:, shifted:].flatten(), label_smoothing=smoothing),
        1,
    )


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_any_split_is_the_full_batch(case):
    (build, make_samples), smoothing = CASES[case], 0.1
    model, samples = build(), make_samples()
    batch, shifted = h.pad_right(samples), isinstance(model, h.CAUSAL)
    reference, loss_fn = of_torch(smoothing, shifted), SmoothedCrossEntropy(smoothing, shifted)
    grads64 = h.full_batch_gradient(model, batch, loss_fn=reference)
    grads32 = h.full_batch_gradient(model, batch, torch.float32, loss_fn=reference)
    with torch.no_grad():
        mean = float(h.mean_loss(copy.deepcopy(model).double(), batch, reference))
    labels = batch["labels"][:, 1:] if shifted else batch["labels"]
    counted = labels[labels != h.IGNORED].tolist()
    for layout in LAYOUTS:
        window = one_window(samples, LAYOUTS[layout], lengths=[len(s["input_ids"]) for s in samples])
        grads, result = window_gradient(model, window, loss_fn=loss_fn)
        h.assert_promise_1(grads, grads32, grads64)
        assert result.loss == pytest.approx(mean, rel=1e-6)
        assert result.num_targets == pytest.approx(len(counted))
        micro_batches = [m.batch for m in window.micro_batches if (m.batch["labels"] != h.IGNORED).any()]  # or the mean is 0 / 0
        naive = h.relative_error(h.naive_gradient(model, micro_batches, len(micro_batches), reference), grads64)
        # The control itself is right where there is nothing to go wrong.
        assert naive < 1e-5 if layout == "1x16" else naive > 1e-3
