"""Classes and samples with weights as (sum of weights x losses, sum of weights) in a loop of one's
own, against one float64 batch by hand.
"""

import helpers as h
import pytest
import torch
from accelerate import Accelerator
from forked import on_two_ranks, without_errors
from steps import train_step
from weighted import CLASS_WEIGHTS, unweighted_loss, weighted_loss, weighted_mean, weighted_rows
from windows import one_window, window_gradient

import hf_ga

pytestmark = pytest.mark.usefixtures("own_accelerator_state")
# Class 2 is 1 % of the samples: most micro-batches have none. One micro-batch of 8 has weight 0.
ROWS = {"count": 100, "rare": 37, "empty": range(40, 48)}


@pytest.mark.parametrize("size", [100, 8, 1])
def test_every_split_is_the_weighted_mean_of_the_batch(size):
    model = h.bert_classifier()
    rows = weighted_rows(**ROWS)
    loss64, grads64 = weighted_mean(model, rows)
    _, full = weighted_mean(model, rows, torch.float32)
    window = one_window(rows, size, shuffle=False)
    grads, result = window_gradient(model, window, loss_fn=weighted_loss)
    h.assert_promise_1(grads, full, grads64)
    assert result.loss == pytest.approx(loss64, rel=1e-6)
    weights = [float(CLASS_WEIGHTS[row["labels"]]) * row["weight"] for row in rows]
    assert result.num_targets == pytest.approx(sum(weights), rel=1e-6)
    plain = h.full_batch_gradient(model, h.pad_right(rows), loss_fn=unweighted_loss)
    assert h.relative_error(plain, grads64) > 1e-2, "control: without weights"
    if size == 8:
        parts = [m.batch for m in window.micro_batches if m.batch["weight"].any()]
        assert len(parts) == len(window.micro_batches) - 1
        means = h.naive_gradient(model, parts, len(parts), weighted_loss)
        assert h.relative_error(means, grads64) > 1e-2, "control: a mean of weighted means"


def test_a_window_of_weight_0_makes_no_step():
    model = h.bert_classifier()
    rows = weighted_rows(112, rare=37, empty=range(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    sizes = {"per_device_batch_size": 4, "global_batch_size": 16, "shuffle": False}
    windows = hf_ga.WindowLoader(rows, h.pad_right, accelerator=accelerator, **sizes)
    before = h.everything(model)["tensors"]
    skipped = []
    for window in windows:
        result = train_step(accelerator, model, optimizer, window, loss_fn=weighted_loss)
        skipped.append(result.skipped)
        if result.skipped:
            assert h.everything(model)["tensors"] == before
            assert (result.loss, result.num_targets) == (0.0, 0)
    assert skipped == [True] + [False] * 6
    assert h.everything(model)["tensors"] != before
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.slow("starts two processes")
def test_two_ranks():
    """One of them has the rare class."""
    model = h.bert_classifier()
    rows = weighted_rows(**ROWS)

    def work():
        window = one_window(rows, 8, shuffle=False)
        grads, result = window_gradient(model, window, loss_fn=weighted_loss)
        return grads, result.loss

    loss64, grads64 = weighted_mean(model, rows)
    _, full = weighted_mean(model, rows, torch.float32)
    for grads, loss in without_errors(on_two_ranks(work)):
        h.assert_promise_1(grads, full, grads64)
        assert loss == pytest.approx(loss64, rel=1e-6)
