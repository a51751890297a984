"""Label smoothing against torch's own mean in float64 and plain Python, alone and over splits of a window."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import helpers as h
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator

import hf_ga
from hf_ga.exact.plan import plan_by_sizes
from hf_ga.run.losses import SmoothedCrossEntropy

WINDOW = 16
SMOOTHINGS = (0.0, 0.1, 0.3)


def computed(logits, labels, smoothing, shifted=False):
    loss_fn, batch = SmoothedCrossEntropy(smoothing, shifted), {"labels": labels}
    loss, count = loss_fn(SimpleNamespace(logits=logits), batch)
    assert loss_fn.count_targets(batch) == float(count)
    return loss, float(count)


def torch_mean(logits, labels, smoothing, shifted=False):
    """torch's mean reduction in float64."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.double().flatten(0, -2), labels.flatten(), label_smoothing=smoothing)


def loop(logits, labels, smoothing):
    """(sum, count) by the formula, one target at a time."""
    total = count = 0.0
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        if label == h.IGNORED:
            continue
        log_sum = math.log(sum(math.exp(v) for v in row))
        of_classes = [log_sum - v for v in row]
        total += (1 - smoothing) * of_classes[label] + smoothing * sum(of_classes) / len(row)
        count += 1.0
    return total, count


def data(shape, ignored_share=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, h.NUM_CLASSES, generator=generator)
    labels = torch.randint(h.NUM_CLASSES, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored_share] = h.IGNORED
    return logits, labels


# -- one batch ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("shape", [(1,), (8, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_sum_and_count(smoothing, shape, dtype):
    logits, labels = data(shape)
    labels.view(-1)[0] = 1
    logits = logits.to(dtype)
    loss, count = computed(logits, labels, smoothing)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.dim() == 0
    tolerance = 1e-6 if dtype != torch.float64 else 1e-7
    by_loop = loop(logits.flatten(0, -2), labels.flatten(), smoothing)
    assert (float(loss), count) == (pytest.approx(by_loop[0], rel=tolerance), pytest.approx(by_loop[1], rel=1e-6))
    mean = float(loss.double()) / count
    assert mean == pytest.approx(float(torch_mean(logits, labels, smoothing)), rel=tolerance)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("shape", [(8, 9), (1, 2)], ids=str)
def test_shifted(smoothing, shape):
    logits, labels = data(shape)
    labels[0, 1] = 1
    loss, count = computed(logits, labels, smoothing, shifted=True)
    assert float(loss) / count == pytest.approx(float(torch_mean(logits, labels, smoothing, shifted=True)), rel=1e-6)
    labels[:, 0] = h.IGNORED  # never predicted: no matter
    other = computed(logits, labels, smoothing, shifted=True)
    assert (float(other[0]), other[1]) == (float(loss), count)
    if shape[0] > 1:  # control
        assert abs(float(loss) - float(computed(logits, labels, smoothing)[0])) > 1


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize(("shape", "shifted"), [((5,), False), ((3, 4), True), ((3, 1), True), ((0,), False)], ids=str)
def test_no_target_at_all(smoothing, shape, shifted):
    logits, labels = data(shape, ignored_share=1.1)
    if shape == (3, 1):
        labels[:] = 1  # but nothing predicts column 0
    loss, count = computed(logits.requires_grad_(), labels, smoothing, shifted)
    loss.backward()
    assert (float(loss.detach()), count) == (0.0, 0.0) and (logits.grad == 0).all()


# -- over the splits of a window --------------------------------------------------------------------------------------------------

LAYOUTS = {
    "1x16": h.by_number(16),
    "4x4": h.by_number(4),
    "16x1": h.by_number(1),
    "uneven": partial(plan_by_sizes, sizes=[7, 1, 5, 3]),
}


def few_targets():
    """Whole micro-batches without a target, and one class in three only."""
    samples = h.tag_samples(WINDOW)
    return [h.without_targets(s) if 3 <= i < 8 else s for i, s in enumerate(samples)]


# name: (builder, samples, smoothing)
CASES = {
    "tags, few targets": (h.bert_token_classifier, few_targets, 0.1),
    "GPT-2": (h.gpt2, partial(h.token_samples, WINDOW), 0.1),
    "masked LM": (h.bert_masked_lm, partial(h.token_samples, WINDOW), 0.1),
}


def window_of(samples, layout):
    lengths, sizes = [len(s["input_ids"]) for s in samples], {"global_batch_size": WINDOW, "shuffle": False}
    (window,) = hf_ga.WindowLoader(
        samples, h.pad_right, accelerator=Accelerator(), lengths=lengths, planner=LAYOUTS[layout], **sizes
    )
    return window


def of_torch(smoothing, shifted):
    """torch's own mean for the helpers, in the precision of the logits."""

    def loss_fn(outputs, batch):
        logits, labels = outputs.logits, batch["labels"]
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing), 1

    return loss_fn


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_any_split_is_the_full_batch(case):
    build, make_samples, smoothing = CASES[case]
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
        window = window_of(samples, layout)
        model.zero_grad()
        result = hf_ga.backward_window(Accelerator(gradient_accumulation_steps=4), model, window, loss_fn=loss_fn)
        h.assert_promise_1(h.gradients(model), grads32, grads64)
        assert result.loss == pytest.approx(mean, rel=1e-6)
        assert result.num_targets == pytest.approx(len(counted))
        micro_batches = [m.batch for m in window.micro_batches if (m.batch["labels"] != h.IGNORED).any()]  # or the mean is 0 / 0
        naive = h.relative_error(h.naive_gradient(model, micro_batches, len(micro_batches), reference), grads64)
        # The control itself is right where there is nothing to go wrong.
        assert naive < 1e-5 if layout == "1x16" else naive > 1e-3
