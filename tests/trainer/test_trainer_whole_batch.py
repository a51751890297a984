"""`whole_batch` in a trainer of one's own: `compute_loss` sees all samples of a window. Each layout
makes the update of one batch.
"""

import helpers as h
import pairs
import pytest
import torch.nn.functional as F
from forked import on_two_ranks, without_errors
from trainers import LAYOUTS, weight_error
from transformers import Trainer

from hf_ga import ConfigError, ExactTrainer, ExactTrainerMixin

WINDOW = 16
ARGUMENTS = {"train_sampling_strategy": "sequential", "remove_unused_columns": False}


class HardestHalf(Trainer):
    """The mean of the larger half of the losses of a batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits, labels, reduction="none")
        loss = losses.topk((len(losses) + 1) // 2).values.mean()
        return (loss, outputs) if return_outputs else loss


class ExactHardestHalf(ExactTrainerMixin, HardestHalf):
    whole_batch = True


class Contrast(ExactTrainer):
    """Two forwards of the model in one loss, with the temperature of the model."""

    whole_batch = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        anchor, positive = (
            model(input_ids=inputs[name], attention_mask=inputs[f"{name}_mask"])
            for name in ("anchor", "positive")
        )
        anchor = anchor["vector"]
        positive = positive["vector"]
        return pairs.contrast(anchor, positive, model.log_scale.exp())


class OneText(pairs.Embedder):
    def __init__(self, dropout):
        super().__init__(dropout, returns_scale=False)

    def forward(self, input_ids, attention_mask):
        return {"vector": self.embed(input_ids, attention_mask)}


def hardest_half_of(model, rows):
    """Loss and gradient of one float64 batch."""
    model = pairs.copy.deepcopy(model).double()
    batch = h.pad_right(rows)
    labels = batch.pop("labels")
    losses = F.cross_entropy(model(**batch).logits, labels, reduction="none")
    loss = losses.topk(len(rows) // 2).values.mean()
    loss.backward()
    return loss.item(), h.gradients(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hardest_half_of_a_window(case, layout):
    given = case(h.bert_classifier, h.class_samples(44), dropout=0.0)
    loss64, grads64 = hardest_half_of(given.model, given.samples[:WINDOW])
    run = given.run(ExactHardestHalf, layout, **ARGUMENTS)
    assert h.relative_error(run.gradients[0], grads64) < 2e-6
    assert run.losses[0] == pytest.approx(loss64, rel=1e-5)
    if layout == (4, 4):
        plain = given.run(HardestHalf, layout, **ARGUMENTS)
        assert h.relative_error(plain.gradients[0], grads64) > 0.1, "control"


def pairs_trainer(case, layout):
    given = case(lambda dropout: h.seeded(lambda: OneText(dropout))(), pairs.pair_samples(40))
    return given.run(Contrast, layout, trainer={"data_collator": pairs.collate_pairs}, **ARGUMENTS)


@pytest.mark.slow("five runs")
def test_two_forwards_and_a_temperature(case):
    whole = pairs_trainer(case, (16, 1))
    assert "log_scale" in whole.gradients[0]
    for layout in ((4, 4), (1, 16)):
        assert weight_error(pairs_trainer(case, layout), whole) < 1e-6


@pytest.mark.slow("starts two processes")
def test_two_ranks(case):
    whole = pairs_trainer(case, (16, 1))

    def work():
        run = pairs_trainer(case, (2, 4))
        return run.weights[-1]

    for weights in without_errors(on_two_ranks(work)):
        weights = {name.removeprefix("module."): w for name, w in weights.items()}
        error = h.relative_error(weights, whole.weights[-1])
        assert error < 1e-6


def test_two_losses_are_refused(case):
    class Both(ExactHardestHalf):
        def loss_sums(self, outputs, batch):
            raise NotImplementedError

    with pytest.raises(ConfigError, match="leave loss_sums out"):
        case(h.bert_classifier, h.class_samples(16)).run(Both, **ARGUMENTS)
