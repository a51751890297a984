"""`loss_sums` in a trainer of one's own: classes and samples with weights, against one float64 batch
by hand.
"""

import helpers as h
import pytest
import torch
from forked import on_two_ranks, without_errors
from trainers import LAYOUTS
from weighted import unweighted_loss, weighted_loss, weighted_mean, weighted_rows

from hf_ga import DataError, ExactTrainer, LossNotAdditive

WINDOW = 16
# Class 2 once in the first window; its second micro-batch of 4 has weight 0.
ROWS = {"count": 44, "rare": 9, "empty": range(4, 8)}
ARGUMENTS = {"train_sampling_strategy": "sequential", "remove_unused_columns": False}


class Weighted(ExactTrainer):
    def loss_sums(self, outputs, batch):
        return weighted_loss(outputs, batch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_split_is_the_weighted_mean_of_the_batch(case, layout):
    given = case(h.bert_classifier, weighted_rows(**ROWS), dropout=0.0)
    rows = given.samples[:WINDOW]
    loss64, grads64 = weighted_mean(given.model, rows)
    _, full = weighted_mean(given.model, rows, torch.float32)
    run = given.run(Weighted, layout, **ARGUMENTS)
    h.assert_promise_1(run.gradients[0], full, grads64)
    assert run.losses[0] == pytest.approx(loss64, rel=1e-5)
    plain = h.full_batch_gradient(given.model, h.pad_right(rows), loss_fn=unweighted_loss)
    assert h.relative_error(plain, grads64) > 1e-2, "control: without weights"


def test_evaluation_reports_the_weighted_mean_of_a_batch(case):
    given = case(h.bert_classifier, weighted_rows(**ROWS), dropout=0.0)
    rows = given.samples[:8]
    more = {"trainer": {"eval_dataset": rows}, "per_device_eval_batch_size": 8}
    trainer = given.make(Weighted, **more, **ARGUMENTS)
    loss64, _ = weighted_mean(given.model, rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss64, rel=1e-5)


@pytest.mark.slow("starts two processes")
def test_two_ranks(case):
    """Gradients and logged losses are those of one batch on each rank."""
    given = case(h.bert_classifier, weighted_rows(**ROWS), dropout=0.0)
    rows = given.samples[:WINDOW]
    loss64, grads64 = weighted_mean(given.model, rows)
    _, full = weighted_mean(given.model, rows, torch.float32)

    def work():
        run = given.run(Weighted, (2, 4), **ARGUMENTS)
        return run.gradients[0], run.losses

    for rank, (grads, losses) in enumerate(without_errors(on_two_ranks(work))):
        grads = {name.removeprefix("module."): g for name, g in grads.items()}
        h.assert_promise_1(grads, full, grads64)
        if rank == 0:  # the other logs nothing
            assert losses[0] == pytest.approx(loss64, rel=1e-5)


@pytest.mark.slow("starts two processes")
def test_a_refusal_on_one_rank_is_raised_on_both(case):
    """Although the other rank waits for the window's sums."""
    given = case(h.bert_classifier, weighted_rows(**ROWS), dropout=0.0)

    class MeanOnRank1(ExactTrainer):
        def loss_sums(self, outputs, batch):
            total, number = weighted_loss(outputs, batch)
            return (total, number) if self.args.process_index == 0 else (total / number, number)

    first, second = on_two_ranks(lambda: given.run(MeanOnRank1, (2, 4), **ARGUMENTS))
    assert second.startswith("LossNotAdditive: the sum that the loss function returns")
    assert first.startswith("ProcessFailed: process 1 failed: LossNotAdditive: the sum that")


def test_a_window_of_weight_0_changes_nothing(case):
    given = case(h.bert_classifier, weighted_rows(44, rare=20, empty=range(WINDOW)))
    run = given.run(Weighted, **ARGUMENTS)
    first = dict(given.model.named_parameters())
    assert all(torch.equal(run.weights[0][name], first[name]) for name in first)
    assert run.losses[0] == 0.0
    assert all(loss > 0 for loss in run.losses[1:3])
    with pytest.raises(DataError, match="no targets"):
        given.run(Weighted, fp16=True, **ARGUMENTS)


def test_a_removed_column_is_explained(case):
    """Control: the runs above keep it."""
    with pytest.raises(KeyError, match="weight") as error:
        case(h.bert_classifier, weighted_rows(**ROWS)).run(Weighted)
    assert "remove_unused_columns=False" in error.value.__notes__[0]


def test_a_number_that_was_raised_is_refused(case):
    """The number of samples of class 2, at least 1: a window without raised ones is the control."""

    class Raised(ExactTrainer):
        def loss_sums(self, outputs, batch):
            total, _ = unweighted_loss(outputs, batch)
            return total, (batch["labels"] == 2).sum().clamp(min=1)

    given = case(h.bert_classifier, weighted_rows(**ROWS), dropout=0.0)
    with pytest.raises(LossNotAdditive, match="two halves together"):
        given.run(Raised, **ARGUMENTS)
